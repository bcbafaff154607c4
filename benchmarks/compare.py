"""Closed-loop records (`closed_loop.py`) side by side: a table, one JSON record and one picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from forespark.benchmarks.matched import Curve, best_of, matched_ratio

STOCK = ("off", "dflash", "dflash_adaptive")
STRONGEST = "strongest baseline"
BASELINES = (*STOCK, "full", "batchwise")  # of the paper: adaptive verification is an ablation


def is_baseline(name: str) -> bool:
    """Whether a method counts among the baselines; `batchwise:4` is one for every length."""
    return name.partition(":")[0] in BASELINES


def load_runs(files: list[Path]) -> dict[str, list[dict[str, Any]]]:
    """Runs by policy, in ascending load, from every record."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        held = record.get("runs") if isinstance(record, dict) else None
        if not held or not all("counters" in run for run in held):
            raise ValueError(f"records: {file} holds no run of `forespark bench decode` or `run`")
        for run in held:
            runs.setdefault(run["policy"], []).append(run)
    return {name: sorted(found, key=lambda run: run["load"]) for name, found in runs.items()}


def curve(runs: list[dict[str, Any]]) -> Curve:
    return Curve.of([(run["tokens_per_user"], run["output_throughput"]) for run in runs])


def per_step(run: dict[str, Any]) -> dict[str, float]:
    """Means of a step from ForeSpark's counters; empty for methods that keep none."""
    seen = {name.removeprefix("forespark:"): value for name, value in run["counters"].items()}
    steps = seen["steps"]
    if not steps:
        return {}
    means = {
        "drafted": seen["drafted_tokens"] / steps,
        "verified": seen["verified_tokens"] / steps,
        "accepted": seen["accepted_tokens"] / steps,
        "emitted": seen["emitted_tokens"] / steps,
        "step_ms": 1e3 * run["duration"] / steps,
    }
    if seen["measured_ms"] and seen["predicted_ms"]:
        means["predicted_over_measured_ms"] = seen["predicted_ms"] / seen["measured_ms"]
    return means


def compare(runs: dict[str, list[dict[str, Any]]], ours: str) -> dict[str, Any]:
    """Ratios of `ours` to every other method at matched interactivity and at equal load."""
    mine = curve(runs[ours])
    others = {name: curve(found) for name, found in runs.items() if name != ours}
    base = [found for name, found in others.items() if is_baseline(name)]
    if len(base) > 1:
        others[STRONGEST] = best_of(base)
    by_load = {run["load"]: run["output_throughput"] for run in runs[ours]}
    record: dict[str, Any] = {}
    for name, other in others.items():
        x, ratio = matched_ratio(mine, other)
        matched = {"tokens_per_user": x.round(2).tolist(), "ratio": ratio.round(4).tolist()}
        record[name] = {"matched": matched, **_extremes(ratio)}
        same = {r["load"]: by_load[r["load"]] / r["output_throughput"] for r in runs.get(name, [])
                if r["load"] in by_load and r["output_throughput"] > 0}  # fmt: skip
        if same:
            record[name]["same_load"] = {str(load): round(value, 4) for load, value in same.items()}
    return record


def headline(ratios: dict[str, Any]) -> dict[str, float]:
    """`best_ratio` and `min_ratio` to the strongest baseline at matched interactivity, and the best
    ratio to `adaptive_verification` of the same checkpoint, of what `compare` found."""
    only = next((found for name, found in ratios.items() if is_baseline(name)), {})
    stock = ratios.get(STRONGEST, only)
    named = {
        "best_ratio": stock.get("best"),
        "min_ratio": stock.get("worst"),
        "vs_adaptive_verification": ratios.get("adaptive_verification", {}).get("best"),
    }
    return {key: round(value, 4) for key, value in named.items() if value is not None}


def _extremes(ratio: np.ndarray) -> dict[str, float]:
    return {} if not ratio.size else {"best": float(ratio.max()), "worst": float(ratio.min())}


def picture(runs: dict[str, list[dict[str, Any]]], file: Path, title: str) -> None:
    """Output tokens/s over tokens/s per user, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, found in runs.items():
        line = curve(found)
        style = "--" if is_baseline(name) else "-"
        axes.plot(line.interactivity, line.throughput, style, marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens/s per user", ylabel="output tokens/s")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--ours", default="joint")
    parser.add_argument("--title", required=True, help="model, GPU, commit")
    parser.add_argument("--out", type=Path, required=True, help="JSON; a PNG is put beside it")
    args = parser.parse_args()
    runs = load_runs(args.records)
    if args.ours not in runs:
        raise SystemExit(f"error: --ours: {args.ours} is in no record; found {sorted(runs)}")
    for name, found in runs.items():
        for run in found:
            means = "  ".join(f"{k} {v:.2f}" for k, v in per_step(run).items())
            print(f"{name:>22} {run['load']:4d} {run['output_throughput']:10.1f} tokens/s  {means}")
    rows = [
        {k: run[k] for k in ("policy", "load", "output_throughput", "tokens_per_user", "finished")}
        | per_step(run)
        for found in runs.values()
        for run in found
    ]
    ratios = compare(runs, args.ours)
    record = {
        "decode": headline(ratios),
        "title": args.title,
        "ours": args.ours,
        "runs": rows,
        "ratios": ratios,
    }
    args.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    picture(runs, args.out.with_suffix(".png"), args.title)
    for name, found in record["ratios"].items():
        print(name, {k: v for k, v in found.items() if k != "matched"})


if __name__ == "__main__":
    main()
