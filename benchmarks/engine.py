"""One engine for many runs: its command line, its start, its counters, another policy in between.

Everything that can be refused is refused by `check` before the engine starts.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forespark.scheduler.policies import POLICIES

COUNTERS = (
    "forespark:steps", "forespark:drafted_tokens", "forespark:verified_tokens",
    "forespark:accepted_tokens", "forespark:emitted_tokens", "forespark:request_steps",
    "forespark:predicted_ms", "forespark:measured_ms", "forespark:predicted_tokens",
    "forespark:emitted_tokens_with_prediction", "forespark:guard_hits",
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens",
)  # fmt: skip

# vLLM's own methods: full blocks, or trimmed by adaptive verification.
STOCK: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "dflash_adaptive": {"method": "dflash", "enable_adaptive_verification": True},
    "dspark": {"method": "dspark"},
    "dspark_adaptive": {"method": "dspark", "enable_adaptive_verification": True},
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine, policies, loads, prompts and times: what every run in one engine takes."""
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--tokens", type=int, default=15, help="K")
    parser.add_argument(
        "--method",
        choices=["off", "forespark", *STOCK],
        default="forespark",
        help="stock methods need a checkpoint of their kind as --drafter",
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
    parser.add_argument("--latency", type=Path, help="artifact instead of measuring at the start")
    parser.add_argument("--additional-config", type=json.loads, default={}, help="vLLM's, JSON")
    parser.add_argument("--blocks", type=int, help="KV cache blocks, for a small machine")
    parser.add_argument("--out", type=Path, required=True)


def add_run_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """How often, and greedy or sampled."""
    parser.add_argument("--repeats", type=int, default=repeats, help="of every policy and load")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; seeded")


def check(args: argparse.Namespace) -> None:
    """ValueError, one line, for what cannot run."""
    high = [load for load in args.loads if not 1 <= load <= args.max_num_seqs]
    if high:
        raise ValueError(f"--loads: {high} must be 1..{args.max_num_seqs} (--max-num-seqs)")
    artifact = getattr(args, "latency", None)
    if artifact is not None and not artifact.is_file():
        raise ValueError(f"--latency: {artifact} is no file; write it with `forespark profile`")
    if args.method == "forespark":
        for name in args.policies:
            policy, _, length = name.partition(":")
            right = not length or (policy == "batchwise" and length.isdecimal())
            if policy not in POLICIES or not right:
                raise ValueError(
                    f"--policies: {name!r} is unknown; give {', '.join(POLICIES)} or batchwise:N"
                )
    if args.method != "off" and args.drafter is None:
        raise ValueError(f"--drafter: --method {args.method} needs one; --method off does not")
    for flag, least in (("repeats", 1), ("max_tokens", 1), ("temperature", 0), ("seconds", 0)):
        if getattr(args, flag, least) < least:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: {getattr(args, flag)} must be at least {least}")


def speculative(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config of the engine's method."""
    base: dict[str, Any] = {"model": str(args.drafter), "num_speculative_tokens": args.tokens}
    if args.load_format == "dummy":  # a drafter's fused buffers are built while weights load
        base["draft_load_config"] = {"load_format": "safetensors"}
    match args.method:
        case "off":
            return None
        case "forespark":
            # An engine that starts with `full` has vLLM's drafter, which cannot change.
            first = next((name for name in args.policies if name != "full"), "full")
            policy = first.partition(":")[0]
            if args.latency is not None:
                base["latency"] = {"artifact": str(args.latency)}
            return {"method": "forespark", "scheduler": {"policy": policy}, **base}
        case name:
            return {**STOCK[name], **base}


def start_engine(args: argparse.Namespace, *, prefix_caching: bool, **more: Any) -> Any:
    """The `LLM` that `args` (`add_engine_arguments`) describe."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send functions to the worker
    from vllm import LLM

    llm = LLM(
        str(args.target),
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=prefix_caching,
        speculative_config=speculative(args),
        disable_log_stats=False,
        additional_config=args.additional_config,
        **({} if args.load_format is None else {"load_format": args.load_format}),
        **({} if args.blocks is None else {"num_gpu_blocks_override": args.blocks}),
        **more,
    )
    core = weakref.ref(llm.llm_engine.engine_core)

    def stop() -> None:
        """Before multiprocessing waits for its children, which would wait for this process."""
        if (found := core()) is not None:
            found.shutdown()

    atexit.register(stop)
    return llm


def use_policy(worker: Any, name: str) -> None:
    """Runs in the worker, between runs: plan by another policy with the prices at hand.

    `batchwise:N` drafts N tokens for everyone.
    """
    from forespark.verifier.setup import start_planning

    runner = worker.model_runner
    config = getattr(runner.speculator, "config", None)
    if config is None:  # vLLM's drafter: nothing but `full` was asked for
        return
    policy, _, length = name.partition(":")
    changed: dict[str, Any] = {"policy": policy}
    if length:
        changed["batchwise_schedule"] = [(runner.max_num_reqs, int(length))]
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update=changed)})
    start_planning(runner, config, *runner.speculator.prices)


def cache_room(worker: Any) -> dict[str, float]:
    """Runs in the worker: what the KV cache and the recurrent states leave room for.

    `tokens` of requests of `max_model_len` tokens each, and how many of those fit.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    runner = worker.model_runner
    fits = get_max_concurrency_for_kv_cache_config(runner.vllm_config, runner.kv_cache_config)
    return {"requests": fits, "tokens": fits * runner.vllm_config.model_config.max_model_len}


def counters(llm: Any) -> dict[str, float]:
    """The engine's counters of `COUNTERS` now; 0 where the method keeps none."""
    seen = {metric.name.removesuffix("_total"): metric for metric in llm.get_metrics()}
    return {name: float(getattr(seen.get(name), "value", 0) or 0) for name in COUNTERS}


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the counters gained."""
    return {name: after[name] - before[name] for name in COUNTERS}
