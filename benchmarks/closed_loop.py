"""Closed-loop decoding at fixed loads: C requests are kept running, tokens are counted in a window.

One engine serves every ForeSpark policy in turn (`--policies`), so that they share weights, graphs
and step prices; stock methods and the target alone take an engine each (`--method`). The order of
prompts is the same for every run. Greedy, natural ends of answers.

Writes one JSON record: per run the load, output tokens/s, tokens/s per user, and the engine's own
counters over the window.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forespark.benchmarks.provenance import provenance

COUNTERS = (
    "forespark:steps", "forespark:drafted_tokens", "forespark:verified_tokens",
    "forespark:accepted_tokens", "forespark:emitted_tokens", "forespark:request_steps",
    "forespark:predicted_ms", "forespark:measured_ms", "forespark:predicted_tokens",
    "forespark:emitted_tokens_with_prediction", "forespark:guard_hits",
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens",
)  # fmt: skip


def speculative(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config of the engine's method."""
    base = {"model": str(args.drafter), "num_speculative_tokens": args.tokens}
    match args.method:
        case "off":
            return None
        case "forespark":
            return {"method": "forespark", "scheduler": {"policy": args.policies[0]}, **base}
        case "dflash":
            return {"method": "dflash", **base}
        case "dflash_adaptive":
            return {"method": "dflash", "enable_adaptive_verification": True, **base}
    raise ValueError(f"--method: {args.method} is unknown")


def use_policy(worker: Any, name: str) -> None:
    """Runs in the worker, between runs: plan by another policy with the prices at hand.

    `batchwise:N` drafts N tokens for everyone.
    """
    from forespark.verifier.setup import start_planning

    runner = worker.model_runner
    config = runner.speculator.config
    policy, _, length = name.partition(":")
    changed: dict[str, Any] = {"policy": policy}
    if length:
        changed["batchwise_schedule"] = [(runner.max_num_reqs, int(length))]
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update=changed)})
    start_planning(runner, config, *runner.speculator.prices)


def read_prompts(file: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of JSONL `prompt` lines as one chat turn each, at most `longest` tokens long."""
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["prompt"] for line in lines]
    prompts = []
    for text in texts:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        if len(ids) <= longest:
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"--prompts: {file} has no prompt of at most {longest} tokens")
    return prompts


class ClosedLoop:
    """Keeps `load` requests running in one engine."""

    def __init__(self, llm: Any, prompts: list[list[int]], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine = llm.llm_engine
        self._params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._prompts = prompts
        self._counters = llm.get_metrics
        self._runs = 0
        self._next = self._ids()
        self._alive: set[str] = set()

    def counters(self) -> dict[str, float]:
        """The engine's counters of `COUNTERS` now."""
        seen = {m.name.removesuffix("_total"): getattr(m, "value", 0) for m in self._counters()}
        return {name: float(seen.get(name) or 0) for name in COUNTERS}

    def run(self, load: int, warm_up: float, seconds: float) -> dict[str, Any]:
        """One run; requests still alive at its end are aborted."""
        self.fill(load, warm_up)
        before = self.counters()
        tokens, finished, duration = self.keep(seconds)
        after = self.counters()
        self.drain()
        return {
            "load": load,
            "output_throughput": tokens / duration,
            "tokens_per_user": tokens / duration / load,
            "finished": finished,
            "duration": duration,
            "counters": {name: after[name] - before[name] for name in COUNTERS},
        }

    def fill(self, load: int, seconds: float) -> None:
        """Bring `load` requests up and keep them running for `seconds`."""
        self._runs += 1
        self._next = self._ids()
        self._alive = {self._add(next(self._next)) for _ in range(load)}
        self.keep(seconds)

    def keep(self, seconds: float) -> tuple[int, int, float]:
        """Go on for at least `seconds`: (tokens, finished requests, seconds)."""
        begin = now = time.perf_counter()
        tokens = finished = 0
        while now - begin < seconds:
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    finished += 1
                    self._alive.discard(output.request_id)
                    self._alive.add(self._add(next(self._next)))
        return tokens, finished, now - begin

    def drain(self) -> None:
        """Abort what is alive and wait until nothing runs."""
        self._engine.abort_request(list(self._alive))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _ids(self) -> Iterator[tuple[str, list[int]]]:
        number = 0
        while True:
            yield f"{self._runs}-{number}", self._prompts[number % len(self._prompts)]
            number += 1

    def _add(self, request: tuple[str, list[int]]) -> str:
        name, prompt = request
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._params)
        return name


def start(args: argparse.Namespace) -> tuple[Any, list[list[int]]]:
    """The engine that `args` (`add_engine_arguments`) describe, and the prompts' token ids."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send functions to the worker
    from vllm import LLM

    llm = LLM(
        str(args.target),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=False,
        speculative_config=speculative(args),
        disable_log_stats=False,
        **({} if args.load_format is None else {"load_format": args.load_format}),
        **({} if args.blocks is None else {"num_gpu_blocks_override": args.blocks}),
    )
    return llm, read_prompts(args.prompts, llm.get_tokenizer(), args.longest_prompt)


def main() -> None:
    args = _arguments()
    started = time.perf_counter()
    llm, prompts = start(args)
    ready = time.perf_counter() - started
    if args.latency_out is not None and args.method == "forespark":
        from forespark.verifier.export import export_prices

        prices = llm.collective_rpc(export_prices)[0]
        args.latency_out.write_text(json.dumps({"schema": 1, **prices}, indent=1) + "\n")
    loop = ClosedLoop(llm, prompts, args.max_tokens)
    record: dict[str, Any] = {
        "method": args.method,
        "ready_s": ready,
        "provenance": provenance(args),
        "runs": [],
    }
    for policy in args.policies if args.method == "forespark" else [args.method]:
        if args.method == "forespark":
            llm.collective_rpc(use_policy, args=(policy,))
        for load in args.loads:
            # A full batch has to be prefilled before the window opens.
            warm_up = args.warm_up + load / 64
            run = {"policy": policy, **loop.run(load, warm_up, args.seconds)}
            record["runs"].append(run)
            print(
                f"{policy:>24} load {load:4d}: {run['output_throughput']:9.1f} tokens/s, "
                f"{run['tokens_per_user']:7.1f} a user",
                flush=True,
            )
            args.out.write_text(json.dumps(record, indent=1, allow_nan=False))
    if args.time_drafts and args.method != "off":
        from forespark.benchmarks.drafter_cost import time_drafts

        lengths = [0, 2, 4, args.tokens] if args.method == "forespark" else [args.tokens]
        sizes = [n for n in (1, 8, 32, 64, 128, 256) if n <= args.max_num_seqs]
        record["drafts"] = llm.collective_rpc(time_drafts, args=(sizes, lengths, 512))[0]
        args.out.write_text(json.dumps(record, indent=1, allow_nan=False))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine, policies, loads, prompts and times: what every run in one engine takes."""
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--tokens", type=int, default=15, help="K")
    parser.add_argument(
        "--method", choices=["off", "forespark", "dflash", "dflash_adaptive"], default="forespark"
    )
    parser.add_argument("--policies", type=lambda s: s.split(","), default=["joint"])
    parser.add_argument("--loads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 8])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--longest-prompt", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=12.0, help="of the window")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--load-format")
    parser.add_argument("--blocks", type=int, help="KV cache blocks, for a small machine")
    parser.add_argument("--out", type=Path, required=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--latency-out", type=Path, help="also write the latencies measured")
    parser.add_argument(
        "--time-drafts", action="store_true", help="also time drafts ([n, d, target ms, draft ms])"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
