"""The simulator against a real run: predicted and measured throughput ratios at equal loads.

Ratios are `--ours` over every other policy of the record that the simulator knows under the same
name. `max_error` is the largest of |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from forespark.benchmarks.evidence import by_load
from forespark.benchmarks.records import Group, load_results
from forespark.benchmarks.simulate import Answers, policy_named, read_tables, simulate
from forespark.calibration.traces import DraftTrace
from forespark.training.saving import replacing

from forespark.core import LatencyTable
from forespark.scheduler.policies import POLICIES


def validate(
    answers: Answers,
    tables: tuple[LatencyTable, LatencyTable],
    group: Group,
    ours: str,
    steps: int,
    fixed_ms: float = 0.0,
) -> dict[str, Any]:
    """Every ratio that both have. ValueError where there is none."""
    measured = {
        (name, load): statistics.fmean(run.output_throughput for run in same)
        for name, runs in group.policies().items()
        if name.partition(":")[0] in POLICIES
        for load, same in by_load(runs).items()
    }
    pairs = [key for key in measured if key[0] != ours and (ours, key[1]) in measured]
    if not pairs:
        raise ValueError(
            f"--record: no load has both {ours} and another policy of {', '.join(POLICIES)}; "
            f"it holds {', '.join(sorted(group.policies()))}"
        )
    wanted = dict.fromkeys([*pairs, *((ours, load) for _, load in pairs)])
    predicted = {
        (name, load): simulate(
            answers, policy_named(name, *tables, 0.02), *tables, load, steps=steps,
            fixed_ms=fixed_ms,
        ).output_throughput
        for name, load in wanted
    }  # fmt: skip
    rows = []
    for name, load in pairs:
        said = predicted[ours, load] / predicted[name, load]
        seen = measured[ours, load] / measured[name, load]
        rows.append({"policy": name, "load": load, "predicted": said, "measured": seen,
                     "error": abs(said / seen - 1)})  # fmt: skip
    return {"simulator": {"max_error": max(r["error"] for r in rows), "ours": ours, "rows": rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="of calibrate collect")
    parser.add_argument("--latency", type=Path, required=True, help="latency artifact")
    parser.add_argument("--record", type=Path, nargs="+", required=True, help="of fixed loads")
    parser.add_argument("--ours", default="joint")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fixed-ms", type=float, default=0.0, help="a step's cost off the tables")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results = load_results(args.record)
    if len(results.groups) != 1:
        found = "; ".join([*(g.title for g in results.groups), *results.unused]) or "nothing"
        raise ValueError(f"--record: give runs of one model, machine and setting; found {found}")
    answers, tables = Answers(DraftTrace.load(args.trace)), read_tables(args.latency)
    record = validate(answers, tables, results.groups[0], args.ours, args.steps, args.fixed_ms)
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    for row in record["simulator"]["rows"]:
        print(f"{row['policy']:>22} {row['load']:4d}: predicted {row['predicted']:.3f}, "
              f"measured {row['measured']:.3f}, off by {row['error']:.1%}")  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
