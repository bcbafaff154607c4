"""Calibration against known truth: what must be found, what must not help, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from forespark.calibration.cli import calibrate_app
from forespark.calibration.fits import FEW, Fit, fit, fit_scale_bias, fit_temperatures
from forespark.calibration.measures import ece, sigmoid
from forespark.calibration.report import check_better, quality
from forespark.calibration.traces import DraftTrace
from typer.testing import CliRunner

from forespark.estimators.checkpoint import drafter_sha256, load_estimators
from forespark.estimators.pre_draft import row_start

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"
K = 7
TRIANGLE = K * (K + 1) // 2


def made_up(
    drafts: int,
    scale: np.ndarray,
    bias: np.ndarray,
    temperature: np.ndarray,
    seed: int = 0,
    drafter: str = "",
) -> DraftTrace:
    """Drafts whose acceptance follows sigma(a z + b) in every entry, and sigma(l / theta) for l.

    z and l are two views of one probability, so both are right once calibrated.
    """
    random = np.random.default_rng(seed)
    pre, post, accepted = [], [], np.zeros((drafts, K + 1), dtype=np.int8)
    for d in range(1, K + 1):
        row = slice(row_start(d), row_start(d) + d)
        true = random.normal(0.9, 1.2, (drafts, 1)) + random.normal(0, 0.8, (drafts, d))
        pre.append((true - bias[row]) / scale[row])
        post.append(true * temperature[:d])
        accepted[:, d] = (random.random((drafts, d)) < sigmoid(true)).cumprod(axis=1).sum(axis=1)
    return DraftTrace(
        np.arange(drafts, dtype=np.int32) // 50,
        np.arange(drafts, dtype=np.int32) % 50,
        accepted,
        np.concatenate(pre, axis=1).astype(np.float32),
        np.concatenate(post, axis=1).astype(np.float32),
        drafter,
    )


SCALE = np.linspace(0.5, 1.6, TRIANGLE)
BIAS = np.linspace(-0.8, 0.6, TRIANGLE)
THETA = np.logspace(-1, 1, 41)[[26, 23, 18, 28, 20, 25, 16]]


@pytest.fixture(scope="module")
def known() -> tuple[DraftTrace, DraftTrace, Fit]:
    """200,000 drafts to fit on, as many to measure on, and the fit."""
    trace = made_up(200_000, SCALE, BIAS, THETA)
    return trace, made_up(200_000, SCALE, BIAS, THETA, seed=1), fit(trace)


def test_known_scale_bias_and_temperature_are_found(
    known: tuple[DraftTrace, DraftTrace, Fit],
) -> None:
    """Catches entries mixed up in the triangle, an inverted temperature, and a fit on drafts that
    never reached the position."""
    _, _, found = known
    assert np.allclose(found.scale, SCALE, rtol=0.08)
    assert np.allclose(found.bias, BIAS, atol=0.08)
    # One step of the grid is a factor of 1.12.
    assert np.allclose(np.log(found.temperature / THETA), 0, atol=0.13)
    assert found.leaning == 0


def test_held_out_error_is_a_hundredth_at_most(
    known: tuple[DraftTrace, DraftTrace, Fit],
) -> None:
    """Catches a fit that only looks right on its own drafts."""
    _, held_out, found = known
    record = quality(held_out, found)
    assert record["ece_after"] <= 0.01 < record["ece_before"]
    assert max(cell["ece_after"] for cell in record["by_cell"].values()) <= 0.01
    assert max(record["post_draft"]["ece_after"]) <= 0.012
    assert record["cells_improved"] >= 0.9 * record["cells"] == 0.9 * TRIANGLE
    check_better(record)


def test_fitting_on_every_draft_is_worse(known: tuple[DraftTrace, DraftTrace, Fit]) -> None:
    """Catches the conditional subset being dropped: a fit on all drafts, where position j counts
    as rejected when an earlier one was, is clearly off."""
    trace, held_out, found = known
    scale, bias = found.scale.copy(), found.bias.copy()
    for j in range(1, K + 1):
        entry = row_start(K) + j - 1
        outcome = trace.accepted[:, K] >= j
        scale[entry], bias[entry] = fit_scale_bias(trace.pre_logits[:, entry], outcome)
    wrong = quality(held_out, Fit(scale, bias, found.temperature, found.samples, 0))
    cell = f"{K},{K}"
    assert (
        wrong["by_cell"][cell]["ece_after"]
        > 5 * quality(held_out, found)["by_cell"][cell]["ece_after"]
    )


def test_temperatures_in_the_wrong_order_are_worse(
    known: tuple[DraftTrace, DraftTrace, Fit],
) -> None:
    """Catches positions fitted before the ones they build on: each then makes up for errors that
    are mended later."""
    trace, held_out, found = known
    row = slice(row_start(K), row_start(K) + K)
    logits, accepted = trace.post_logits[:, row], trace.accepted[:, K]
    backwards = fit_temperatures(logits, accepted, order=np.arange(K)[::-1])

    def error(theta: np.ndarray) -> float:
        curve = sigmoid(held_out.post_logits[:, row] / theta).cumprod(axis=1)
        return float(np.mean([ece(curve[:, j], held_out.accepted[:, K] > j) for j in range(K)]))

    assert error(backwards) > 2 * error(found.temperature)


def test_few_drafts_lean_on_the_neighbour() -> None:
    """Catches an entry that a handful of drafts throws off, or that ignores its own drafts."""
    random = np.random.default_rng(3)
    z = random.normal(0, 1, 8)
    few = fit_scale_bias(z, np.array([True] * 7 + [False]), (0.7, -0.4))
    assert np.allclose(few, (0.7, -0.4), atol=0.6) and few[1] > -0.3
    assert fit_scale_bias(np.zeros(0), np.zeros(0, bool), (0.7, -0.4)) == pytest.approx(
        (0.7, -0.4), abs=0.02
    )
    many = random.normal(0, 1, 4 * FEW)
    outcome = random.random(many.size) < sigmoid(1.3 * many + 0.2)
    assert np.allclose(fit_scale_bias(many, outcome, (0.1, 3.0)), (1.3, 0.2), atol=0.25)


def test_a_misleading_logit_takes_the_neighbours_fit() -> None:
    """Catches a negative scale, with which a better-looking draft would count as worse."""
    random = np.random.default_rng(4)
    z = random.normal(0, 1, 2000)
    assert fit_scale_bias(z, random.random(2000) < sigmoid(-z), (0.9, 0.1)) == (0.9, 0.1)


def test_a_fit_that_does_not_help_is_refused() -> None:
    """Catches noise that is written as calibration because it was fitted."""
    trace = made_up(1500, np.ones(TRIANGLE), np.zeros(TRIANGLE), np.ones(K))
    spoiled = Fit(np.full(TRIANGLE, 3.0), np.ones(TRIANGLE), np.ones(K), SCALE, 0)
    with pytest.raises(
        ValueError, match="held-out pre-draft ECE would rise .* nothing was written"
    ):
        check_better(quality(trace, spoiled))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    shutil.copytree(PAIR / "drafter", tmp_path / "drafter")
    return tmp_path / "drafter"


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(calibrate_app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_server_loads_what_was_fitted(tmp_path: Path, drafter: Path) -> None:
    """Catches a file in another order or form than the one the server reads."""
    trace = made_up(12_000, SCALE, BIAS, THETA, drafter=drafter_sha256(drafter))
    trace.save(tmp_path / "trace.npz")
    code, output = command(
        "fit", tmp_path / "trace.npz", "--checkpoint", drafter, "--report", tmp_path / "page.json"
    )
    assert code == 0, output
    held = load_estimators(
        drafter, num_speculative_tokens=K, hidden_size=256, embed_size=256, selector_rank=64
    )
    assert held is not None and held.scale is not None and held.temperature is not None
    even = DraftTrace.load(tmp_path / "trace.npz").select(trace.document % 2 == 0)
    found = fit(even)
    assert np.allclose(held.scale.numpy(), found.scale, rtol=1e-5)
    assert np.allclose(held.temperature.numpy(), found.temperature, rtol=1e-5)
    record = json.loads((tmp_path / "page.json").read_text())
    assert record["ece_after"] < record["ece_before"] and record["held_out_drafts"] == 6000
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_bad_traces_are_one_line_and_change_nothing(tmp_path: Path, drafter: Path) -> None:
    """Catches a calibration from another drafter, from too few drafts or from a damaged file."""
    own = drafter_sha256(drafter)
    cases = {
        "foreign": (made_up(4000, SCALE, BIAS, THETA, drafter="0" * 64), "recorded with drafter"),
        "few": (made_up(900, SCALE, BIAS, THETA, drafter=own), "collect at least 1000"),
    }
    for name, (trace, line) in cases.items():
        trace.save(tmp_path / f"{name}.npz")
        code, output = command("fit", tmp_path / f"{name}.npz", "--checkpoint", drafter)
        assert code == 1 and line in output and len(output.strip().splitlines()) == 1
    (tmp_path / "cut.npz").write_bytes((tmp_path / "few.npz").read_bytes()[:2000])
    code, output = command("fit", tmp_path / "cut.npz", "--checkpoint", drafter)
    assert code == 1 and "cannot be read" in output
    assert not (drafter / "estimators" / "calibration.json").exists()
