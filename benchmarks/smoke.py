"""The benchmarks' own check, on a CPU with the tiny pair: nothing here says how fast anything is.

Drafts are collected, a closed loop runs under several policies and stock methods, the records are
compared and drawn, and the same policies are simulated on the collected drafts with the latency
that the engine measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VERBS, NOUNS = ("merge", "parse", "load", "split", "walk", "copy"), ("data", "path", "node", "key")
METHODS = ("forespark", "off", "dflash")


def run(module: str, *arguments: object) -> str:
    """Standard output of a benchmark module; RuntimeError with the end of its log if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def smoke(
    pair: Path, folder: Path, methods: tuple[str, ...], policies: str, loads: str, seconds: float
) -> dict[str, Any]:
    """Run everything in `folder`; the record of `compare`, with `simulated` beside it."""
    prompts = folder / "prompts.jsonl"
    texts = [f"def {verb}({noun}):" for verb in VERBS for noun in NOUNS]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    records = []
    for method in methods:
        out = folder / f"{method}.json"
        print(
            run(
                "forespark.benchmarks.closed_loop", "--method", method, "--policies", policies,
                "--target", pair / "target", "--drafter", pair / "drafter",
                "--tokens", 7, "--loads", loads, "--prompts", prompts, "--max-tokens", 48,
                "--warm-up", 1, "--seconds", seconds, "--dtype", "float32",
                "--max-model-len", 256, "--max-num-seqs", 4, "--max-num-batched-tokens", 256,
                "--enforce-eager", "--latency-out", folder / "latency.json", "--out", out,
            ),
            end="",
        )  # fmt: skip
        records.append(out)
    page = folder / "compare.json"
    run(
        "forespark.benchmarks.compare", *records, "--ours", policies.split(",")[0],
        "--title", "tiny pair on a CPU: a check of the tools", "--out", page,
    )  # fmt: skip
    trace, simulated = folder / "drafts.npz", folder / "simulated.json"
    run(
        "forespark.cli", "calibrate", "collect", "--target", pair / "target",
        "--drafter", pair / "drafter", "--prompts", prompts, "--documents", 8,
        "--tokens", 48, "--device", "cpu", "--out", trace,
    )  # fmt: skip
    run(
        "forespark.benchmarks.simulate", "--trace", trace, "--latency", folder / "latency.json",
        "--policies", f"off,full,{policies}", "--loads", loads, "--steps", 50, "--out", simulated,
    )  # fmt: skip
    return json.loads(page.read_text()) | {"simulated": json.loads(simulated.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("tests/assets/tiny-pair"))
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    policies = "joint,adaptive_verification,single_curve,batchwise:3"
    with tempfile.TemporaryDirectory() as folder:
        record = smoke(args.pair, Path(folder), METHODS, policies, "1,4", args.seconds)
    print(json.dumps({"runs": len(record["runs"]), "simulated": len(record["simulated"])}))


if __name__ == "__main__":
    main()
