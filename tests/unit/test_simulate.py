"""Policies on recorded drafts: the walk, the prices, and files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from forespark.benchmarks.simulate import Answers, policy_named, simulate
from forespark.calibration.traces import DraftTrace

from forespark.core import LatencyTable

K = 6
SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
DRAFT = LatencyTable(SIZES, 1.5 + SIZES * 0.008, 1024)
VERIFY = LatencyTable(SIZES, 8.0 + SIZES * 0.04, 1024)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def made_up(documents: int = 12, length: int = 60, known: float = 5.0) -> DraftTrace:
    """Acceptance drawn from the post-draft survival, whose mean the pre-draft logits know."""
    random = np.random.default_rng(0)
    m = documents * length
    ease = random.beta(known, known / 2.5, m)  # what is known before drafting: less if larger
    pre, post, accepted = [], [], np.zeros((m, K + 1), dtype=np.int8)
    for d in range(1, K + 1):
        good = random.random((m, d)) < ease[:, None]
        p = np.where(good, 0.93, 0.15)
        pre.append(logit(np.tile((0.93 * ease + 0.15 * (1 - ease))[:, None], (1, d))))
        post.append(logit(p))
        accepted[:, d] = (random.random((m, d)) < p).cumprod(axis=1).sum(axis=1)
    return DraftTrace(
        np.repeat(np.arange(documents), length).astype(np.int32),
        np.tile(np.arange(length), documents).astype(np.int32),
        accepted,
        np.concatenate(pre, axis=1).astype(np.float32),
        np.concatenate(post, axis=1).astype(np.float32),
    )


ANSWERS = Answers(made_up())


def run(name: str, load: int, steps: int = 300, answers: Answers = ANSWERS) -> float:
    policy = policy_named(name, DRAFT, VERIFY, 0.0)
    return simulate(answers, policy, DRAFT, VERIFY, load, steps=steps).output_throughput


def test_no_speculation_is_the_table() -> None:
    """Catches a draft that is paid for, or a request that emits, where nothing is drafted."""
    for load in (1, 16, 256):
        assert run("off", load, 20) == pytest.approx(1e3 * load / float(VERIFY.at(load)))


def test_fixed_lengths_earn_their_recorded_acceptance() -> None:
    """Catches acceptance read at another length, and steps that skip or repeat positions."""
    policy = policy_named("batchwise:3", DRAFT, VERIFY, 0.0)
    found = simulate(ANSWERS, policy, DRAFT, VERIFY, 32, steps=600)
    usable = ANSWERS.trace.accepted[ANSWERS.starts, 3].mean()
    assert found.drafted == found.verified == 96
    assert found.emitted / 32 == pytest.approx(1 + usable, rel=0.03)
    assert found.step_ms == pytest.approx(float(DRAFT.at(128) + VERIFY.at(128)))


@pytest.mark.parametrize("load", [1, 8, 32, 128, 512])
def test_joint_is_never_behind(load: int) -> None:
    """Catches a plan that loses to one of the simpler policies: at every load it reaches 97 % of
    the best of them, the target alone and every fixed length included (1 % is chance)."""
    steps = max(150, 1500 // load)
    others = ("off", "full", "adaptive_verification", "batchwise:2", "batchwise:4", "joint:plain")
    best = max(run(name, load, steps) for name in others)
    assert run("joint", load, steps) >= 0.97 * best


def test_counting_on_the_ranking_pays() -> None:
    """Catches a selection model that is not fed, or not used: here picking is worth a lot."""
    alike = Answers(made_up(known=60.0))
    assert run("joint", 64, 300, alike) > 1.03 * run("joint:plain", 64, 300, alike)


def test_round_trip_and_damaged_files(tmp_path: Path) -> None:
    """Catches a half-written or foreign file that is simulated as if it were whole."""
    trace = made_up(2, 20)
    trace.save(tmp_path / "trace.npz")
    held = DraftTrace.load(tmp_path / "trace.npz")
    assert np.array_equal(held.accepted, trace.accepted)
    assert np.allclose(held.pre_logits, trace.pre_logits, atol=4e-3)
    data = (tmp_path / "trace.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    np.savez(tmp_path / "other.npz", values=np.zeros(3))
    for name in ("cut.npz", "other.npz", "missing.npz"):
        with pytest.raises(ValueError, match=rf"trace: .*{name} cannot be read"):
            DraftTrace.load(tmp_path / name)


def test_impossible_records_are_refused() -> None:
    """Catches NaN logits, and more tokens accepted than drafted, that would be averaged away."""
    trace = made_up(2, 20)
    names = ("document", "offset", "accepted", "pre_logits", "post_logits")
    fields = {name: getattr(trace, name).copy() for name in names}
    fields["accepted"][3, 2] = 5
    with pytest.raises(ValueError, match="more tokens accepted than drafted"):
        DraftTrace(**fields)
    fields["accepted"][3, 2] = 0
    fields["pre_logits"][0, 0] = np.nan
    with pytest.raises(ValueError, match="logits that are NaN"):
        DraftTrace(**fields)
    with pytest.raises(ValueError, match="load: must be >= 1"):
        simulate(ANSWERS, policy_named("off", DRAFT, VERIFY, 0.0), DRAFT, VERIFY, 0)
