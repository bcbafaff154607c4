"""The joint host decision on batches small enough to check by hand."""

import numpy as np
import pytest

from forespark.core import LatencyTable, Plan, StepInputs, VerifyInputs
from forespark.scheduler.exhaustive import exhaustive_plan, goodput_lost
from forespark.scheduler.joint import GUARD_FULL, GUARD_NONE, plan_joint, replan_verify


def table(sizes, ms, captured_limit=None):
    return LatencyTable(np.array(sizes), np.array(ms), captured_limit or sizes[-1])


def geometric(rates, K=15):
    return np.array(rates, dtype=np.float32)[:, None] ** np.arange(1, K + 1, dtype=np.float32)


def inputs(scores, limits=None, **more):
    n, K = scores.shape
    limits = np.full(n, K) if limits is None else np.array(limits)
    return StepInputs(scores, limits, more.pop("num_emit", n), more.pop("N", n), **more)


DRAFT = table([4, 8, 16, 32, 64], [1.0, 1.1, 1.3, 2.0, 4.0])
VERIFY = table([4, 8, 16, 32, 64], [10.0, 10.2, 11.0, 14.0, 22.0])


def test_budgets_fill_their_buckets():
    """Would catch a plan that pays for a graph and leaves part of it empty."""
    step = inputs(geometric([0.9, 0.8, 0.3, 0.2]))
    plan = plan_joint(step, DRAFT, VERIFY, 0.0).plan
    assert plan.draft_budget + 4 in DRAFT.sizes
    assert plan.verify_budget + 4 in VERIFY.sizes or plan.verify_budget == plan.draft_budget


def test_the_choice_is_the_exhaustive_optimum():
    """Would catch any shortcut of the search that loses goodput."""
    step = inputs(geometric([0.9, 0.8, 0.3, 0.2]))
    decision = plan_joint(step, DRAFT, VERIFY, 0.0)
    best = exhaustive_plan(step, DRAFT, VERIFY)
    assert decision.chosen.goodput == pytest.approx(best.goodput, rel=1e-12)
    assert decision.chosen.predicted_ms == pytest.approx(best.predicted_ms)
    assert decision.chosen.predicted_tokens == pytest.approx(best.predicted_tokens)


def test_a_free_draft_bucket_is_filled_beyond_what_is_verified():
    """Would catch D = B where drafting more costs nothing and the post-draft ranking could choose.

    The draft graph holds 60 tokens; verifying more than 12 doubles the step.
    """
    step = inputs(geometric([0.7] * 4))
    plan = plan_joint(step, table([64], [1.0]), table([16, 64], [10.0, 20.0]), 0.0).plan
    assert plan == Plan(60, 12)


def test_full_blocks_are_chosen_when_tokens_cost_nothing():
    """Would catch a search space without full-block drafting, the best plan at low load."""
    step = inputs(geometric([0.9]))
    decision = plan_joint(step, table([16], [1.0]), table([16], [10.0]), 0.0)
    assert decision.plan == Plan(15, 15)


def test_no_speculation_is_chosen_when_it_pays_best():
    """Would catch a planner that always drafts something, or charges T_draft for D = 0."""
    step = inputs(geometric([0.1, 0.1]))
    decision = plan_joint(step, table([64], [50.0]), VERIFY, 0.0)
    assert decision.plan == Plan(0, 0)
    assert decision.chosen.predicted_ms == 10.0
    assert decision.chosen.draft_ms == 0.0
    assert decision.guard is None
    assert decision.runner_up is not None


def test_prefill_tokens_raise_the_price_of_verification():
    """Would catch a plan that ignores the rest of the batch: N decides the bucket."""
    scores = geometric([0.9, 0.9])
    alone = plan_joint(inputs(scores), DRAFT, VERIFY, 0.0).plan
    steep = table([8, 16, 32, 64], [1.0, 2.0, 4.0, 60.0])
    with_prefill = plan_joint(inputs(scores, N=30), DRAFT, steep, 0.0).plan
    assert with_prefill.verify_budget <= 2 < alone.verify_budget


def test_only_requests_that_sample_count_as_guaranteed_tokens():
    """Would catch counting an unfinished prompt chunk as an emitted token."""
    step = inputs(geometric([0.5, 0.5]), num_emit=1)
    decision = plan_joint(step, table([64], [90.0]), VERIFY, 0.0)
    assert decision.plan == Plan(0, 0)
    assert decision.chosen.predicted_tokens == 1.0


def test_report_21_limits_bound_the_budget():
    """Would catch drafting past the end of a request: limits 0, 1 and 15 allow 16 tokens."""
    step = inputs(geometric([0.99] * 3), [0, 1, 15])
    plan = plan_joint(step, table([64], [1.0]), table([64], [10.0]), 0.0).plan
    assert plan == Plan(16, 16)


def test_report_20_an_opted_out_batch_launches_nothing():
    """Would catch drafting for a request that was excluded from speculation."""
    decision = plan_joint(inputs(geometric([0.99, 0.99]), [0, 0]), DRAFT, VERIFY, 0.0)
    assert decision.plan == Plan(0, 0)
    assert decision.notes == ("no request may draft this step",)


def test_report_8_a_flat_table_is_named_in_the_decision():
    """Would catch verify-all being sold as adaptive scheduling when no profile was taken."""
    flat = LatencyTable(np.array([8, 64]), np.array([5.0, 5.0]), 64, source="cost.json")
    decision = plan_joint(inputs(geometric([0.9])), DRAFT, flat, 0.0)
    assert any(
        note.startswith("warn: the verify") and "cost.json" in note for note in decision.notes
    )
    assert plan_joint(inputs(geometric([0.9])), DRAFT, VERIFY, 0.0).notes == ()


def test_report_10_a_sparse_profile_does_not_make_large_steps_free():
    """Would catch a budget that runs past the only measured size because it looks free there."""
    step = inputs(geometric([0.6] * 8))
    plan = plan_joint(step, table([64], [1.0]), table([64], [10.0]), 0.0).plan
    assert plan.draft_budget + 8 <= 64 and plan.verify_budget + 8 <= 64


def test_guard_no_speculation_refuses_a_gain_below_the_margin():
    """Would catch launching the drafter for a gain within the noise of the latency tables."""
    step = inputs(geometric([0.5]))
    draft, verify = table([64], [4.6]), table([64], [10.0])
    assert plan_joint(step, draft, verify, 0.0).plan.draft_budget > 0
    decision = plan_joint(step, draft, verify, 0.5)
    assert decision.plan == Plan(0, 0)
    assert decision.guard == GUARD_NONE
    assert decision.runner_up is not None and decision.runner_up.plan.draft_budget > 0


def test_guard_full_block_prevents_churn_for_a_small_gain():
    """Would catch trimming full blocks at low load for a predicted gain of one percent."""
    step = inputs(geometric([0.7]))
    draft, verify = table([12, 16], [1.0, 1.2]), table([16], [10.0])
    assert plan_joint(step, draft, verify, 0.0).plan == Plan(11, 11)
    decision = plan_joint(step, draft, verify, 0.04)
    assert decision.plan == Plan(15, 15)
    assert decision.guard == GUARD_FULL
    assert decision.runner_up is not None and decision.runner_up.plan == Plan(11, 11)


def test_a_large_gain_passes_both_guards():
    """Would catch a guard that pins the plan to a default whatever the gain."""
    step = inputs(geometric([0.8, 0.1, 0.1, 0.1]))
    decision = plan_joint(step, DRAFT, VERIFY, 0.04)
    assert decision.guard is None
    assert 0 < decision.plan.draft_budget < 60


def test_full_blocks_below_the_first_margin_are_never_fallen_back_to():
    """Would catch guard precedence that trades a good plan for one that guard 1 would refuse.

    No speculation earns 0.100 tokens/ms, D = 4 0.138 and full blocks 0.120: within 30 % of D = 4,
    but not 30 % above no speculation.
    """
    step = inputs(geometric([0.5]))
    decision = plan_joint(step, table([5, 16], [4.0, 6.6]), table([16], [10.0]), 0.3)
    assert decision.plan == Plan(4, 4)
    assert decision.guard is None


def test_floors_are_paid_for_or_nothing_is_drafted():
    """Would catch a D between 0 and the floors, which the split could not honour."""
    scores = geometric([0.9, 0.01, 0.01, 0.01])
    step = inputs(scores, [15, 15, 15, 1], min_draft_len=3)
    plan = plan_joint(step, DRAFT, VERIFY, 0.0).plan
    assert plan.draft_budget >= 10
    assert goodput_lost(plan, step, DRAFT, VERIFY) == pytest.approx(0.0, abs=1e-12)
    dear = table([8, 64], [0.5, 60.0])
    assert plan_joint(step, dear, VERIFY, 0.0).plan == Plan(0, 0)


def test_floors_are_rewarded_with_their_true_scores():
    """Would catch pretending that an owed token is worth as much as a chosen one."""
    step = inputs(geometric([0.9, 0.1], K=2), min_draft_len=2)
    decision = plan_joint(step, table([8], [0.1]), table([8], [10.0]), 0.0)
    expected = 2 + 0.9 + 0.81 + 0.1 + 0.01
    assert decision.chosen.predicted_tokens == pytest.approx(expected, rel=1e-6)


def test_bad_scores_and_margins_are_refused():
    """Would catch a NaN estimate steering budgets, and a margin that rewards losing plans."""
    scores = geometric([0.9, 0.8])
    scores[1, 3] = np.nan
    for floor in (0, 1):
        with pytest.raises(ValueError, match="NaN"):
            plan_joint(inputs(scores, min_draft_len=floor), DRAFT, VERIFY, 0.0)
    with pytest.raises(ValueError, match="min_gain"):
        plan_joint(inputs(geometric([0.9])), DRAFT, VERIFY, -0.1)
    with pytest.raises(ValueError, match="draft limits"):
        plan_joint(inputs(geometric([0.9, 0.8]), [3]), DRAFT, VERIFY, 0.0)
    with pytest.raises(ValueError, match="num_non_draft_tokens"):
        plan_joint(inputs(geometric([0.9]), N=0), DRAFT, VERIFY, 0.0)


def test_a_nan_beyond_the_limit_is_not_read():
    """Would catch refusing a step for a score that no draft can use."""
    scores = geometric([0.9])
    scores[0, 5:] = np.nan
    assert plan_joint(inputs(scores, [5]), DRAFT, VERIFY, 0.0).plan.draft_budget <= 5


def test_an_empty_batch_decides_nothing():
    """Would catch a crash in a step without decoding requests, with and without prefill."""
    for N in (0, 7):
        step = inputs(np.zeros((0, 15), np.float32), N=N)
        assert plan_joint(step, DRAFT, VERIFY, 0.04).plan == Plan(0, 0)


def verify_inputs(scores, D, **more):
    n, K = scores.shape
    return VerifyInputs(
        scores=scores,
        draft_limits=np.full(n, K),
        num_emit=n,
        num_non_draft_tokens=more.pop("N", n),
        draft_budget=D,
        num_drafted_reqs=more.pop("drafted", n),
        verify_cap=more.pop("cap", D),
        **more,
    )


def test_replanning_an_unchanged_step_keeps_the_plan():
    """Would catch two objectives that disagree, so that B jumps while the drafter runs."""
    scores = geometric([0.9, 0.8, 0.3, 0.2])
    first = plan_joint(inputs(scores), DRAFT, VERIFY, 0.0)
    again = replan_verify(verify_inputs(scores, first.plan.draft_budget), DRAFT, VERIFY)
    assert again.chosen == first.chosen


def test_replanning_sees_the_real_batch():
    """Would catch a B that still fits the N of the plan after a prefill joined the step."""
    scores = geometric([0.7] * 4)
    light = replan_verify(verify_inputs(scores, 28), DRAFT, VERIFY).plan
    heavy = replan_verify(
        verify_inputs(scores, 28, N=16), DRAFT, table([4, 16, 64], [10.0, 11.0, 90.0])
    ).plan
    assert light.verify_budget > heavy.verify_budget == 0


def test_replanning_never_exceeds_the_tokens_still_present():
    """Would catch a budget the GPU cannot fill because requests finished meanwhile."""
    free = table([512], [10.0])
    scores = geometric([0.9, 0.9])
    assert replan_verify(verify_inputs(scores, 60, cap=7, drafted=4), DRAFT, free).plan == Plan(
        60, 7
    )
    assert replan_verify(verify_inputs(scores, 60, cap=60, drafted=4), DRAFT, free).plan == Plan(
        60, 30
    )
    assert replan_verify(verify_inputs(scores, 0, cap=0), DRAFT, free).chosen.predicted_ms == 10.0


def test_replanning_ignores_positions_that_were_never_drafted():
    """Would catch -inf survival turning every sum into -inf, hence B into 0."""
    scores = geometric([0.9, 0.8])
    scores[:, 3:] = -np.inf
    decision = replan_verify(verify_inputs(scores, 6), DRAFT, VERIFY)
    assert decision.plan == Plan(6, 6)
    expected = 2 + scores[:, :3].sum()
    assert decision.chosen.predicted_tokens == pytest.approx(float(expected), rel=1e-6)
