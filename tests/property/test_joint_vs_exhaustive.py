"""The fast search against brute force on random batches and tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forespark.core import LatencyTable, StepInputs, VerifyInputs
from forespark.scheduler.exhaustive import exhaustive_lengths, exhaustive_plan, price_plan
from forespark.scheduler.joint import plan_joint, replan_verify

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def tables(draw, base_ms):
    """Any legal table: sparse or dense, steep or flat, captured fully, partly or hardly."""
    steps = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    sizes = np.cumsum(steps)
    rises = draw(
        st.lists(
            st.one_of(st.just(0.0), st.floats(0.0, 8.0)),
            min_size=len(steps),
            max_size=len(steps),
        )
    )
    limit = draw(st.sampled_from([0, *sizes.tolist()]))
    return LatencyTable(sizes, base_ms + np.cumsum(rises), int(limit))


@st.composite
def batches(draw, max_reqs=6, max_len=6, most_floor=0, least_floor=0):
    n = draw(st.integers(1, max_reqs))
    K = draw(st.integers(1, max_len))
    accept = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.8, 0.95, 1.0])
    rates = draw(st.lists(st.lists(accept, min_size=K, max_size=K), min_size=n, max_size=n))
    scores = np.cumprod(np.array(rates, dtype=np.float32), axis=1)
    limits = np.array(draw(st.lists(st.integers(0, K), min_size=n, max_size=n)))
    num_emit = draw(st.integers(1, n))
    prefill = draw(st.integers(0, 60))
    return StepInputs(
        scores, limits, num_emit, n + prefill, draw(st.integers(least_floor, most_floor))
    )


@SETTINGS
@given(batches(), tables(0.5), tables(5.0))
def test_joint_search_is_exact(step, draft, verify):
    """Would catch any (D, B) that brute force finds and the one-dimensional search cannot."""
    chosen = plan_joint(step, draft, verify, 0.0).chosen
    best = exhaustive_plan(step, draft, verify)
    assert chosen.goodput == pytest.approx(best.goodput, rel=1e-9)
    assert price_plan(chosen.plan, step, draft, verify) == pytest.approx(chosen.goodput, rel=1e-9)


@SETTINGS
@given(batches(least_floor=1, most_floor=4), tables(0.5), tables(5.0))
def test_joint_search_with_floors_is_exact_on_small_batches(step, draft, verify):
    """Would catch a floored plan that misprices which of its drafted tokens are verified."""
    chosen = plan_joint(step, draft, verify, 0.0).chosen
    best = exhaustive_plan(step, draft, verify)
    assert chosen.goodput == pytest.approx(best.goodput, rel=1e-9)
    assert price_plan(chosen.plan, step, draft, verify) == pytest.approx(chosen.goodput, rel=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 48, 256, 10_000]), st.integers(0, 2))
def test_large_batches_lose_at_most_a_ten_thousandth(seed, captured_limit, floor):
    """Would catch a bounded candidate set that is too coarse where no bucket exists."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 60))
    rates = rng.beta(rng.uniform(1, 6), rng.uniform(0.5, 3), (n, 15))
    scores = np.cumprod(rates, axis=1).astype(np.float32)
    sizes = np.unique(np.r_[8 * np.arange(1, 40), 2 ** np.arange(9, 13)])
    draft = LatencyTable(
        sizes, rng.uniform(0.3, 2) + sizes * rng.uniform(2e-4, 6e-3), captured_limit
    )
    slope = np.maximum(sizes - rng.integers(1, 300), 0) * rng.uniform(0.003, 0.05)
    verify = LatencyTable(sizes, rng.uniform(5, 20) + slope, captured_limit)
    step = StepInputs(scores, rng.integers(0, 16, n), n, n + int(rng.integers(0, 200)), floor)
    chosen = plan_joint(step, draft, verify, 0.0).chosen
    assert chosen.goodput >= exhaustive_plan(step, draft, verify).goodput * (1 - 1e-4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches(max_reqs=3, max_len=3, most_floor=2), tables(0.5), tables(5.0))
def test_no_split_of_the_requests_beats_pooling_and_sorting(step, draft, verify):
    """Would catch a batch where ranking all scores together is not the best split."""
    best, _, _ = exhaustive_lengths(step, draft, verify)
    assert plan_joint(step, draft, verify, 0.0).chosen.goodput == pytest.approx(best, rel=1e-6)


@SETTINGS
@given(batches(), tables(0.5), tables(5.0), st.floats(0.0, 0.3))
def test_the_guards_never_cost_more_than_the_margin(step, draft, verify, min_gain):
    """Would catch guard precedence that falls back to a plan far below the best one."""
    chosen = plan_joint(step, draft, verify, min_gain).chosen
    best = exhaustive_plan(step, draft, verify)
    assert chosen.goodput >= best.goodput / (1 + min_gain) * (1 - 1e-9)


@SETTINGS
@given(batches(most_floor=3), tables(0.5), tables(5.0))
def test_the_runner_up_is_another_and_no_better_plan(step, draft, verify):
    """Would catch a runner-up that is the choice itself, or beats it without a guard."""
    decision = plan_joint(step, draft, verify, 0.0)
    if decision.runner_up is not None:
        assert decision.runner_up.plan != decision.plan
        assert decision.runner_up.goodput <= decision.chosen.goodput


@SETTINGS
@given(batches(), tables(0.5), tables(5.0), st.integers(0, 40), st.integers(0, 40))
def test_replanning_is_the_best_b_for_the_drafted_d(step, draft, verify, drafted, cap):
    """Would catch a re-planned B that is over the cap or not the best one."""
    drafted = min(drafted, int(step.draft_limits.sum()))
    cap = min(cap, drafted)
    request = VerifyInputs(
        step.scores,
        step.draft_limits,
        step.num_emit,
        step.num_non_draft_tokens,
        drafted,
        len(step.draft_limits),
        cap,
    )
    chosen = replan_verify(request, draft, verify).chosen
    eligible = np.arange(step.scores.shape[1]) < step.draft_limits[:, None]
    ranked = np.sort(step.scores[eligible])[::-1]
    draft_ms = float(draft.at(drafted + len(step.draft_limits))) if drafted else 0.0
    best = max(
        (step.num_emit + float(ranked[:b].sum(dtype=np.float64)))
        / (draft_ms + float(verify.at(step.num_non_draft_tokens + b)))
        for b in range(cap + 1)
    )
    assert chosen.plan.draft_budget == drafted and chosen.plan.verify_budget <= cap
    assert chosen.goodput == pytest.approx(best, rel=1e-9)
