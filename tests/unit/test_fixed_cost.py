"""What steps cost beyond the tables: learned from the right steps, added to every plan's price."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from forespark.core import LatencyTable, StepInputs
from forespark.drafter.planner import StepPlanner
from forespark.drafter.requests import RequestLimits
from forespark.scheduler.exhaustive import exhaustive_plan
from forespark.scheduler.fixed_cost import FEWEST, WINDOW, FixedCost
from forespark.scheduler.policies import make_policy

K = 4
DRAFT = LatencyTable(np.array([1, 2, 4, 8, 16, 64]), np.array([1, 1, 1.5, 2, 3, 9.0]), 64)
VERIFY = LatencyTable(np.array([1, 2, 4, 8, 16, 64]), np.array([5, 5, 5.2, 6, 8, 20.0]), 64)


def learned(num_reqs: int, priced: float, measured: float, steps: int = FEWEST) -> FixedCost:
    cost = FixedCost()
    for _ in range(steps):
        cost.observe(num_reqs, priced, measured)
    return cost


def test_median_of_the_latest_steps_by_size() -> None:
    """Catches a mean (one stall would move it), a mix of sizes, and old steps that never leave."""
    cost = learned(8, 10.0, 13.0, steps=WINDOW)
    cost.observe(8, 10.0, 39.0)
    assert cost.at(8) == pytest.approx(3.0)
    for _ in range(FEWEST):
        cost.observe(64, 30.0, 31.0)
    assert cost.at(64) == pytest.approx(1.0) and cost.at(15) == pytest.approx(3.0)
    for _ in range(WINDOW):
        cost.observe(8, 10.0, 11.0)
    assert cost.at(8) == pytest.approx(1.0)


def test_unseen_sizes_take_the_nearest() -> None:
    """Catches a batch of a new size that is priced as if nothing were known."""
    cost = learned(8, 10.0, 12.0)
    for _ in range(FEWEST):
        cost.observe(128, 10.0, 17.0)
    assert [cost.at(n) for n in (1, 20, 300)] == pytest.approx([2.0, 2.0, 7.0])


@pytest.mark.parametrize(
    ("priced", "measured"), [(math.nan, 5.0), (10.0, 400.0), (10.0, math.nan), (10.0, 0.0)]
)
def test_pauses_and_unpriced_steps_teach_nothing(priced: float, measured: float) -> None:
    """Catches an idle engine's pause, or a policy without prices, counted as a step's cost."""
    assert learned(4, priced, measured).at(4) == 0.0


def test_few_steps_are_not_believed_and_a_price_stays_positive() -> None:
    """Catches a first compiled step that prices all others, and a price that reaches zero."""
    assert learned(4, 10.0, 30.0, steps=FEWEST - 1).at(4) == 0.0
    assert learned(4, 10.0, 0.001).at(4) == pytest.approx(-5.0)


def inputs(fixed_ms: float) -> StepInputs:
    scores = np.tile(np.array([0.5, 0.3, 0.15, 0.1], dtype=np.float32), (3, 1))
    return StepInputs(scores, np.full(3, K), 3, 3, fixed_ms=fixed_ms)


def test_a_fixed_cost_makes_drafts_worth_more() -> None:
    """Catches a fixed cost that is added to some plans only, or to none: it must be able to change
    the choice, by the exhaustive search's own account."""
    policy = make_policy("joint", DRAFT, VERIFY)
    lean, heavy = (policy.plan(inputs(fixed)) for fixed in (0.0, 40.0))
    for fixed, found in ((0.0, lean), (40.0, heavy)):
        best = exhaustive_plan(inputs(fixed), DRAFT, VERIFY)
        assert found.chosen.goodput == pytest.approx(best.goodput)
    assert heavy.plan.verify_budget > lean.plan.verify_budget
    prices = DRAFT.at(heavy.plan.draft_budget + 3) + VERIFY.at(heavy.plan.verify_budget + 3)
    assert heavy.chosen.predicted_ms == pytest.approx(float(prices) + 40.0)


@pytest.mark.parametrize("policy", ["joint", "adaptive_verification", "batchwise"])
def test_the_planner_learns_from_decode_steps(policy: str) -> None:
    """Catches a planner that learns its own surcharge again every step, so that it grows without
    end, and one that takes a prefill for a slow decode step."""
    fixed = FixedCost()
    planner = StepPlanner(
        make_policy(policy, DRAFT, VERIFY, schedule=[[8, 2]] if policy == "batchwise" else None),
        RequestLimits(8, K, 512),
        8,
        K,
        prior_acceptance=0.6,
        min_draft_len=0,
        fixed_cost=fixed,
    )
    slots, ones = np.arange(3), np.ones(3, dtype=np.int32)
    for slot in slots:
        planner.admit(int(slot), 512, enabled=True)

    def step(extra_ms: float, prefill: int = 0) -> None:
        record = planner.plan(["a", "b", "c"], slots, ones * 9, ones, ones * 0, ones > 0)
        limits = record.limits
        planner.replan(["a", "b", "c"], slots, limits, 3 + prefill, 3, 100)
        assert record.verify is not None
        priced = record.verify.chosen.predicted_ms - record.fixed_ms
        record.launched_at = time.perf_counter() - (priced + extra_ms) / 1e3

    for _ in range(3 * WINDOW):
        step(2.0)
    assert fixed.at(3) == pytest.approx(2.0, abs=0.3)
    assert planner.last is not None and planner.last.fixed_ms == pytest.approx(2.0, abs=0.3)
    for _ in range(2 * WINDOW):
        step(9.0, prefill=5)
    assert fixed.at(3) == pytest.approx(2.0, abs=0.3)
    # A host that runs ahead sees a prefill's time one interval late.
    for _ in range(WINDOW):
        step(2.0, prefill=5)
        step(9.0)
    assert fixed.at(3) == pytest.approx(2.0, abs=0.3)


def test_beside_other_ranks_only_rank_0s_clock_teaches() -> None:
    """Catches a rank that learns from its own clock, and a pause or a prefill taken from rank 0."""
    fixed = FixedCost()
    policy = make_policy("joint", DRAFT, VERIFY)
    limits = RequestLimits(8, K, 512)
    planner = StepPlanner(policy, limits, 8, K, 0.6, 0, fixed, clock_of_rank_0=True)
    slots, ones = np.arange(3), np.ones(3, dtype=np.int32)
    for slot in slots:
        planner.admit(int(slot), 512, enabled=True)
    for index in range(2 * WINDOW):
        record = planner.plan(["a", "b", "c"], slots, ones * 9, ones, ones * 0, ones > 0)
        if index == WINDOW:
            assert fixed.at(3) == 0.0  # many steps by its own clock, none by rank 0's
        if index >= WINDOW:
            assert record.priced is not None
            planner.learn_cost(record, record.priced[1] + 4.0)
        planner.replan(["a", "b", "c"], slots, record.limits, 3, 3, 100)
    assert fixed.at(3) == pytest.approx(4.0)
