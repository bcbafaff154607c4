"""Survival corrected while serving: recovered without bias, forgotten, and worth having."""

from __future__ import annotations

import numpy as np
import pytest
from forespark.benchmarks.simulate import Answers, policy_named, simulate
from forespark.calibration.traces import DraftTrace

from forespark.config import ForeSparkConfig
from forespark.core import LatencyTable
from forespark.drafter.planner import StepPlanner
from forespark.drafter.requests import RequestLimits
from forespark.estimators.stale import CopyTicket
from forespark.scheduler.correction import MOST, SurvivalCorrection
from forespark.scheduler.policies import ScoreSource, make_policy

K = 6
SIZES = np.unique(np.concatenate([np.arange(1, 17), np.arange(16, 2049, 16)]))
DRAFT = LatencyTable(SIZES, 1.5 + SIZES * 0.01, 2048)
VERIFY = LatencyTable(SIZES, 8.0 + SIZES * 0.08, 2048)
EASE = 0.93, 0.15  # acceptance of a token that turned out well, and of another one


def drafts(random: np.random.Generator, num_reqs: int) -> tuple[np.ndarray, np.ndarray]:
    """(scores, survival) [n, K] that agree on average: each token turns out well or not."""
    known = random.beta(5, 2, num_reqs)[:, None]
    good = random.random((num_reqs, K)) < known
    mean = EASE[0] * known + EASE[1] * (1 - known)
    scores = np.cumprod(np.tile(mean, (1, K)), axis=1)
    return scores.astype(np.float32), np.cumprod(np.where(good, *EASE), axis=1).astype(np.float32)


def taught(true: np.ndarray, bar: float = 0.35, steps: int = 400) -> SurvivalCorrection:
    """After `steps` in which tokens are accepted `true` times as often as their estimates say, and
    only survival above `bar` is verified."""
    random, correction = np.random.default_rng(3), SurvivalCorrection(K)
    for _ in range(steps):
        scores, survival = drafts(random, 64)
        before = np.concatenate((np.ones((64, 1)), survival[:, :-1]), axis=1)
        holds = random.random((64, K)) < survival / before * true
        verified = (survival > bar).sum(axis=1)
        accepted = np.minimum(holds.cumprod(axis=1).sum(axis=1), verified)
        correction.observe_verified(survival, verified, accepted)
        correction.observe_drafted(scores, survival)
    return correction


@pytest.mark.parametrize("bar", [0.0, 0.35])
def test_known_factors_are_recovered_from_what_was_verified(bar: float) -> None:
    """Catches censoring: few tokens are verified and fewer are reached, yet each position's factor
    must come out within 6 % (four standard errors at the last one)."""
    true = np.array([0.9, 0.6, 1.05, 1.0, 0.8, 1.0])
    found = taught(true, bar).survival_factors
    assert found[:4] == pytest.approx(true.cumprod()[:4], rel=0.06)


def test_estimates_that_are_right_stay_as_they_are() -> None:
    """Catches scores learned from verified tokens: those were picked for having turned out well,
    so right scores would be raised by a quarter."""
    correction = taught(np.ones(K))
    assert correction.survival_factors[:4] == pytest.approx(np.ones(4), abs=0.05)
    assert correction.score_factors == pytest.approx(np.ones(K), abs=0.06)


def test_scores_follow_what_drafting_is_worth() -> None:
    """Catches scores left as they were, or corrected by one position's factor only."""
    found = taught(np.full(K, 0.7)).score_factors
    assert found[:3] == pytest.approx(0.7 ** np.arange(1, 4), rel=0.08)
    assert (np.diff(found) < 0).all()


def test_only_reached_tokens_teach() -> None:
    """Catches the token behind a rejection, or one that was not verified or drafted, counted."""
    correction = SurvivalCorrection(3)
    survival = np.array([[0.8, 0.4, 0.2], [0.8, 0.4, -np.inf], [0.5, 0.5, 0.5]])
    correction.observe_verified(survival, np.array([3, 2, 0]), np.array([0, 2, 0]))
    # Row 0 is judged at position 1 only, row 1 at both of its tokens, row 2 nowhere.
    assert correction._post[0] == pytest.approx([1, 1, 0])
    assert correction._post[1] == pytest.approx([1.6, 0.5, 0])


def test_corrected_rows_can_be_planned_with() -> None:
    """Catches a probability above 1, a row that rises, and a mark of "not drafted" that is lost."""
    correction = SurvivalCorrection(4)
    for _ in range(100):
        survival = np.full((8, 4), 0.1, dtype=np.float32)
        correction.observe_verified(survival, np.full(8, 4), np.full(8, 4))
        correction.observe_drafted(survival, survival)
    rows = np.array([[0.9, 0.5, 0.3, 0.29], [0.4, 0.3, -np.inf, -np.inf]], dtype=np.float32)
    for found in (correction.survival(rows), correction.scores(rows)):
        assert found.dtype == np.float32 and (found <= 1).all()
        with np.errstate(invalid="ignore"):
            assert not (np.diff(found, axis=1) > 0).any()
        assert np.array_equal(np.isfinite(found), np.isfinite(rows))
    assert correction.survival(rows)[0, 1] > 0.9  # ten times as many were accepted as expected
    assert correction.score_factors.max() <= MOST


def test_without_drafts_it_is_forgotten() -> None:
    """Catches a workload that stopped drafting and, drafting nothing, is never tried again."""
    correction = taught(np.full(K, 0.3))
    assert correction.survival_factors[0] < 0.35
    nothing = np.full((64, K), -np.inf)
    for _ in range(1500):
        correction.observe_verified(nothing, np.zeros(64, int), np.zeros(64, int))
        correction.observe_drafted(np.full((64, K), 0.5), nothing)
    assert correction.survival_factors == pytest.approx(np.ones(K), abs=0.02)
    assert correction.score_factors == pytest.approx(np.ones(K), abs=0.02)


def test_the_planner_learns_by_slot_and_plans_with_it() -> None:
    """Catches outcomes credited to another slot, a prefill counted as a rejection, and corrected
    values that are learned from again."""
    correction = SurvivalCorrection(K)
    planner = StepPlanner(
        make_policy("joint", DRAFT, VERIFY), RequestLimits(8, K, 512), 8, K,
        prior_acceptance=0.6, min_draft_len=0, correction=correction,
    )  # fmt: skip
    slots, ones = np.array([5, 2, 7]), np.ones(3, dtype=np.int32)
    for slot in slots:
        planner.admit(int(slot), 512, enabled=True)
    record = planner.plan(["a", "b", "c"], slots, ones * 9, ones, ones * 0, ones > 0)
    survival = np.full((8, K), -np.inf, dtype=np.float32)
    survival[5, :3], survival[2, :2], survival[7, :1] = 0.8, 0.5, 0.2
    arrays = {"scores": np.full((8, K), 0.5, dtype=np.float32), "survival": survival}
    first = {"num_sampled": np.array([1, 1, 0]), "num_rejected": np.array([0, 0, 4])}
    planner.corrected(record, arrays | first)
    assert correction._post.sum() == 0  # nothing was drafted before
    # Slot 5 keeps 1 of 3, slot 2 both of its two, slot 7 is still in its prompt.
    second = {"num_sampled": np.array([2, 3, 0]), "num_rejected": np.array([2, 0, 2])}
    for _ in range(60):
        found = planner.corrected(record, arrays | second)
    happened, expected = correction._post
    assert happened[0] / expected[0] == pytest.approx(2 / 1.3)
    assert happened[1] / expected[1] == pytest.approx(1 / 2)
    assert happened[2] == expected[2] == 0
    assert found["survival"][2, 0] == pytest.approx(0.5 * correction.survival_factors[0])
    planner.publish(ScoreSource.PRE_DRAFT, found["scores"], CopyTicket(slots, ones * 1))
    planned = planner.stale[ScoreSource.PRE_DRAFT].gather(slots)
    assert planned[0] == pytest.approx(found["scores"][5])


def test_off_means_untouched() -> None:
    """Catches a default that changes plans."""
    config = ForeSparkConfig.from_any({"method": "forespark", "model": "drafter"})
    assert config.scheduler.correction == "none"
    planner = StepPlanner(
        make_policy("joint", DRAFT, VERIFY), RequestLimits(8, K, 512), 8, K, 0.6, 0
    )  # fmt: skip
    arrays = {"scores": np.zeros((8, K))}
    assert planner.corrected(None, arrays) is arrays  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["full", "batchwise", "off"])
def test_policies_without_estimates_refuse_it(policy: str) -> None:
    """Catches a setting that is accepted and does nothing."""
    scheduler = {"policy": policy, "correction": "learned"}
    with pytest.raises(ValueError, match=r"scheduler.*correction: learned has no effect"):
        ForeSparkConfig.from_any(
            {"method": "forespark", "model": "drafter", "scheduler": scheduler}
        )  # fmt: skip


def answers(
    share: float, seed: int, lost: float = 1.0, documents: int = 40, length: int = 80
) -> Answers:
    """Recorded drafts with estimates of the usual prompts: tokens here are accepted `share` times
    as often as both estimators say, and rejected `lost` times as often."""
    random, m = np.random.default_rng(seed), documents * length
    known = random.beta(5, 2, m)[:, None]
    pre, post, accepted = [], [], np.zeros((m, K + 1), dtype=np.int8)
    for d in range(1, K + 1):
        p = np.where(random.random((m, d)) < known, *EASE)
        pre.append(np.tile(EASE[0] * known + EASE[1] * (1 - known), (1, d)))
        post.append(p)
        holds = random.random((m, d)) < (1 - (1 - p) * lost) * share
        accepted[:, d] = holds.cumprod(axis=1).sum(axis=1)
    logits = [np.concatenate(rows, axis=1) for rows in (pre, post)]
    return Answers(
        DraftTrace(
            np.repeat(np.arange(documents), length).astype(np.int32),
            np.tile(np.arange(length), documents).astype(np.int32),
            accepted,
            *((np.log(p / (1 - p))).astype(np.float32) for p in logits),
        )
    )


CHAT, SAME, HARDER = (answers(share, seed) for seed, share in enumerate((1.0, 1.0, 0.7)))
EASIER = answers(1.0, 3, lost=0.4)


def gain(name: str, then: Answers, load: int = 32) -> float:
    """Goodput behind a shift from CHAT to `then`, with the correction over without."""
    rates = []
    for corrected in (True, False):
        tokens, ms = 0.0, 0.0
        for seed in (0, 1):
            policy = policy_named(name, DRAFT, VERIFY, 0.02)
            correction = SurvivalCorrection(K) if corrected else None
            for walk, warm_up in ((CHAT, 20), (then, 0)):
                found = simulate(
                    walk, policy, DRAFT, VERIFY, load, steps=150, warm_up=warm_up,
                    seed=seed + warm_up, correction=correction,
                )  # fmt: skip
            tokens, ms = tokens + found.emitted, ms + found.step_ms
        rates.append(tokens / ms)
    return rates[0] / rates[1]


@pytest.mark.parametrize(
    ("policy", "then", "least"),
    [
        ("joint", SAME, 0.99),
        ("joint", HARDER, 1.01),
        ("joint:plain", SAME, 0.99),
        ("joint:plain", HARDER, 1.005),
        ("joint:plain", EASIER, 1.005),
        ("adaptive_verification", HARDER, 1.005),
    ],
    ids=lambda value: {id(SAME): "same", id(HARDER): "harder", id(EASIER): "easier"}.get(id(value)),
)
def test_it_pays_under_a_shift_and_costs_nothing_without(
    policy: str, then: Answers, least: float
) -> None:
    """Catches a correction that reacts too slowly to pay, or one that chases noise. Bounds leave
    room for chance: so short a run scatters by half a percent."""
    assert gain(policy, then) > least
