"""What a plan that knows the acceptance would reach, on the simulator's recorded drafts.

In every step the oracle takes the lengths of the highest goodput (`forespark/scheduler/oracle.py`)
for the tokens that are known to be accepted. `oracle_share` is the lowest of ours / oracle over the
loads. The oracle maximises each step by itself: decode only, no prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from forespark.benchmarks.simulate import (
    Answers,
    Outcome,
    _advance,
    policy_named,
    read_tables,
    simulate,
)
from forespark.calibration.traces import DraftTrace
from forespark.training.saving import replacing

from forespark.core import LatencyTable
from forespark.scheduler.oracle import plan_oracle


def simulate_oracle(
    answers: Answers,
    draft: LatencyTable,
    verify: LatencyTable,
    load: int,
    *,
    steps: int = 200,
    seed: int = 0,
) -> Outcome:
    """`steps` steps of `load` requests. ValueError for a load below 1."""
    if load < 1:
        raise ValueError(f"load: must be >= 1, got {load}")
    random = np.random.default_rng(seed)
    context = random.choice(answers.starts, load)
    limits = np.full(load, answers.most, dtype=np.int32)
    sums = np.zeros(4)  # drafted, verified, emitted, ms
    for _ in range(steps):
        found = plan_oracle(answers.trace.accepted[context], limits, load, load, draft, verify)
        emitted = found.verify_lens + 1
        plan = found.chosen.plan
        ms = found.chosen.predicted_ms
        sums += (plan.draft_budget, plan.verify_budget, int(emitted.sum()), ms)
        context = _advance(answers, context, emitted, random)
    drafted, verified, tokens, ms = (sums / steps).tolist()
    return Outcome("oracle", load, 1e3 * tokens / ms, drafted, verified, tokens, tokens, ms)


def oracle_share(
    answers: Answers, tables: tuple[LatencyTable, LatencyTable], loads: list[int], steps: int
) -> dict[str, Any]:
    """`joint` against the oracle at every load, and the lowest share."""
    rows = []
    for load in loads:
        bound = simulate_oracle(answers, *tables, load, steps=steps)
        policy = policy_named("joint", *tables, 0.02)
        ours = simulate(answers, policy, *tables, load, steps=steps)
        share = ours.output_throughput / bound.output_throughput
        rows.append(
            {
                "load": load,
                "joint": ours.output_throughput,
                "oracle": bound.output_throughput,
                "drafted": bound.drafted,
                "verified": bound.verified,
                "share": share,
            }
        )
        print(f"load {load:5d}: joint reaches {share:6.1%} of the oracle", flush=True)
    return {"oracle": {"oracle_share": min(row["share"] for row in rows), "loads": rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="of calibrate collect")
    parser.add_argument("--latency", type=Path, required=True, help="latency artifact")
    parser.add_argument("--loads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    answers = Answers(DraftTrace.load(args.trace))
    record = oracle_share(answers, read_tables(args.latency), args.loads, args.steps)
    with replacing(args.out) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
