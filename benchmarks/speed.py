"""`forespark bench speed`: the figures that `docs/results/speed-h200.json` commits to.

Reads what the benchmarks wrote and merges it into `--out`; a figure without a record keeps what
`--out` held, or is null: nothing is guessed.

| option | written by | gives |
| --- | --- | --- |
| `--kernels` | `forespark bench kernels --out` | rank_us, rank_speedup, envelope_us, pre_draft_us |
| `--host` | the last line of `forespark bench host` | host_us, host_sort_ratio, gap_mean, gap_max |
| `--stages` (several) | `forespark profile step` | both ratios, startup_extra_s |
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from forespark.benchmarks.provenance import provenance
from forespark.training.saving import replacing

STOCK = "dflash_adaptive"
DRAFTERS = {"d2": ("batchwise:2", 256), "d4": ("batchwise:4", 256)} | {
    f"full_{load}": ("batchwise:15", load) for load in (1, 32, 256)
}
EMPTY: dict[str, Any] = {
    "rank_us": None, "rank_speedup": None, "envelope_us": None, "pre_draft_us": None,
    "host_us": None, "host_sort_ratio": None, "gap_mean": None, "gap_max": None,
    "drafter_ratio": None, "machinery_ratio": None, "startup_extra_s": None, "extra_gib": None,
    "tp2": None,
}  # fmt: skip


def kernel_figures(record: dict[str, Any]) -> dict[str, Any]:
    """Microseconds a replay, the harder of the data kinds where a kernel was run on several."""
    rows = {each["bench"]: each["rows"] for each in record["records"]}

    def slowest(bench: str, count: int, **wanted: Any) -> float:
        found = [
            row["replay_us"]
            for row in rows[bench]
            if row["n"] == count and "replay_us" in row
            and all(row.get(key) == value for key, value in wanted.items())
        ]  # fmt: skip
        if not found:
            raise ValueError(f"--kernels: no row of {bench} with n = {count}")
        return round(max(found), 2)

    speedups = [
        row["vllm_replay_us"] / row["replay_us"]
        for row in rows["rank"]
        if row["n"] == 512 and "vllm_replay_us" in row
    ]
    return {
        "rank_us": {str(count): slowest("rank", count) for count in (64, 512)},
        "rank_speedup": round(min(speedups), 2) if speedups else None,
        "envelope_us": slowest("envelope", 512),
        "pre_draft_us": {"256": slowest("pre_draft", 256)},
    }


def host_figures(record: dict[str, Any]) -> dict[str, Any]:
    """As `forespark bench host` reports them."""
    return {key: record[key] for key in ("host_us", "host_sort_ratio", "gap_mean", "gap_max")}


def stage_figures(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of our stages to stock vLLM's at the same load and verification budget."""
    found: dict[str, Any] = {"drafter_ratio": {}, "machinery_ratio": {}}
    rows = {
        (record["verify_per_req"], row["policy"], row["load"]): row
        for record in records
        for row in record["rows"]
    }
    budgets = {budget for budget, policy, _ in rows if policy == STOCK}
    for budget in budgets:
        for name, (policy, load) in DRAFTERS.items():
            ours, stock = rows.get((budget, policy, load)), rows.get((budget, STOCK, load))
            if ours and stock:
                found["drafter_ratio"][name] = round(ours["drafter"] / stock["drafter"], 3)
                if name.startswith("full") and ours["tokens"] == stock["tokens"]:
                    ratio = ours["step"] / stock["step"]
                    found["machinery_ratio"][str(load)] = round(ratio, 3)
    off = [
        row["step"] / other["step"]
        for (_, policy, load), row in rows.items()
        if policy == "batchwise:0"
        for (_, method, same), other in rows.items()
        if method == "off" and same == load
    ]
    if off:
        found["machinery_ratio"]["off"] = round(max(off), 3)
    ready = {record["method"]: record["ready_s"] for record in records}
    if {"forespark", STOCK} <= ready.keys():
        found["startup_extra_s"] = round(ready["forespark"] - ready[STOCK], 1)
    return {key: value for key, value in found.items() if value not in ({}, None)}


def merged(
    held: dict[str, Any], kernels: Any, host: Any, stages: list[dict[str, Any]]
) -> dict[str, Any]:
    """`held` with every figure that the records give, and which record gave it."""
    record = {**EMPTY, **held}
    sources = dict(held.get("provenance", {}))
    parts = (
        ("kernels", kernel_figures, kernels, kernels),
        ("host", host_figures, host, host),
        ("stages", stage_figures, stages, stages[0] if stages else None),
    )
    for name, figures, given, origin in parts:
        if given:
            record |= figures(given)
            sources[name] = origin.get("provenance") or provenance()
    return record | {"provenance": sources}


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8").strip()
        return json.loads(text if text.startswith("{") else text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{path}: cannot be read as a benchmark record ({error})") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path)
    parser.add_argument("--host", type=Path)
    parser.add_argument("--stages", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=Path("docs/results/speed-h200.json"))
    args = parser.parse_args()
    held = _read(args.out) if args.out.exists() else {}
    given = [None if path is None else _read(path) for path in (args.kernels, args.host)]
    record = merged(held, *given, [_read(path) for path in args.stages])
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    print(json.dumps({key: value for key, value in record.items() if key != "provenance"}))


if __name__ == "__main__":
    main()
