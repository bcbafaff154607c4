"""Time of the host decision, and the goodput it gives up (section 6.4).

Runs on a CPU alone. Batches and latency tables are synthetic: acceptance drawn per request from
easy to hard, drafter and target shaped like a memory-bound step that turns compute-bound, captured
up to 2048 tokens and interpolated above. Times are the median over `--repeats` of single decisions
(spread: 10th and 90th percentile); sorting the same scores is timed between them. Gaps are over
`--batches` batches of 1 to 6 requests, searched exhaustively, and a hundredth as many large ones,
held against a bound. Prints one JSON document as its last line.

| figure | what |
| --- | --- |
| host_us | the plan that serves, microseconds by requests |
| host_sort_ratio | that over `np.sort` of the same scores, at 192 requests |
| gap_mean, gap_max | goodput given up, the larger of both plans', as a share |

    forespark bench host --repeats 300 --batches 2000
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from forespark.benchmarks.host_gap import (
    Case,
    bounded_gap,
    joint_gap,
    selective_gap,
    summarise,
)
from forespark.benchmarks.provenance import provenance

from forespark.core import LatencyTable, StepInputs, VerifyInputs
from forespark.scheduler.exhaustive import exhaustive_plan
from forespark.scheduler.fast import plan_joint, plan_selective, replan_selective, replan_verify
from forespark.scheduler.selection import SelectionModel
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


def small_cases(count: int) -> Iterator[Case]:
    """Batches of 1 to 6 requests, each with tables of its own."""
    for seed in range(count):
        yield synthetic_step(1 + seed % 6, seed), *synthetic_tables(seed)


def large_cases(count: int, most: int) -> Iterator[Case]:
    """Batches of 7 to `most` requests."""
    for seed in range(count):
        num_reqs = int(np.random.default_rng(seed).integers(7, most + 1))
        yield synthetic_step(num_reqs, seed), *synthetic_tables(seed)


def time_us(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of single calls, all of `calls` in turn: a slow moment meets each alike."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter_ns()
            call()
            taken[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: _spread(values) for name, values in taken.items()}


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = np.percentile(values, [10, 50, 90]).round(1).tolist()
    return {"p10": low, "median": median, "p90": high}


def measure(num_reqs: int, repeats: int) -> dict[str, dict[str, float]]:
    """Every time at one batch size, in microseconds."""
    step, (draft, verify) = synthetic_step(num_reqs, seed=0), synthetic_tables(seed=0)
    floored = synthetic_step(num_reqs, seed=0, floor=1)
    model = SelectionModel()
    plan = plan_joint(step, draft, verify, 0.0).plan
    scores = step.scores.ravel().copy()
    again = VerifyInputs(
        scores=step.scores,
        draft_limits=step.draft_limits,
        num_emit=step.num_emit,
        num_non_draft_tokens=step.num_non_draft_tokens,
        draft_budget=plan.draft_budget,
        num_drafted_reqs=num_reqs,
        verify_cap=plan.draft_budget,
    )
    times = time_us(
        {
            "sort": lambda: np.sort(scores),
            "plan_selective": lambda: plan_selective(step, draft, verify, 0.0, model),
            "plan_joint": lambda: plan_joint(step, draft, verify, 0.0),
            "plan_with_floor": lambda: plan_joint(floored, draft, verify, 0.0),
            "replan_selective": lambda: replan_selective(again, draft, verify, model),
            "replan_joint": lambda: replan_verify(again, draft, verify),
            "split": lambda: rank_split(step.scores, step.draft_limits, plan.draft_budget),
        },
        repeats,
    )
    return times | time_us({"exhaustive": lambda: exhaustive_plan(step, draft, verify)}, 1)


def gaps(batches: int) -> dict[str, dict[str, float | int]]:
    """Goodput given up, by plan and size of batch."""
    model, large = SelectionModel(), max(1, batches // 100)

    def selective(*case: Any) -> float:
        return selective_gap(*case, model)

    return {
        "joint": summarise(joint_gap, small_cases(batches)),
        "selective": summarise(selective, small_cases(batches)),
        "joint_large": summarise(bounded_gap, large_cases(large, 512)),
        "selective_large": summarise(selective, large_cases(large, 32)),
    }


def main() -> None:
    """Parse the flags, measure, print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=300, help="timed decisions per figure")
    parser.add_argument("--batches", type=int, default=2000, help="batches searched exhaustively")
    parser.add_argument("--num-reqs", type=int, nargs="+", default=[192, 512])
    args = parser.parse_args()
    times = {}
    for num_reqs in args.num_reqs:
        times[str(num_reqs)] = measure(num_reqs, args.repeats)
        print(f"{num_reqs} requests, us: {times[str(num_reqs)]}")
    lost = gaps(args.batches)
    print(f"goodput given up: {lost}")
    first = times[str(args.num_reqs[0])]
    print(
        json.dumps(
            {
                "benchmark": "host_decision",
                "provenance": provenance(),
                "host_us": {size: us["plan_selective"]["median"] for size, us in times.items()},
                "host_sort_ratio": _ratio(first, "plan_selective"),
                "joint_sort_ratio": _ratio(first, "plan_joint"),
                "gap_mean": max(entry["mean"] for entry in lost.values()),
                "gap_max": max(entry["max"] for entry in lost.values()),
                "num_speculative_tokens": K,
                "machine": platform.machine(),
                "numpy": np.__version__,
                "data": "synthetic",
                "repeats": args.repeats,
                "us": times,
                "gaps": lost,
            }
        )
    )


def _ratio(times: dict[str, dict[str, float]], name: str) -> float:
    return round(times[name]["median"] / times["sort"]["median"], 2)


if __name__ == "__main__":
    main()
