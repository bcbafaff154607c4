"""The benchmarks' own check, on a CPU with the tiny pair: nothing here says how fast anything is.

Every workload runs once with real engines and servers: fixed loads under several policies and stock
methods, batches behind the barrier, multi-turn conversations, tasks by category, Poisson arrivals;
policies are simulated on collected drafts with the latency that the engine measured, and every
figure is drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VERBS, NOUNS = ("merge", "parse", "load", "split", "walk", "copy"), ("data", "path", "node", "key")
METHODS = ("forespark", "off", "dflash")
POLICIES = "joint,adaptive_verification,single_curve,batchwise:3"
LIMITS = ("--dtype", "float32", "--max-model-len", 256, "--max-num-seqs", 4,
          "--max-num-batched-tokens", 64, "--enforce-eager")  # fmt: skip


def run(module: str, *arguments: object) -> str:
    """Standard output of a benchmark module; RuntimeError with the end of its log if it fails."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    print(f"{module}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return done.stdout


def write_prompts(folder: Path) -> dict[str, Path]:
    """Made-up prompts: one turn, tasks, categories, conversations of several turns."""
    texts = [f"def {verb}({noun}):" for verb in VERBS for noun in NOUNS]
    talk = [{"from": who, "value": "x = 1"} for who in ("human", "gpt") * 2]
    records: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": text} for text in texts],
        "long": [{"prompt": text * 6} for text in texts],
        "math-code": [{"question": text, "answer": "1"} for text in texts],
        "acceptance": [{"category": t.split("(")[1], "turns": [t]} for t in texts],
        "talks": [{"conversations": [{"from": "human", "value": t}, *talk[1:]]} for t in texts],
    }
    files = {name: folder / f"{name}.jsonl" for name in records}
    for name, lines in records.items():
        files[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def pair_of(pair: Path) -> tuple[object, ...]:
    """Options that name the tiny pair."""
    return "--target", pair / "target", "--drafter", pair / "drafter", "--tokens", 7


def batches(pair: Path, folder: Path, prompts: Path, policies: str, loads: str) -> dict[str, Any]:
    """The record of `sharegpt-decode`; prompts are longer than what one step prefills."""
    out = folder / "batches.json"
    run(
        "forespark.benchmarks.batch_decode", *pair_of(pair), *LIMITS, "--policies", policies,
        "--loads", loads, "--repeats", 1, "--prompts", prompts, "--max-tokens", 32, "--out", out,
    )  # fmt: skip
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def closed(
    pair: Path, prompts: Path, out: Path, method: str, policies: str, loads: str, seconds: float
) -> Path:
    """Fixed loads of one method; the latencies measured are written beside `out`."""
    print(
        run(
            "forespark.benchmarks.closed_loop", *pair_of(pair), *LIMITS, "--method", method,
            "--policies", policies, "--loads", loads, "--prompts", prompts, "--max-tokens", 48,
            "--warm-up", 1, "--seconds", seconds, "--out", out,
            "--latency-out", out.with_name("latency.json"),
        ),
        end="",
    )  # fmt: skip
    return out


def simulated(
    pair: Path, folder: Path, prompts: Path, policies: str, loads: str
) -> list[dict[str, Any]]:
    """Policies on collected drafts and the latencies of `closed`."""
    trace, out = folder / "drafts.npz", folder / "simulated.json"
    run(
        "forespark.cli", "calibrate", "collect", *pair_of(pair)[:4], "--prompts", prompts,
        "--documents", 8, "--tokens", 48, "--device", "cpu", "--out", trace,
    )  # fmt: skip
    run(
        "forespark.benchmarks.simulate", "--trace", trace, "--latency", folder / "latency.json",
        "--policies", f"off,full,{policies}", "--loads", loads, "--steps", 50, "--out", out,
    )  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


def smoke(
    pair: Path, folder: Path, methods: tuple[str, ...], policies: str, loads: str, seconds: float
) -> dict[str, Any]:
    """Fixed loads, compared and simulated: the record of `compare`, with `simulated` beside it."""
    prompts = write_prompts(folder)["prompts"]
    with ThreadPoolExecutor(2) as pool:  # starts of engines; speed is not measured here
        jobs = [
            pool.submit(closed, pair, prompts, folder / f"{m}.json", m, policies, loads, seconds)
            for m in methods
        ]
        records = [job.result() for job in jobs]
    page = folder / "compare.json"
    run(
        "forespark.benchmarks.compare", *records, "--ours", policies.split(",")[0],
        "--title", "tiny pair on a CPU: a check of the tools", "--out", page,
    )  # fmt: skip
    rows = simulated(pair, folder, prompts, policies, loads)
    return json.loads(page.read_text()) | {"simulated": rows}


def others(pair: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Every other workload, sampled too, and the report of everything in `folder`."""
    files = write_prompts(folder)
    two = ("--policies", "joint,batchwise:3", "--loads", "2", "--repeats", 1)
    common = (*pair_of(pair), *LIMITS, *two)
    work: list[tuple[Any, ...]] = [
        ("forespark.benchmarks.e2e", *common, "--prompts", files["talks"], "--max-tokens", 24,
         "--requests", 8, "--seconds", seconds, "--out", folder / "e2e.json"),
        ("forespark.benchmarks.poisson", *pair_of(pair), *LIMITS, "--methods", "joint", "--rates",
         "2,4", "--prompts", files["prompts"], "--max-tokens", 24, "--seconds", seconds,
         "--warm-up", 1, "--out", folder / "poisson.json"),
    ]  # fmt: skip
    work += [
        ("forespark.benchmarks.closed_loop", *common, "--prompts", files[name], "--max-tokens", 48,
         "--temperature", temperature, "--warm-up", 1, "--seconds", seconds,
         "--out", folder / f"{name}.json")
        for name, temperature in (("math-code", 0), ("acceptance", 1))
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:  # starts of engines; speed is not measured here
        jobs = [pool.submit(run, *arguments) for arguments in work]
        held = pool.submit(batches, pair, folder, files["long"], "joint,off", "1,4")
        for job in (*jobs, held):
            job.result()
    page = folder / "page"
    run(
        "forespark.benchmarks.report", "--results", folder, "--out", page,
        "--evidence", folder / "evidence.json", "--device", "cpu",
    )  # fmt: skip
    report: dict[str, Any] = json.loads((page / "report.json").read_text())
    return report | {"figures": sorted(file.name for file in page.glob("*.png"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", type=Path, default=Path("tests/assets/tiny-pair"))
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = smoke(args.pair, folder, METHODS, POLICIES, "1,4", args.seconds)
        report = others(args.pair, folder, args.seconds)
    found = {"runs": len(record["runs"]), "simulated": len(record["simulated"])}
    found |= {"figures": report["figures"], "seconds": round(time.perf_counter() - started)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
