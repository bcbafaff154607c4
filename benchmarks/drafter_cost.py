"""What a draft costs: the packed drafter at several mean lengths, or vLLM's own full blocks.

Steps of dummy requests on a shape with random weights (`shapes.py`): `n` requests of one token
each, drafter time from CUDA events, medians. Run it once a method and compare the records.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from forespark.benchmarks.shapes import HYBRID, QWEN3, write_pair


def time_drafts(worker: Any, loads: list[int], lengths: list[int], context: int) -> list[Any]:
    """Runs in the worker: [n, d, target ms, drafter ms] of every load and draft length."""
    from forespark.verifier.profile import timed_steps

    runner = worker.model_runner
    return [
        [n, d, *timed_steps(runner, runner.speculator, n, context, drafted=n * d)]
        for n in loads
        for d in lengths
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted({**QWEN3, **HYBRID}), default="qwen3-14b")
    parser.add_argument("--method", choices=["forespark", "dflash"], default="forespark")
    parser.add_argument("--tokenizer", type=Path, default=Path("tests/assets/tiny-pair/target"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/forespark-shapes"))
    parser.add_argument("--tokens", type=int, default=15, help="K")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--loads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 32])
    parser.add_argument("--lengths", type=lambda s: [int(n) for n in s.split(",")], default=[4])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target, drafter = args.work / "target", args.work / "drafter"
    if not (drafter / "model.safetensors").exists():
        target, drafter = write_pair(args.work, args.shape, args.tokenizer, args.tokens, "cuda")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to send `time_drafts` to the worker
    from vllm import LLM

    config: dict[str, Any] = {
        "method": args.method,
        "model": str(drafter),
        "num_speculative_tokens": args.tokens,
        "draft_load_config": {"load_format": "safetensors"},
    }
    if args.method == "dflash":
        config["enable_adaptive_verification"] = True
    started = time.perf_counter()
    llm = LLM(
        str(target),
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=8192,
        speculative_config=config,
    )
    ready = time.perf_counter() - started
    lengths = args.lengths if args.method == "forespark" else [args.tokens]
    found = llm.collective_rpc(time_drafts, args=(args.loads, lengths, args.context))[0]
    record = {"method": args.method, "shape": args.shape, "ready_s": ready, "rows": found}
    args.out.write_text(json.dumps(record, indent=1, allow_nan=False))
    for n, d, target_ms, drafter_ms in found:
        print(f"n {n:4d} d {d:3d}: target {target_ms:7.3f} ms, drafter {drafter_ms:7.3f} ms")


if __name__ == "__main__":
    main()
