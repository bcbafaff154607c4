"""Fits on drafts of an engine's runs, one length a run: known truth, and what must be worse."""

from __future__ import annotations

import numpy as np
import pytest
from forespark.calibration.drafts import Drafts
from forespark.calibration.fits import FEW, Fit, Variant, fit, fit_scale_bias
from forespark.calibration.measures import ece, ece_floor, sigmoid
from forespark.calibration.origin import Origin
from forespark.calibration.report import check_better, quality

from forespark.estimators.pre_draft import row_start, triangle_size

K = 5
SIZE = triangle_size(K)
SCALE = np.linspace(1.6, 0.6, SIZE)
BIAS = np.linspace(0.7, -0.5, SIZE)
THETA = np.logspace(-1, 1, 41)[[25, 17, 27, 22, 16]]


def runs(
    per_length: dict[int, int],
    seed: int = 0,
    *,
    directional: bool = False,
    scale: np.ndarray = SCALE,
    bias: np.ndarray = BIAS,
    origin: Origin | None = None,
) -> Drafts:
    """Drafts of runs at exact lengths, shuffled. z and l are views of the true log odds, and easy
    contexts stay easy: positions of a draft are alike, so who reaches j is no fair sample."""
    random = np.random.default_rng(seed)
    parts = []
    for d, count in per_length.items():
        begin = 0 if directional else row_start(d)
        true = random.normal(0.8, 1.4, (count, 1)) + random.normal(0, 0.6, (count, d))
        accepted = (random.random((count, d)) < sigmoid(true)).cumprod(axis=1).sum(axis=1)
        z = (true - bias[begin : begin + d]) / scale[begin : begin + d]
        parts.append((np.full(count, d), accepted, z.ravel(), (true * THETA[:d]).ravel()))
    length, accepted, z, post = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Drafts(
        random.integers(0, 4000, length.size),
        random.choice([1, 16, 512], length.size).astype(np.int32),
        random.integers(0, 256, length.size).astype(np.int32),
        length.astype(np.int16),
        accepted.astype(np.int16),
        z.astype(np.float32),
        post.astype(np.float32),
        origin or Origin(K, directional, "d" * 64, "e" * 64),
    )


def standard_errors(drafts: Drafts, d: int, j: int) -> np.ndarray:
    """Of a and b, f64 [2], that no unbiased fit of these drafts can be below (Fisher)."""
    part, entry = drafts.at_length(d), row_start(d) + j - 1
    z = part.pre_logits[part.accepted >= j - 1, j - 1].astype(np.float64)
    true = sigmoid(SCALE[entry] * z + BIAS[entry])
    columns = np.stack((z, np.ones_like(z)))
    return np.sqrt(np.diag(np.linalg.inv(columns * (true * (1 - true)) @ columns.T)))


@pytest.fixture(scope="module")
def known() -> tuple[Drafts, Drafts, Fit]:
    """200,000 drafts, split by request, and the fit of one side."""
    fitted_on, held_out = runs(dict.fromkeys(range(1, K + 1), 40_000)).halves()
    return fitted_on, held_out, fit(fitted_on)


def test_runs_of_one_length_each_give_back_the_truth(known: tuple[Drafts, Drafts, Fit]) -> None:
    """Catches entries of the triangle fitted on drafts of another length."""
    fitted_on, held_out, found = known
    for d in range(1, K + 1):
        for j in range(1, d + 1):
            entry = row_start(d) + j - 1
            error = (found.scale[entry] - SCALE[entry], found.bias[entry] - BIAS[entry])
            allowed = 4 * standard_errors(fitted_on, d, j)
            assert (np.abs(error) < allowed).all() and allowed.max() < 0.45, (d, j, error, allowed)
    # One step of the grid is a factor of 1.12.
    assert np.allclose(np.log(found.temperature / THETA), 0, atol=0.24)
    record = quality(held_out, found)
    assert record["ece_after"] <= 0.01 < 0.05 < record["ece_before"]
    assert np.mean(record["post_draft"]["ece_after"]) <= 0.01
    assert record["cells_improved"] == record["cells"] == SIZE
    assert set(record["held_out_by_length"]) == {"1", "2", "3", "4", "5"}
    assert found.leaning == 0
    check_better(record)


def test_bias_of_every_draft_is_worse_where_few_arrive(known: tuple[Drafts, Drafts, Fit]) -> None:
    """Catches b fitted without the condition that the first j - 1 tokens were accepted."""
    fitted_on, held_out, found = known
    scale, bias = found.scale.copy(), found.bias.copy()
    part = fitted_on.at_length(K)
    for j in range(1, K + 1):
        entry = row_start(K) + j - 1
        scale[entry], bias[entry] = fit_scale_bias(part.pre_logits[:, j - 1], part.accepted >= j)
    wrong = quality(held_out, Fit(scale, bias, found.temperature, found.samples, 0))["by_cell"]
    right = quality(held_out, found)["by_cell"]
    for j in (3, 4, 5):
        assert wrong[f"{K},{j}"]["ece_after"] > 4 * right[f"{K},{j}"]["ece_after"]


def test_drafts_of_another_length_are_worse(known: tuple[Drafts, Drafts, Fit]) -> None:
    """Catches the run of length K standing in for the shorter rows, which are other proposals."""
    fitted_on, held_out, found = known
    scale, bias = found.scale.copy(), found.bias.copy()
    last, short = slice(row_start(K), row_start(K) + 2), slice(row_start(2), row_start(2) + 2)
    scale[short], bias[short] = found.scale[last], found.bias[last]
    wrong = quality(held_out, Fit(scale, bias, found.temperature, found.samples, 0))["by_cell"]
    assert wrong["2,2"]["ece_after"] > 4 * quality(held_out, found)["by_cell"]["2,2"]["ece_after"]


def test_single_curve_needs_one_run_and_touches_one_row() -> None:
    """Catches a single-curve fit that asks for K runs, or that makes up the rows it never saw."""
    fitted_on, held_out = runs({K: 40_000}).halves()
    found = fit(fitted_on, Variant.SINGLE_CURVE)
    last = slice(row_start(K), SIZE)
    assert np.allclose(found.scale[last], SCALE[last], rtol=0.12)
    assert (found.scale[: last.start] == 1).all() and (found.bias[: last.start] == 0).all()
    assert found.lengths == [K] and found.leaning == 0
    record = quality(held_out, found)
    assert record["cells"] == K and record["ece_after"] <= 0.015 < record["ece_before"]
    with pytest.raises(ValueError, match="nothing was drafted at length 1"):
        fit(fitted_on, Variant.TRIANGLE)


def test_a_directional_drafter_has_one_row() -> None:
    """Catches a triangle written for a drafter whose estimator has K outputs."""
    row, shift = np.linspace(0.6, 1.5, K), np.linspace(-0.6, 0.4, K)
    data = runs({K: 40_000}, directional=True, scale=row, bias=shift)
    fitted_on, held_out = data.halves()
    found = fit(fitted_on, Variant.DIRECTIONAL)
    assert found.scale.shape == found.bias.shape == found.samples.shape == (K,)
    assert np.allclose(found.scale, row, rtol=0.12) and np.allclose(found.bias, shift, atol=0.12)
    record = quality(held_out, found)
    assert record["cells"] == K and record["ece_after"] <= 0.015 < record["ece_before"]


def test_few_drafts_are_counted_and_stay_near_the_row() -> None:
    """Catches the scarce end of a row thrown off by a handful of drafts, and a count of leaning
    entries that leaves some out or adds rows that were not fitted."""
    few = runs({1: 4000, 2: 4000, 3: 4000, 4: 4000, 5: 900}, seed=2)
    found = fit(few)
    arrived = [int((few.at_length(d).accepted >= j - 1).sum())
               for d in range(1, K + 1) for j in range(1, d + 1)]  # fmt: skip
    assert found.samples.tolist() == arrived
    assert found.leaning == sum(count < FEW for count in arrived) > 0
    steps = np.abs(np.diff(found.bias[row_start(K) :]))
    assert (found.scale > 0).all() and steps.max() < 1.0


def test_a_row_hardly_drafted_begins_like_the_row_above() -> None:
    """Catches the first position of a scarce row falling back on no calibration at all."""
    lengths = dict.fromkeys(range(1, K), 4000) | {K: 3}
    found = fit(runs(lengths, scale=np.full(SIZE, 2.0), bias=np.full(SIZE, -2.0)))
    assert found.bias[row_start(K)] == pytest.approx(-2.0, abs=0.5)
    assert found.scale[row_start(K)] == pytest.approx(2.0, abs=0.5)


def test_outcomes_that_are_all_alike_still_count() -> None:
    """Catches a position that always passes being given its neighbour's survival instead."""
    random = np.random.default_rng(5)
    z = random.normal(0, 1, 2000)
    scale, bias = fit_scale_bias(z, np.ones(2000, bool), (1.0, -1.0))
    assert sigmoid(scale * z + bias).mean() > 0.9
    scale, bias = fit_scale_bias(z, np.zeros(2000, bool), (1.0, 1.0))
    assert sigmoid(scale * z + bias).mean() < 0.1


def test_a_fit_nobody_can_judge_is_refused() -> None:
    """Catches a mean over no cells, or a NaN, passing for no worse than before."""
    record = quality(runs(dict.fromkeys(range(1, K + 1), 100)), fit(runs({K: 3000}),
                     Variant.SINGLE_CURVE))  # fmt: skip
    assert record["cells"] == 0
    with pytest.raises(ValueError, match=f"no \\(d, j\\) has {FEW} held-out drafts"):
        check_better(record)
    with pytest.raises(ValueError, match="nothing was written"):
        check_better(record | {"cells": 1, "ece_after": float("nan")})


def test_the_floor_is_what_true_probabilities_show() -> None:
    """Catches an error by chance that is read as one of the fit."""
    random = np.random.default_rng(6)
    probability = random.beta(2, 1, 2000)
    shown = [ece(probability, random.random(2000) < probability) for _ in range(100)]
    assert ece_floor(probability) == pytest.approx(np.mean(shown), rel=0.1)
