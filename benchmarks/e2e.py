"""`sharegpt-e2e`: a closed loop of multi-turn requests in one engine, policy after policy.

Each request carries its conversation so far (`conversations.py`). A run starts from an empty prefix
cache, is warmed up with held-out conversations until `load` requests have a first token (or eight
times as many have ended: answers of one token never fill the batch), and measures at least
`--requests` requests over at least `--seconds`. Every method replays the same sequence. Runs that
the output file holds are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from forespark.benchmarks.conversations import Message, read_conversations, stream
from forespark.benchmarks.engine import (
    add_engine_arguments,
    add_run_arguments,
    between,
    check,
    counters,
    start_engine,
)
from forespark.benchmarks.held import guarded, held_record, missing, planned, run_all, settings
from forespark.benchmarks.provenance import provenance

SETTINGS = ("method", "tokens", "temperature", "seconds", "requests", "prompts")


class Loop:
    """Keeps `load` requests of a stream running and notes when their tokens come."""

    def __init__(self, llm: Any, args: argparse.Namespace) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._llm, self._engine, self._args = llm, llm.llm_engine, args
        self._tokenizer = llm.get_tokenizer()
        self._params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, detokenize=False,
            seed=0 if args.temperature else None, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._numbers = itertools.count()
        self._times: dict[str, list[float]] = {}  # added, first token, last token, tokens
        self.too_long = 0

    def run(self, load: int, warm: list[Any], measured: list[Any]) -> dict[str, Any]:
        """One run at one load; requests alive at its end are aborted and counted."""
        self._llm.reset_prefix_cache()
        self.too_long = 0
        self._keep(
            load, self._prompts(warm), lambda done: self._started() >= load or len(done) >= 8 * load
        )
        before, old, begin = counters(self._llm), set(self._times), time.perf_counter()
        tokens, done = self._keep(load, self._prompts(measured), self._enough(begin, old))
        duration, after = time.perf_counter() - begin, counters(self._llm)
        unfinished = len(set(self._times) - old)
        self._engine.abort_request(list(self._times))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._times.clear()
        mine = [times for name, times in done.items() if name not in old]
        return {
            "load": load, "output_throughput": tokens / duration,
            "tokens_per_user": tokens / duration / load, "duration": duration,
            "completed": len(mine), "unfinished": unfinished, "too_long": self.too_long,
            "median_ttft_ms": _median([1e3 * (t[1] - t[0]) for t in mine]),
            "median_tpot_ms": _median([1e3 * (t[2] - t[1]) / (t[3] - 1) for t in mine if t[3] > 1]),
            "counters": between(before, after),
        }  # fmt: skip

    def _keep(self, load: int, prompts: Iterator[list[int]], over: Any) -> tuple[int, Any]:
        tokens, done = 0, {}
        while not over(done):
            while len(self._times) < load:
                name = str(next(self._numbers))
                self._times[name] = [time.perf_counter(), 0.0, 0.0, 0]
                self._engine.add_request(name, {"prompt_token_ids": next(prompts)}, self._params)
            for output in self._engine.step():
                times, now = self._times[output.request_id], time.perf_counter()
                count = len(output.outputs[0].token_ids)
                if count:
                    times[1:3] = [times[1] or now, now]
                times[3] += count
                tokens += count
                if output.finished:
                    done[output.request_id] = self._times.pop(output.request_id)
        return tokens, done

    def _started(self) -> int:
        return sum(1 for times in self._times.values() if times[3])

    def _enough(self, begin: float, old: set[str]) -> Any:
        return lambda done: (
            time.perf_counter() - begin >= self._args.seconds
            and sum(1 for name in done if name not in old) >= self._args.requests
        )

    def _prompts(self, conversations: list[list[Message]]) -> Iterator[list[int]]:
        """Token ids without end; requests that leave no room for the answer are counted."""
        most = self._args.max_model_len - self._args.max_tokens
        while True:
            used = 0
            for request in stream(conversations):
                text = self._tokenizer.apply_chat_template(
                    request, add_generation_prompt=True, tokenize=False
                )
                ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
                if len(ids) <= most:
                    used += 1
                    yield ids
                else:
                    self.too_long += 1
            if not used:
                raise ValueError(
                    f"--prompts: no conversation fits into {most} tokens; raise --max-model-len"
                )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def new_record(args: argparse.Namespace) -> dict[str, Any]:
    """A record without runs."""
    return {
        "workload": "sharegpt-e2e", **settings(args, *SETTINGS),
        "provenance": provenance(args), "runs": [],
    }  # fmt: skip


def main() -> None:
    args = _arguments()
    check(args)
    record = held_record(args.out, new_record(args))
    plan = planned(args)
    todo = missing(record, plan)
    talks = read_conversations(args.prompts, args.min_turns)
    print(f"{talks.summary()}; {len(plan) - len(todo)} of {len(plan)} runs are done", flush=True)
    if not todo:
        return
    llm = start_engine(args, prefix_caching=True)
    loop = Loop(llm, args)
    run_all(args, record, todo, llm, lambda load: loop.run(load, talks.held_out, talks.measured))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_arguments(parser)
    add_run_arguments(parser, repeats=3)
    parser.add_argument("--requests", type=int, default=128, help="measured at least")
    parser.add_argument("--min-turns", type=int, default=4, help="messages of a conversation")
    parser.set_defaults(seconds=120.0)
    return parser.parse_args()


if __name__ == "__main__":
    guarded(main)
