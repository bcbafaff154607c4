"""Time of the host decision, and the goodput it loses against exhaustive search (section 6.4).

Runs on a CPU alone. Batches and latency tables are synthetic: acceptance drawn per request from
easy to hard, drafter and target shaped like a memory-bound step that turns compute-bound, captured
up to 2048 tokens and interpolated above. Times are the median over `--repeats` of single decisions
(spread: 10th and 90th percentile). Prints one JSON document as its last line.

    python -m forespark.benchmarks.host_decision --repeats 300 --batches 8
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np

from forespark.core import LatencyTable, StepInputs, VerifyInputs
from forespark.scheduler.exhaustive import exhaustive_plan
from forespark.scheduler.joint import plan_joint, replan_verify
from forespark.scheduler.selection import SelectionModel
from forespark.scheduler.selective import plan_selective
from forespark.scheduler.split import rank_split

K = 15
CAPTURED_LIMIT = 2048  # tokens


def synthetic_step(num_reqs: int, seed: int, floor: int = 0) -> StepInputs:
    """A decode batch with mixed acceptance and some prefill tokens."""
    rng = np.random.default_rng(seed)
    mean = rng.uniform(0.3, 0.95, (num_reqs, 1))
    accept = rng.beta(8 * mean, 8 * (1 - mean), (num_reqs, K))
    scores = np.cumprod(accept, axis=1).astype(np.float32)
    prefill = int(rng.integers(0, 256))
    return StepInputs(scores, np.full(num_reqs, K), num_reqs, num_reqs + prefill, floor)


def synthetic_tables(seed: int) -> tuple[LatencyTable, LatencyTable]:
    """(draft, verify): flat while memory-bound, then linear in tokens."""
    rng = np.random.default_rng(seed)
    sizes = np.r_[1, 2, 4, np.arange(8, 257, 8), np.arange(272, 2049, 16), 4096, 8192]
    knee, slope = rng.integers(64, 512), rng.uniform(0.005, 0.03)
    draft = rng.uniform(0.5, 1.5) + 0.1 * slope * np.maximum(sizes - knee // 2, 0) + 1e-4 * sizes
    verify = rng.uniform(7, 15) + slope * np.maximum(sizes - knee, 0) + 1e-4 * sizes
    return (
        LatencyTable(sizes, draft, CAPTURED_LIMIT, "synthetic"),
        LatencyTable(sizes, verify, CAPTURED_LIMIT, "synthetic"),
    )


def time_us(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds of single calls, after warming the cached tables."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    low, median, high = np.percentile(taken, [10, 50, 90]).round(1).tolist()
    return {"p10": low, "median": median, "p90": high}


def measure(num_reqs: int, repeats: int, batches: int) -> dict[str, object]:
    """Every time and the loss at one batch size."""
    step, (draft, verify) = synthetic_step(num_reqs, seed=0), synthetic_tables(seed=0)
    floored = synthetic_step(num_reqs, seed=0, floor=1)
    model = SelectionModel()
    plan = plan_joint(step, draft, verify, 0.0).plan
    again = VerifyInputs(
        scores=step.scores,
        draft_limits=step.draft_limits,
        num_emit=step.num_emit,
        num_non_draft_tokens=step.num_non_draft_tokens,
        draft_budget=plan.draft_budget,
        num_drafted_reqs=num_reqs,
        verify_cap=plan.draft_budget,
    )
    return {
        "num_reqs": num_reqs,
        "plan_us": time_us(lambda: plan_joint(step, draft, verify, 0.0), repeats),
        "selective_plan_us": time_us(
            lambda: plan_selective(step, draft, verify, 0.0, model), repeats
        ),
        "plan_with_floor_us": time_us(lambda: plan_joint(floored, draft, verify, 0.0), repeats),
        "replan_us": time_us(lambda: replan_verify(again, draft, verify), repeats),
        "host_split_us": time_us(
            lambda: rank_split(step.scores, step.draft_limits, plan.draft_budget), repeats
        ),
        "exhaustive_us": time_us(lambda: exhaustive_plan(step, draft, verify), 1),
        "goodput_lost": losses(num_reqs, batches, floor=0),
        "goodput_lost_with_floor": losses(num_reqs, batches, floor=1),
    }


def losses(num_reqs: int, batches: int, floor: int) -> dict[str, float]:
    """Mean and largest share of the exhaustive goodput that the decision gives up."""
    lost = []
    for seed in range(batches):
        step, (draft, verify) = synthetic_step(num_reqs, seed, floor), synthetic_tables(seed)
        best = exhaustive_plan(step, draft, verify).goodput
        lost.append(1.0 - plan_joint(step, draft, verify, 0.0).chosen.goodput / best)
    # A difference of a few ulp either way is rounding, not loss.
    return {"mean": round(float(np.mean(lost)), 9) + 0.0, "max": round(max(lost), 9) + 0.0}


def main() -> None:
    """Parse the flags, measure 192 and 512 requests, print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=300, help="timed decisions per figure")
    parser.add_argument("--batches", type=int, default=4, help="batches searched exhaustively")
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[192, 512])
    args = parser.parse_args()
    results = []
    for num_reqs in args.num_reqs:
        result = measure(num_reqs, args.repeats, args.batches)
        results.append(result)
        print(f"{num_reqs} requests: {result}")
    print(
        json.dumps(
            {
                "benchmark": "host_decision",
                "num_speculative_tokens": K,
                "machine": platform.machine(),
                "numpy": np.__version__,
                "data": "synthetic",
                "repeats": args.repeats,
                "batches": args.batches,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
