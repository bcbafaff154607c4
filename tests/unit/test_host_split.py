"""The host split: the device kernel's lengths on last step's numbers, and nobody else's numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from forespark.triton_kernels.rank_ref import rank_ref

from forespark.core import LatencyTable
from forespark.drafter.host_split import HostSplit
from forespark.drafter.planner import DraftRecord, StepPlanner
from forespark.drafter.requests import RequestLimits
from forespark.scheduler.policies import ScoreSource, make_policy
from forespark.scheduler.split import rank_split

K, SLOTS = 4, 8
CHEAP = LatencyTable(np.array([1, 64]), np.array([1.0, 1.1]), 64)
# D + n rows: past ten, a draft costs more than it can bring.
SOME = LatencyTable(np.array([1, 4, 8, 10, 15]), np.array([0.5, 1.0, 1.5, 2.0, 30.0]), 64)
STEEP = LatencyTable(np.array([1, 2, 4, 6, 8, 16, 64]), np.array([5, 5, 6, 8, 12, 40, 200.0]), 64)


def test_lengths_are_the_devices_for_the_same_scores() -> None:
    """Catches a tie that host and device break differently: by batch row instead of slot."""
    rng = np.random.default_rng(4)
    for _ in range(200):
        n, width, floor = int(rng.integers(0, 9)), int(rng.integers(1, 6)), int(rng.integers(0, 3))
        scores = -np.sort(-rng.integers(0, 4, (n, width)) / 4, axis=1).astype(np.float32)
        scores[rng.random((n, width)).cumsum(axis=1) > 0.8 * width] = -np.inf
        limits = rng.integers(0, width + 1, n).astype(np.int32)
        slots = rng.permutation(3 * n)[:n]
        budget = int(rng.integers(0, n * width + 2))
        host = rank_split(scores, limits, budget, floor, order=slots)
        device = rank_ref(
            torch.from_numpy(scores), torch.from_numpy(limits), budget,
            torch.from_numpy(slots).int(), floor,
        )  # fmt: skip
        assert host.tolist() == device.tolist()
        assert host.sum() == min(budget, limits.sum()) and host.dtype == np.int32


def test_verification_takes_only_what_was_drafted_and_still_scheduled() -> None:
    """Catches b above d, a length for a new request in a used slot, and a sum below B."""
    split = HostSplit(SLOTS, min_draft_len=0)
    slots, even = np.array([5, 2, 0]), np.full((3, K), 0.5, dtype=np.float32)
    assert split.draft(slots, even, np.array([4, 3, 4]), 7).tolist() == [0, 3, 4]
    assert split.held(slots, np.array([4, 4, 1])).tolist() == [0, 3, 1]
    assert split.verify(slots, even, even, np.array([4, 4, 1]), 4).tolist() == [0, 3, 1]
    split.forget(2)
    assert split.held(slots, np.full(3, K)).tolist() == [0, 0, 4]
    assert split.verify(slots, even, even, np.full(3, K), 9).tolist() == [0, 0, 4]


def test_positions_without_survival_rank_by_what_was_expected() -> None:
    """Catches a request that drafted nothing last time and is therefore never verified, and a
    stand-in that outranks the token before it."""
    split = HostSplit(SLOTS, min_draft_len=0)
    slots, limits = np.array([0, 1]), np.array([K, K])
    split.draft(slots, np.full((2, K), 0.9), limits, 2 * K)
    survival = np.array([[-np.inf] * K, [0.3, 0.2, -np.inf, -np.inf]])
    scores = np.array([[0.8, 0.7, 0.6, 0.1], [0.9, 0.9, 0.9, 0.9]])
    assert split.verify(slots, survival, scores, limits, 3).tolist() == [3, 0]
    assert split.verify(slots, survival, scores, limits, 7).tolist() == [3, 4]


def planner(policy: str = "joint", floor: int = 0, draft: LatencyTable = CHEAP) -> StepPlanner:
    schedule = [[8, 2]] if policy == "batchwise" else None
    made = StepPlanner(
        make_policy(policy, draft, STEEP, schedule=schedule),
        RequestLimits(SLOTS, K, 512), SLOTS, K, 0.6, floor, host_split=True,
    )  # fmt: skip
    for slot in range(SLOTS):
        made.admit(slot, 512, enabled=True)
    return made


def plan(
    made: StepPlanner, names: str, slots: list[int], prefill: tuple[int, ...] = ()
) -> DraftRecord:
    """A step of one token a request; the requests in the slots `prefill` are still reading."""
    rows, ones = np.array(slots), np.ones(len(slots), dtype=np.int32)
    return made.plan(list(names), rows, ones * 9, ones, ones * 0, ~np.isin(rows, prefill))


def replan(made: StepPlanner, names: str, slots: list[int], scheduled: list[int]) -> np.ndarray:
    """Verified lengths of a step, with what every re-plan must keep."""
    rows, drafts, n = np.array(slots), np.array(scheduled, dtype=np.int32), len(slots)
    budget = made.replan(list(names), rows, drafts, n, n, 100).plan.verify_budget
    lens = made.verify_lens(rows, drafts, budget)
    assert lens.sum() == budget and (lens <= drafts).all()
    return lens


def publish(made: StepPlanner, record: DraftRecord, accept: dict[int, float]) -> None:
    """Estimates of the draft `record` arrive: each slot accepts a token with this chance."""
    rows = np.zeros((SLOTS, K), dtype=np.float32)
    for slot, chance in accept.items():
        rows[slot] = chance ** np.arange(1, K + 1)
    made.publish(ScoreSource.PRE_DRAFT, rows, record.ticket)
    made.publish(ScoreSource.SINGLE_CURVE, rows, record.ticket)
    made.publish(ScoreSource.POST_DRAFT, rows, record.ticket)


@pytest.mark.parametrize("policy", ["joint", "single_curve", "adaptive_verification", "batchwise"])
@pytest.mark.parametrize("floor", [0, 1])
def test_lengths_are_known_before_launch_and_sum_to_the_plan(policy: str, floor: int) -> None:
    """Catches a policy whose lengths are missing on the host, and sums other than D and B."""
    made = planner(policy, floor, draft=SOME)
    for _ in range(4):
        record = plan(made, "abc", [4, 1, 6])
        assert record.lens is not None and record.lens.sum() == record.drafted
        assert (record.lens <= record.limits).all()
        assert record.exact_lens == dict(zip("abc", record.lens.tolist(), strict=True))
        if policy in ("joint", "single_curve") and record.drafted:
            assert record.lens.min() >= floor
        held = record.lens
        assert (replan(made, "abc", [4, 1, 6], [K] * 3) <= held).all()
        publish(made, record, {4: 0.95, 1: 0.2, 6: 0.6})
    if policy == "joint":
        easy, hard, _ = record.lens
        assert easy > hard


def test_a_reused_slot_knows_nothing_of_its_last_owner() -> None:
    """Catches estimates or drafted lengths of a finished request used for the one in its slot, also
    when their copy arrives after the newcomer was admitted."""
    made = planner()
    record = plan(made, "ab", [0, 1])
    publish(made, record, {0: 0.99, 1: 0.3})
    record = plan(made, "ab", [0, 1])
    assert record.lens is not None and record.lens[0] == K
    made.admit(0, 512, enabled=True)  # a is gone, c takes its slot
    assert made.host_split is not None
    assert made.host_split.held(np.array([0]), np.array([K])).tolist() == [0]
    # Resumed with the placeholders of a padded prompt: scheduled, but never drafted.
    assert replan(made, "cb", [0, 1], [K, K])[0] == 0
    publish(made, record, {0: 0.99, 1: 0.3})  # the late copy
    for source in (ScoreSource.PRE_DRAFT, ScoreSource.POST_DRAFT):
        newcomer, other = made.stale[source].gather(np.array([0, 1]))
        assert newcomer.tolist() == other.tolist()  # the mean of those who are known


def test_an_unfinished_prompt_is_still_new_when_it_drafts() -> None:
    """Catches zeros of a request that could not draft yet, kept as if they had been estimated: its
    first draft would be the last to get tokens."""
    made = planner()
    record = plan(made, "ab", [0, 1], prefill=(0,))
    assert record.lens is not None and record.lens[0] == 0
    publish(made, record, {0: 0.0, 1: 0.7})
    newcomer, other = made.stale[ScoreSource.PRE_DRAFT].gather(np.array([0, 1]))
    assert newcomer.tolist() == other.tolist() and newcomer[0] == pytest.approx(0.7)


def test_limits_and_opt_outs_hold() -> None:
    """Catches a draft for a request that refused it, or past the end of one."""
    made = planner()
    made.admit(3, 512, enabled=False)
    made.admit(5, 13, enabled=True)  # 10 tokens by now, one more is sampled: room for one draft
    record = plan(made, "abc", [3, 5, 1])
    assert record.lens is not None and record.lens.tolist() == [0, 1, K]


def test_without_estimates_a_short_budget_still_fits() -> None:
    """Catches batchwise, which has no scores, with a B that the sampler's room cut short."""
    made = planner("batchwise")
    record = plan(made, "ab", [6, 2])
    assert record.lens is not None and record.lens.tolist() == [2, 2]
    drafts = np.array([K, K], dtype=np.int32)
    budget = made.replan(["a", "b"], np.array([6, 2]), drafts, 2, 2, 3).plan.verify_budget
    assert budget == 3
    assert made.verify_lens(np.array([6, 2]), drafts, budget).tolist() == [1, 2]
