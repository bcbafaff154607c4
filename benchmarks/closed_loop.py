"""Closed-loop decoding at fixed loads: C requests are kept running, tokens are counted in a window.

One engine serves every ForeSpark policy in turn (`--policies`), so that they share weights, graphs
and step prices; stock methods and the target alone take an engine each (`--method`). The order of
prompts is the same for every run. Natural ends of answers; greedy, or sampled with a seed for every
request (`--temperature`).

Writes one JSON record: per run the load, output tokens/s, tokens/s per user, and the engine's own
counters over the window. Runs that the output file holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

from forespark.benchmarks.engine import (
    COUNTERS,
    add_engine_arguments,
    add_run_arguments,
    between,
    check,
    counters,
    start_engine,
    use_policy,
)
from forespark.benchmarks.held import (
    guarded,
    held_record,
    missing,
    planned,
    run_all,
    save,
    settings,
)
from forespark.benchmarks.provenance import provenance
from forespark.benchmarks.workloads import (
    FORMATS,
    Prompts,
    Workload,
    by_category,
    read_workload,
    tokenized,
)

__all__ = ["COUNTERS", "ClosedLoop", "add_engine_arguments", "start", "use_policy"]
SETTINGS = ("method", "tokens", "temperature", "seconds", "warm_up", "max_tokens",
            "longest_prompt", "prompts", "dtype", "max_model_len", "max_num_seqs",
            "max_num_batched_tokens", "enforce_eager")  # fmt: skip


class ClosedLoop:
    """Keeps `load` requests running in one engine."""

    def __init__(
        self, llm: Any, prompts: Prompts, max_tokens: int, temperature: float = 0.0
    ) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm, self._engine = llm, llm.llm_engine
        self._params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._prompts = prompts
        self._runs = 0
        self._numbers = itertools.count()
        self._alive: dict[str, int] = {}  # request -> its prompt
        self._begun: set[str] = set()  # has its first token, which no draft led to
        self._seen: list[tuple[str | None, int, int]] = []  # category, tokens, 1 for the step

    def run(self, load: int, warm_up: float, seconds: float) -> dict[str, Any]:
        """One run; requests still alive at its end are aborted."""
        self.fill(load, warm_up)
        self._seen.clear()
        before = counters(self._llm)
        tokens, finished, duration = self.keep(seconds)
        after = counters(self._llm)
        self.drain()
        found = {
            "load": load,
            "output_throughput": tokens / duration,
            "tokens_per_user": tokens / duration / load,
            "finished": finished,
            "duration": duration,
            "counters": between(before, after),
        }
        categories = by_category(self._seen)
        return found | ({"categories": categories} if categories else {})

    def fill(self, load: int, seconds: float) -> None:
        """Bring `load` requests up and keep them running for `seconds`."""
        self._runs += 1
        self._numbers = itertools.count()
        self._alive.clear()
        self._begun.clear()
        for _ in range(load):
            self._add()
        self.keep(seconds)

    def keep(self, seconds: float) -> tuple[int, int, float]:
        """Go on for at least `seconds`: (tokens, finished requests, seconds)."""
        begin = now = time.perf_counter()
        tokens = finished = 0
        while now - begin < seconds:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                name, count = output.request_id, len(output.outputs[0].token_ids)
                tokens += count
                if name in self._begun and count:
                    self._seen.append((self._prompts.categories[self._alive[name]], count, 1))
                elif count:
                    self._begun.add(name)
                if output.finished:
                    finished += 1
                    self._alive.pop(name, None)
                    self._begun.discard(name)
                    self._add()
        return tokens, finished, now - begin

    def drain(self) -> None:
        """Abort what is alive and wait until nothing runs."""
        self._engine.abort_request(list(self._alive))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self) -> None:
        number = next(self._numbers)
        name, prompt = f"{self._runs}-{number}", number % len(self._prompts.ids)
        self._alive[name] = prompt
        params = self._params
        if params.temperature > 0:  # the same draws of a request for every method
            params = params.clone()
            params.seed = number
        self._engine.add_request(name, {"prompt_token_ids": self._prompts.ids[prompt]}, params)


def start(args: argparse.Namespace, kind: str = "auto") -> tuple[Any, Prompts]:
    """The engine that `args` (`add_engine_arguments`) describe, and the prompts' token ids.

    What cannot be read or run is refused before the engine starts.
    """
    check(args)
    prompts = prepare(args, read_workload(args.prompts, kind))
    return start_engine(args, prefix_caching=False), prompts


def prepare(args: argparse.Namespace, workload: Workload) -> Prompts:
    """Token ids by the target's chat template; prints what was dropped and why."""
    from vllm.tokenizers import get_tokenizer

    prompts = tokenized(workload, get_tokenizer(args.target), args.longest_prompt, args.prompts)
    print(workload.summary(), flush=True)
    return prompts


def main() -> None:
    args = _arguments()
    check(args)
    workload = read_workload(args.prompts, args.dataset_format)
    new = {
        "workload": "decode" if workload.name == "prompts" else workload.name,
        **settings(args, *SETTINGS), "provenance": provenance(args), "runs": [],
    }  # fmt: skip
    record = held_record(args.out, new)
    plan = planned(args)
    todo = missing(record, plan)
    timing = args.time_drafts and args.method != "off" and "drafts" not in record
    pricing = args.latency_out is not None and args.method == "forespark"
    print(f"{len(plan) - len(todo)} of {len(plan)} runs are done", flush=True)
    if not todo and not timing and not (pricing and not args.latency_out.exists()):
        return
    prompts = prepare(args, workload)
    started = time.perf_counter()
    llm = start_engine(args, prefix_caching=False)
    record.setdefault("ready_s", time.perf_counter() - started)
    record["left_out"] = dict(workload.dropped)
    if pricing:
        from forespark.verifier.export import export_prices

        prices = llm.collective_rpc(export_prices)[0]
        args.latency_out.write_text(json.dumps({"schema": 1, **prices}, indent=1) + "\n")
    loop = ClosedLoop(llm, prompts, args.max_tokens, args.temperature)
    # A full batch has to be prefilled before the window opens.
    run_all(args, record, todo, llm,
            lambda load: loop.run(load, args.warm_up + load / 64, args.seconds))  # fmt: skip
    if timing:
        from forespark.benchmarks.drafter_cost import time_drafts

        lengths = [0, 2, 4, args.tokens] if args.method == "forespark" else [args.tokens]
        sizes = [n for n in (1, 8, 32, 64, 128, 256) if n <= args.max_num_seqs]
        record["drafts"] = llm.collective_rpc(time_drafts, args=(sizes, lengths, 512))[0]
        save(record, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_arguments(parser)
    add_run_arguments(parser, repeats=1)
    parser.add_argument("--dataset-format", choices=FORMATS, default="auto")
    parser.add_argument("--latency-out", type=Path, help="also write the latencies measured")
    parser.add_argument(
        "--time-drafts", action="store_true", help="also time drafts ([n, d, target ms, draft ms])"
    )
    return parser.parse_args()


if __name__ == "__main__":
    guarded(main)
