"""Every policy behind the common protocol."""

import math

import numpy as np
import pytest

from forespark.core import LatencyTable, Plan, StepInputs, VerifyInputs
from forespark.scheduler.oracle import plan_oracle
from forespark.scheduler.policies import POLICIES, ScoreSource, make_policy, parse_schedule
from forespark.scheduler.split import rank_split

SIZES = np.array([4, 8, 16, 32, 64, 128])
DRAFT = LatencyTable(SIZES, np.array([1.0, 1.1, 1.3, 2.0, 4.0, 9.0]), 128)
VERIFY = LatencyTable(SIZES, np.array([10.0, 10.2, 11.0, 14.0, 22.0, 40.0]), 128)
SCORES = np.array([0.9, 0.8, 0.3, 0.2], dtype=np.float32)[:, None] ** np.arange(1, 16)


def step(limits=(15, 15, 15, 15), scores=SCORES):
    return StepInputs(scores[: len(limits)], np.array(limits), len(limits), len(limits))


def launched(D, cap=None, scores=SCORES):
    return VerifyInputs(scores, np.full(len(scores), 15), 4, 4, D, 4, D if cap is None else cap)


def make(name, **more):
    return make_policy(name, DRAFT, VERIFY, schedule=[[1, 4, 2], [5, 512, 0]], **more)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_plans_and_replans_within_its_bounds(name):
    """Would catch a policy whose budgets the split cannot fill."""
    policy = make(name)
    decision = policy.plan(step((0, 1, 15, 15)))
    assert decision.policy == policy.name == name
    assert 0 <= decision.plan.verify_budget <= decision.plan.draft_budget <= 31
    again = policy.replan(launched(decision.plan.draft_budget, cap=2))
    assert again.plan.draft_budget == decision.plan.draft_budget
    assert again.plan.verify_budget <= 2


def test_off_never_drafts_and_pays_for_the_target_alone():
    """Would catch a baseline that still launches the drafter."""
    decision = make("off").plan(step())
    assert decision.plan == Plan(0, 0)
    assert decision.chosen.predicted_ms == 10.0


def test_full_drafts_and_verifies_everything():
    """Would catch a full-block baseline that trims."""
    decision = make("full").plan(step((15, 15, 3, 0)))
    assert decision.plan == Plan(33, 33)
    assert make("full").replan(launched(33, cap=30)).plan == Plan(33, 30)


def test_batchwise_really_drafts_k_for_every_request():
    """Would catch a batch schedule that shifts tokens between requests or drafts beyond k."""
    decision = make("batchwise").plan(step((15, 1, 15, 0)))
    assert decision.plan == Plan(5, 5)
    assert decision.max_draft_len == 2
    limits = np.minimum([15, 1, 15, 0], decision.max_draft_len)
    assert rank_split(SCORES, limits, decision.plan.draft_budget).tolist() == [2, 1, 2, 0]


def test_report_17_a_schedule_of_zero_costs_what_the_target_costs():
    """Would catch K = 0 that still pays a drafter launch: 8 requests cross into [5, 512, 0]."""
    policy = make("batchwise")
    crowd = StepInputs(np.tile(SCORES, (2, 1)), np.full(8, 15), 8, 8)
    decision = policy.plan(crowd)
    assert decision.plan == Plan(0, 0)
    assert decision.chosen.draft_ms == 0.0
    assert decision.chosen.predicted_ms == make("off").plan(crowd).chosen.predicted_ms == 10.2


def test_batchwise_gaps_and_larger_batches_keep_the_last_k():
    """Would catch a batch size without a schedule entry raising, or drafting at K."""
    policy = make_policy("batchwise", schedule=[[1, 2, 5], [6, 8, 3]])
    sizes = (1, 2, 4, 6, 8, 99)
    assert [policy.draft_len(size) for size in sizes] == [5, 5, 5, 3, 3, 3]


def test_both_forms_of_a_schedule_mean_the_same():
    """Would catch an off-by-one between (max_batch, k) and (first, last, k)."""
    assert parse_schedule([[4, 2], [512, 0]]) == parse_schedule([[1, 4, 2], [5, 512, 0]])


@pytest.mark.parametrize(
    "schedule",
    [None, [], [[2, 4, 1]], [[1, 4, 2], [4, 8, 1]], [[1, 4, -1]], [[4, 1], [2, 1]], [[1]]],
)
def test_a_broken_schedule_is_refused(schedule):
    """Would catch overlapping or missing ranges picking a k by accident."""
    with pytest.raises(ValueError, match="batchwise schedule"):
        make_policy("batchwise", schedule=schedule)


def test_adaptive_verification_drafts_full_blocks_and_trims_only_verification():
    """Would catch the "w/o JS" ablation quietly scheduling drafts too."""
    policy = make("adaptive_verification")
    decision = policy.plan(step())
    assert decision.plan.draft_budget == 60
    assert 0 < decision.plan.verify_budget < 60
    assert policy.replan(launched(60)).plan == decision.plan


def test_joint_beats_adaptive_verification_on_its_own_objective():
    """Would catch a joint search that is worse than the space it contains."""
    joint = make("joint").plan(step()).chosen.goodput
    assert joint > make("adaptive_verification").plan(step()).chosen.goodput


def test_report_18_easy_requests_get_long_drafts_in_one_batch_with_hard_ones():
    """Would catch a scheduler that still picks one length per batch."""
    decision = make("joint").plan(step())
    lens = rank_split(SCORES, np.full(4, 15), decision.plan.draft_budget)
    assert lens[:2].mean() > 2 * lens[2:].mean()


def test_single_curve_is_the_joint_planner_on_other_scores():
    """Would catch the ablation differing in more than the scores it reads."""
    assert make("single_curve").plan(step()).chosen == make("joint").plan(step()).chosen
    assert make("single_curve").plan_scores is ScoreSource.SINGLE_CURVE


def test_score_sources_are_stated():
    """Would catch an adapter feeding a policy another policy's scores."""
    sources = {name: (make(name).plan_scores, make(name).replan_scores) for name in POLICIES}
    none, pre, post = ScoreSource.NONE, ScoreSource.PRE_DRAFT, ScoreSource.POST_DRAFT
    assert sources["off"] == sources["full"] == sources["batchwise"] == (none, none)
    assert sources["joint"] == (pre, pre)
    assert sources["adaptive_verification"] == (post, post)


def test_fixed_policies_run_without_a_profile_and_say_so():
    """Would catch a baseline that cannot start on an unprofiled machine, or invents a price."""
    decision = make_policy("full").plan(step())
    assert decision.plan == Plan(60, 60)
    assert math.isnan(decision.chosen.predicted_ms)


def test_errors_name_what_is_supported():
    """Would catch a typo that falls back to some default policy."""
    with pytest.raises(ValueError, match="unknown 'jiont'; supported: off, full, batchwise"):
        make_policy("jiont", DRAFT, VERIFY)
    with pytest.raises(ValueError, match="'joint' needs a draft and a verify latency table"):
        make_policy("joint", DRAFT)


def test_oracle_drafts_the_shortest_length_that_earns_its_tokens():
    """Would catch an oracle that verifies rejected tokens or misses a non-prefix gain.

    Request 0 gets 2 accepted only by drafting 3; request 1 gets nothing at any length.
    """
    accepted = np.array([[0, 1, 1, 2], [0, 0, 0, 0]])
    cheap = LatencyTable(np.arange(1, 17), 0.1 + 0.001 * np.arange(1, 17), 16)
    target = LatencyTable(np.arange(1, 17), 1.0 + 0.001 * np.arange(1, 17), 16)
    plan = plan_oracle(accepted, np.array([3, 3]), 2, 2, cheap, target)
    assert plan.draft_lens.tolist() == [3, 0]
    assert plan.verify_lens.tolist() == [2, 0]
    assert plan.chosen.plan == Plan(3, 2)
    limited = plan_oracle(accepted, np.array([2, 3]), 2, 2, cheap, target)
    assert limited.chosen.plan == Plan(1, 1)
    with pytest.raises(ValueError, match=r"A\[i, d\] <= d"):
        plan_oracle(np.array([[0, 2]]), np.array([1]), 1, 1, cheap, target)


def test_oracle_equals_a_search_over_all_lengths():
    """Would catch a dynamic program that loses a combination of requests."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        accepted = np.minimum(rng.integers(0, 4, (3, 4)), np.arange(4))
        best = 0.0
        for d in np.ndindex(4, 4, 4):
            earned = sum(int(accepted[i, d[i]]) for i in range(3))
            for b in range(earned + 1):
                ms = float(DRAFT.at(sum(d) + 3 if sum(d) else 0)) + float(VERIFY.at(3 + b))
                best = max(best, (3 + b) / ms)
        plan = plan_oracle(accepted, np.full(3, 3), 3, 3, DRAFT, VERIFY)
        assert plan.chosen.goodput == pytest.approx(best)
