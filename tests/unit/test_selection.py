"""The value of picking after drafting: the table against simulated truth, and the plan on it."""

from __future__ import annotations

import numpy as np
import pytest

from forespark.core import LatencyTable, StepInputs, VerifyInputs
from forespark.drafter.planner import StepPlanner
from forespark.drafter.requests import RequestLimits
from forespark.scheduler.joint import plan_joint
from forespark.scheduler.policies import make_policy
from forespark.scheduler.selection import SelectionModel
from forespark.scheduler.selective import plan_selective, replan_selective

K = 8
SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
DRAFT = LatencyTable(SIZES, 1.5 + SIZES * 0.008, 512)
VERIFY = LatencyTable(SIZES, 8.0 + SIZES * 0.05, 512)


def batch(random: np.random.Generator, num_reqs: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [n, K] and survival [n, K] that spreads around them, both falling along a row."""
    scores = np.cumprod(random.beta(6, 2, (num_reqs, K)), axis=1).astype(np.float32)
    # Each position turns out good or bad, with the score's own ratio as its mean.
    steps = scores / np.concatenate((np.ones((num_reqs, 1)), scores[:, :-1]), axis=1)
    good = random.random((num_reqs, K)) < (steps - 0.2) / 0.75
    survival = np.cumprod(np.where(good, 0.95, 0.2), axis=1).astype(np.float32)
    return scores, survival


def trained(steps: int = 600, num_reqs: int = 32) -> SelectionModel:
    model, random = SelectionModel(), np.random.default_rng(1)
    for _ in range(steps):
        model.observe(*batch(random, num_reqs))
    return model


def realised(seed: int, num_reqs: int, drafted: int, verified: int, repeats: int = 300) -> float:
    """Mean survival that the `verified` best of the `drafted` highest scores add up to."""
    random, total = np.random.default_rng(seed), 0.0
    for _ in range(repeats):
        scores, survival = batch(random, num_reqs)
        kept = survival.ravel()[np.argsort(-scores.ravel(), kind="stable")[:drafted]]
        total += np.sort(kept)[::-1][:verified].sum()
    return total / repeats


@pytest.mark.parametrize(("drafted", "verified"), [(32, 32), (64, 32), (128, 32), (256, 64)])
def test_gain_is_what_selection_earns(drafted: int, verified: int) -> None:
    """Catches a table read in the wrong order or direction, and a gain that ignores how many were
    drafted: within 4 % of what picking the best really adds up to."""
    model, random = trained(), np.random.default_rng(7)
    found = []
    for _ in range(100):
        scores, _ = batch(random, 32)
        ranked = np.sort(scores.ravel())[::-1]
        found.append(float(model.gains(ranked, drafted, np.array([verified]))[0]))
    assert np.mean(found) == pytest.approx(realised(3, 32, drafted, verified), rel=0.04)


def test_gains_grow_with_both_budgets() -> None:
    """Catches a gain that falls when more is drafted or verified, and one that exceeds B."""
    model = trained(50)
    ranked = np.sort(batch(np.random.default_rng(2), 32)[0].ravel())[::-1]
    before = np.zeros(257)
    for drafted in (16, 64, 150, 256):
        gains = model.gains(ranked, drafted, np.arange(257))
        assert (np.diff(gains) >= -1e-12).all()
        assert (gains >= 0.97 * before).all()  # a bin's mean moves with what is drafted
        assert (gains <= np.arange(257) + 1e-9).all()
        before = gains


def test_outcomes_of_verified_tokens_correct_the_gain() -> None:
    """Catches a correction that the choice of tokens biases: only survival above a bar is
    verified, every survival is overstated by a quarter, and the gain must come out right."""
    random, model = np.random.default_rng(5), SelectionModel()
    for _ in range(1500):
        scores, true = batch(random, 32)
        stated = np.minimum(1.0, true * 1.25)
        accepted = (random.random((32, 1)) < true).sum(axis=1)  # one draw: a chain of prefixes
        verified = (stated > 0.3).sum(axis=1)
        model.observe_verified(stated, verified, np.minimum(accepted, verified))
        model.observe(scores, stated)
    scores, _ = batch(random, 32)
    ranked = np.sort(scores.ravel())[::-1]
    gain = float(model.gains(ranked, 128, np.array([48]))[0])
    assert gain == pytest.approx(realised(3, 32, 128, 48), rel=0.06)


def test_undrafted_positions_teach_nothing() -> None:
    """Catches -inf, the mark of a token that does not exist, counted as a hopeless one."""
    model, other = SelectionModel(), SelectionModel()
    scores, survival = batch(np.random.default_rng(0), 4)
    survival[:, 3:] = -np.inf
    model.observe(scores, survival)
    other.observe(scores[:, :3], survival[:, :3])
    ranked = np.sort(scores.ravel())[::-1]
    assert np.array_equal(
        model.gains(ranked, 20, np.arange(20)), other.gains(ranked, 20, np.arange(20))
    )


def step(scores: np.ndarray) -> StepInputs:
    return StepInputs(scores, np.full(len(scores), K), len(scores), len(scores))


def test_the_plan_drafts_more_than_it_verifies() -> None:
    """Catches a plan that ignores the ranking to come: by the true gain it must beat the plain
    joint plan here, and come within 1 % of the best (D, B) there is."""
    model, random = trained(), np.random.default_rng(11)
    scores, _ = batch(random, 32)
    plain = plan_joint(step(scores), DRAFT, VERIFY, 0.0)
    selective = plan_selective(step(scores), DRAFT, VERIFY, 0.0, model)
    assert selective.plan.draft_budget > selective.plan.verify_budget

    def goodput(drafted: int, verified: int) -> float:
        ms = DRAFT.at(drafted + 32 if drafted else 0) + VERIFY.at(32 + verified)
        return float((32 + realised(3, 32, drafted, verified, 100)) / ms)

    best = max(goodput(d, b) for d in range(32, 257, 32) for b in range(0, d + 1, 16))
    mine = goodput(selective.plan.draft_budget, selective.plan.verify_budget)
    assert mine > goodput(plain.plan.draft_budget, plain.plan.verify_budget)
    assert mine > 0.99 * best


def test_replan_stays_within_what_is_left() -> None:
    """Catches a B beyond the drafted tokens still present, or beyond a zero cap."""
    model = trained(20)
    scores, _ = batch(np.random.default_rng(4), 16)
    for cap in (0, 1, 7, 100):
        inputs = VerifyInputs(scores, np.full(16, K), 16, 16, 96, 16, cap)
        found = replan_selective(inputs, DRAFT, VERIFY, model)
        assert 0 <= found.plan.verify_budget <= min(cap, 96)
        assert found.plan.draft_budget == 96


def test_floors_and_empty_batches_take_the_plain_plan() -> None:
    """Catches a floor that the selective search does not know and would break."""
    model = trained(5)
    scores, _ = batch(np.random.default_rng(4), 6)
    floored = StepInputs(scores, np.full(6, K), 6, 6, min_draft_len=2)
    assert plan_selective(floored, DRAFT, VERIFY, 0.0, model) == plan_joint(
        floored, DRAFT, VERIFY, 0.0
    )
    nobody = StepInputs(scores, np.zeros(6, dtype=np.int32), 6, 6)
    assert plan_selective(nobody, DRAFT, VERIFY, 0.0, model).plan.draft_budget == 0


def test_the_planner_feeds_what_happened() -> None:
    """Catches outcomes credited to the wrong slot, a new request in an old slot counted as
    verified, and prefills (no token sampled) counted as rejections."""
    model = SelectionModel()
    planner = StepPlanner(
        make_policy("joint", DRAFT, VERIFY, selection=model), RequestLimits(8, K, 512), 8, K,
        prior_acceptance=0.6, min_draft_len=0,
    )  # fmt: skip
    slots, ones = np.array([5, 2, 7]), np.ones(3, dtype=np.int32)
    for slot in slots:
        planner.admit(int(slot), 512, enabled=True)
    record = planner.plan(["a", "b", "c"], slots, ones * 9, ones, ones * 0, ones > 0)
    scores = np.tile(np.linspace(0.9, 0.3, K), (8, 1)).astype(np.float32)
    survival = np.full((8, K), -np.inf, dtype=np.float32)
    survival[5, :4], survival[2, :2], survival[7, :1] = 0.8, 0.5, 0.2
    arrays = {"scores": scores, "survival": survival}
    first = {"num_sampled": np.array([1, 1, 0]), "num_rejected": np.array([0, 0, 4])}
    planner.learn_selection(record, arrays | first)
    assert model._verified.sum() == 0  # nothing was drafted before
    # Slot 5 keeps 3 of 4, slot 2 is a new request, slot 7 is still in its prompt.
    second = {"num_sampled": np.array([4, 1, 0]), "num_rejected": np.array([1, 0, 2])}
    planner.learn_selection(record, arrays | second)
    assert model._verified.sum() == 4 and model._accepted.sum() == 3
    assert model._expected.sum() == pytest.approx(4 * 0.8)


def test_what_spoke_against_drafting_is_forgotten() -> None:
    """Catches a plan that gave up drafting once and, drafting nothing, never learns otherwise."""
    model, fresh = SelectionModel(), SelectionModel()
    scores, survival = batch(np.random.default_rng(0), 32)
    for _ in range(300):
        model.observe(scores, np.minimum(survival, 0.05))
    ranked = np.sort(scores.ravel())[::-1]
    before = float(model.gains(ranked, 128, np.array([64]))[0])
    for _ in range(3000):
        model.observe(scores, np.full_like(survival, -np.inf))
    after = float(model.gains(ranked, 128, np.array([64]))[0])
    hoped = float(fresh.gains(ranked, 128, np.array([64]))[0])
    assert before < 0.2 * hoped and after > 0.5 * hoped
