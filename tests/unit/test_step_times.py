"""Predicted against measured step time: which steps are compared, and what is made of them."""

from __future__ import annotations

import argparse
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forespark.benchmarks.profile_check import check_arguments
from forespark.benchmarks.step_times import errors, take, watch

from forespark.core import LatencyTable
from forespark.drafter.planner import DraftRecord, StepPlanner
from forespark.drafter.requests import RequestLimits
from forespark.metrics import StepStats
from forespark.scheduler.policies import make_policy
from forespark.verifier.observe import Observer

K = 4
DRAFT = LatencyTable(np.array([1, 8, 64]), np.array([1, 2, 9.0]), 64)
VERIFY = LatencyTable(np.array([1, 8, 64]), np.array([5, 6, 20.0]), 64)


class Steps:
    """A planner whose steps are dictated: who runs, and how many non-draft tokens."""

    def __init__(self) -> None:
        self.planner = StepPlanner(
            make_policy("joint", DRAFT, VERIFY), RequestLimits(8, K, 512), 8, K, 0.6, 0
        )
        for slot in range(8):
            self.planner.admit(slot, 512, enabled=True)

    def verify(self, names: str, tokens: int) -> None:
        slots = np.arange(len(names))
        limits = np.full(len(names), K)
        self.planner.replan(list(names), slots, limits, tokens, len(names), 100)

    def draft(self, names: str) -> DraftRecord:
        slots, ones = np.arange(len(names)), np.ones(len(names), dtype=np.int32)
        return self.planner.plan(list(names), slots, ones * 9, ones, ones * 0, ones > 0)


# What each verification holds after a draft for "abc", by name.
CASES = {
    "decodes": ("abc", 3, True),
    "one left": ("ac", 2, True),
    "other order": ("cab", 3, True),
    "prefill": ("abc", 9, False),
    "prompt of one token": ("abd", 3, False),
}


@pytest.mark.parametrize("case", CASES)
def test_only_decodes_behind_decodes_are_timed(case: str) -> None:
    """Catches a prefill, or a step before which the engine may have idled, held against a decode's
    price; and the step behind it, whose host time still contains it."""
    names, tokens, counts = CASES[case]
    steps, seen = Steps(), []
    # Each draft closes the step before it.
    for now, size in (("abc", 3), ("abc", 3), (names, tokens), ("abc", 3), ("abc", 3)):
        seen.append(steps.draft("abc").steady)
        steps.verify(now, size)
    seen.append(steps.draft("abc").steady)
    assert seen == [False, False, True, counts, counts, True]


def test_metrics_compare_like_with_like() -> None:
    """Catches measured time of steps that have no price of their own: it must be summed over
    exactly the steps whose prediction is."""
    stats: list[StepStats] = []
    metrics: Any = SimpleNamespace(observe=stats.append)
    observer, steps = Observer(K, metrics, None, False), Steps()
    arrays = {
        "num_sampled": np.ones(3, dtype=np.int32), "num_rejected": np.zeros(3, dtype=np.int32),
        "draft_lens": np.zeros(3, dtype=np.int32),
    }  # fmt: skip
    prices = []
    for tokens in (3, 3, 9, 3, 3):
        observer.observe(steps.draft("abc"), arrays)
        steps.verify("abc", tokens)
        assert steps.planner.last is not None and steps.planner.last.verify is not None
        prices.append(steps.planner.last.verify.chosen.predicted_ms)
    observer.observe(steps.draft("abc"), arrays)
    timed = [not math.isnan(step.actual_ms) for step in stats]
    assert timed == [not math.isnan(step.predicted_ms) for step in stats]
    assert timed == [False, False, True, False, False, True]
    assert stats[2].predicted_ms == prices[1] and stats[5].predicted_ms == prices[4]
    assert stats[3].predicted_tokens > 0  # tokens are compared for every step


def test_worker_side_notes_steady_steps_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a price paired with another step's time, dummy steps that count, and a wrapper that
    stays on the speculator."""
    steps = Steps()

    class Speculator:
        device = SimpleNamespace(type="cpu")
        planner = SimpleNamespace(last=None)

        def propose(self, record: DraftRecord | None) -> None:
            if record is not None:
                self.planner.last = record

    speculator = Speculator()
    worker = SimpleNamespace(model_runner=SimpleNamespace(speculator=speculator))
    planned = []
    for tokens in (3, 3, 3, 9, 3):
        planned.append(steps.draft("abc"))
        steps.verify("abc", tokens)
    clock = iter(float(at) for at in (0, 10, 11, 12, 30, 35))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock) / 1e3)
    watch(worker)
    for record in (planned[0], planned[1], None, planned[2], planned[3], planned[4]):
        speculator.propose(record)
    rows = take(worker)
    assert "propose" not in vars(speculator) and "step_times" not in vars(speculator)
    # Drafts 0 -> 1 follow nothing, 3 -> 4 held a prefill.
    assert [row["measured_ms"] for row in rows] == pytest.approx([2.0, 18.0])
    assert planned[1].verify is not None
    assert rows[0]["predicted_ms"] == planned[1].verify.chosen.predicted_ms


def test_errors_are_shares_of_what_was_measured() -> None:
    """Catches a share of the prediction, a mean that one stall moves, and a lost sign."""
    pairs = [(9.0, 10.0), (9.0, 10.0), (11.0, 10.0), (9.0, 10.0), (10.0, 1000.0)]
    rows = [{"predicted_ms": p, "measured_ms": m, "fixed_ms": 1.0} for p, m in pairs]
    found = errors(rows, 8)
    assert found["median_abs_error"] == pytest.approx(0.1)
    assert found["median_error"] == pytest.approx(-0.1)
    assert found["p90_abs_error"] == pytest.approx(0.1 + 0.6 * 0.89)
    assert (found["steps"], found["measured_ms"], found["fixed_ms"]) == (5, 10.0, 1.0)
    with pytest.raises(ValueError, match="at 8 no decode-only step"):
        errors([], 8)
    with pytest.raises(ValueError, match="at load 8 have no price"):
        errors([rows[0] | {"predicted_ms": math.nan}], 8)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"method": "dflash"}, "--method: dflash predicts no step time"),
        ({"policies": ["full"]}, "--policies: full must be one"),
        ({"policies": ["joint", "single_curve"]}, "--policies: joint,single_curve must be one"),
        ({"loads": [1, 1]}, "names a load twice"),
    ],
)
def test_runs_without_prices_are_refused(changed: dict[str, Any], line: str) -> None:
    """Catches a minute of engine start before a run that cannot say anything."""
    given = {"method": "forespark", "policies": ["joint"], "loads": [1, 32]}
    check_arguments(argparse.Namespace(**given))
    with pytest.raises(ValueError, match=line):
        check_arguments(argparse.Namespace(**(given | changed)))


def test_a_profile_of_other_steps_than_asked_for_is_refused() -> None:
    """Catches a price that stands for 64 tokens and was measured on the 48 that fit."""
    pytest.importorskip("vllm")
    from forespark.verifier.profile import REPEATS, check_executed

    ran = [SimpleNamespace(num_target_tokens=48, num_reqs=4)] * REPEATS
    check_executed(ran, 48, 16, K)
    with pytest.raises(ValueError, match="a step of 64 tokens ran 48"):
        check_executed(ran, 64, 0, K)
    with pytest.raises(ValueError, match="a draft of 17 tokens ran 16"):
        check_executed(ran, 48, 17, K)
    with pytest.raises(ValueError, match="4 of 5 steps"):
        check_executed(ran[1:], 48, 0, K)
