"""From a trace to a drafter that the server loads: what arrives there, and what never does."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forespark.calibration import apply as apply_module
from forespark.calibration.apply import apply
from forespark.calibration.cli import calibrate_app
from forespark.calibration.drafts_file import load_drafts, save_drafts
from forespark.calibration.fits import Fit, Variant, fit
from forespark.calibration.measures import ece
from forespark.calibration.origin import Origin
from test_calibration_variants import SIZE, K, runs
from typer.testing import CliRunner

from forespark.estimators.checkpoint import Estimators, load_estimators, save_estimators
from forespark.estimators.post_draft import PostDraftEstimator, post_survival
from forespark.estimators.pre_draft import PreDraftEstimator, survival

HIDDEN, EMBED, RANK = 16, 12, 8


def make_drafter(folder: Path, *, directional: bool = False, most: int = K, seed: int = 0) -> Path:
    """A drafter of made-up weights with estimators."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").write_bytes(b"weights")
    torch.manual_seed(seed)
    pre = PreDraftEstimator(HIDDEN, EMBED, most, rank=4, directional=directional)
    save_estimators(folder, pre, PostDraftEstimator(HIDDEN, RANK))
    return folder


def load(folder: Path) -> Estimators:
    held = load_estimators(
        folder, num_speculative_tokens=K, hidden_size=HIDDEN, embed_size=EMBED, selector_rank=RANK
    )
    assert held is not None
    return held


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return make_drafter(tmp_path / "drafter")


def trace_of(drafter: Path, file: Path, count: int = 5000, **options: object) -> Path:
    origin = Origin.of_checkpoint(drafter)
    lengths = [K] if origin.directional else range(1, K + 1)
    save_drafts(runs(dict.fromkeys(lengths, count), origin=origin, **options), file)
    return file


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(calibrate_app, ["fit", *(str(a) for a in arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_server_sees_calibrated_survival(tmp_path: Path, drafter: Path) -> None:
    """Catches a fit written in another order or meaning than the one the server applies: its own
    survival, computed from the file, must agree with what was accepted."""
    trace = trace_of(drafter, tmp_path / "t.parquet", 20_000)
    code, output = command(trace, "--checkpoint", drafter)
    assert code == 0, output
    held = load(drafter)
    _, held_out = load_drafts(trace).halves()
    for d in (2, K):
        part = held_out.at_length(d)
        z = torch.zeros(len(part.accepted), SIZE)
        z[:, d * (d - 1) // 2 :][:, :d] = torch.from_numpy(part.pre_logits)
        for calibrated, low, high in ((held, 0.0, 0.025), (load_raw(held), 0.035, 1.0)):
            curves = survival(z, K, calibrated.scale, calibrated.bias)[:, d - 1].numpy()
            errors = [ece(curves[:, j], part.accepted > j) for j in range(d)]
            assert low <= np.mean(errors) <= high, (d, errors)
    full = held_out.at_length(K)
    curves = post_survival(
        torch.from_numpy(full.post_logits), torch.full((len(full.accepted),), K), held.temperature
    ).numpy()
    assert np.mean([ece(curves[:, j], full.accepted > j) for j in range(K)]) <= 0.025


def load_raw(held: Estimators) -> Estimators:
    return replace(held, scale=None, bias=None, temperature=None)


def test_a_directional_drafter_is_calibrated_and_loads(tmp_path: Path) -> None:
    """Catches a triangle of scales in a checkpoint that has one row, which the server refuses."""
    drafter = make_drafter(tmp_path / "drafter", directional=True)
    row, shift = np.linspace(0.6, 1.5, K), np.linspace(-0.6, 0.4, K)
    trace = trace_of(
        drafter, tmp_path / "t.parquet", 20_000, directional=True, scale=row, bias=shift
    )
    code, output = command(trace, "--checkpoint", drafter, "--report", tmp_path / "r.json")
    assert code == 0, output
    held = load(drafter)
    assert held.scale is not None and held.scale.shape == (K,)
    found = fit(load_drafts(trace).halves()[0], Variant.DIRECTIONAL)
    assert held.bias is not None and np.allclose(held.scale.numpy(), found.scale, rtol=1e-5)
    assert np.allclose(held.bias.numpy(), found.bias, rtol=1e-5)
    assert json.loads((tmp_path / "r.json").read_text())["variant"] == "directional"


def test_a_copy_is_calibrated_and_the_drafter_is_not(tmp_path: Path, drafter: Path) -> None:
    """Catches --out that changes the original, or a copy that lacks files."""
    before = everything(drafter)
    trace = trace_of(drafter, tmp_path / "t.parquet")
    code, output = command(trace, "--checkpoint", drafter, "--out", tmp_path / "new" / "copy")
    assert code == 0, output
    copy = everything(tmp_path / "new" / "copy")
    assert everything(drafter) == before
    assert {k: v for k, v in copy.items() if k != "estimators/calibration.json"} == before
    assert load(tmp_path / "new" / "copy").scale is not None
    code, output = command(trace, "--checkpoint", drafter, "--out", tmp_path / "new" / "copy")
    assert code == 1 and "is not an empty folder" in output


def test_a_stopped_write_leaves_what_was_there(
    tmp_path: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches half of a calibration, or a half-copied drafter, left where the server looks."""
    found = fit(runs(dict.fromkeys(range(1, K + 1), 3000)))
    apply(found, drafter)
    before = everything(drafter)
    other = replace(found, bias=found.bias + 1)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(apply_module, "save_calibration", full)
        apply(other, drafter, tmp_path / "copy")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter"]
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, "replace", full)
        apply(other, drafter)
    after = everything(drafter)
    assert {name: after[name] for name in before} == before and load(drafter).scale is not None


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: replace(f, scale=f.scale[:-1]), f"scale is not {SIZE} finite numbers"),
        (lambda f: replace(f, bias=f.bias * np.nan), "bias is not"),
        (lambda f: replace(f, temperature=np.ones(K - 1)), f"temperature is not {K} finite"),
        (lambda f: replace(f, temperature=np.zeros(K)), "temperature holds 0; it must be > 0"),
        (lambda f: replace(f, scale=-f.scale), "scale holds .* must be > 0"),
    ],
)
def test_a_fit_the_server_could_not_use_is_not_written(drafter: Path, change, line: str) -> None:
    """Catches a calibration that only fails, or misleads, when the server starts."""
    good = Fit(np.ones(SIZE), np.zeros(SIZE), np.ones(K), np.full(SIZE, 900), 0)
    before = everything(drafter)
    with pytest.raises(ValueError, match=line):
        apply(change(good), drafter)
    assert everything(drafter) == before


def test_a_trace_of_other_estimators_is_refused(tmp_path: Path, drafter: Path) -> None:
    """Catches a trace of another K, drafter, row layout or training of the estimators: each would
    calibrate logits it never saw."""
    trace = trace_of(drafter, tmp_path / "t.parquet")
    others = {
        "num_speculative_tokens 5, this checkpoint has 6": {"most": 6},
        "recorded with estimators": {"seed": 1},
        "recorded with drafter": {},
    }
    for number, (line, options) in enumerate(others.items()):
        folder = tmp_path / f"other{number}"
        folder.mkdir()
        if not options:
            (folder / "model.safetensors").write_bytes(b"other weights")
        make_drafter(folder, **options)
        before = everything(folder)
        code, output = command(trace, "--checkpoint", folder)
        assert code == 1 and line in output and len(output.strip().splitlines()) == 1, output
        assert everything(folder) == before
    other_rows = replace(Origin.of_checkpoint(drafter), directional=True)
    with pytest.raises(ValueError, match="directional True, this checkpoint has False"):
        other_rows.check(Origin.of_checkpoint(drafter))


def test_bad_commands_are_one_line_and_change_nothing(tmp_path: Path, drafter: Path) -> None:
    """Catches a traceback, or a drafter that is calibrated though its report could not be."""
    trace = trace_of(drafter, tmp_path / "t.parquet")
    few = trace_of(drafter, tmp_path / "few.parquet", 1500)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(trace.read_bytes()[:-50])
    bare = tmp_path / "bare"
    shutil.copytree(drafter, bare, ignore=shutil.ignore_patterns("estimators"))
    cases = [
        ((few, "--checkpoint", drafter), "drafts of length 1 to fit on; collect at least 1000"),
        ((cut, "--checkpoint", drafter), "cannot be read"),
        ((tmp_path / "no.parquet", "--checkpoint", drafter), "is not there"),
        ((trace, "--checkpoint", bare), "has no estimators that can be read"),
        ((trace, "--checkpoint", drafter, "--report", tmp_path / "r.png"), "must end in .json"),
        ((trace, "--checkpoint", drafter, "--report", trace / "r.json"), "error:"),
        ((trace, "--checkpoint", drafter, "--out", tmp_path), "is not an empty folder"),
    ]
    before = everything(drafter)
    for arguments, line in cases:
        code, output = command(*arguments)
        assert code == 1 and line in output and len(output.strip().splitlines()) == 1, output
        assert everything(drafter) == before


def test_a_fit_that_does_not_carry_over_is_not_written(tmp_path: Path, drafter: Path) -> None:
    """Catches a fit judged on the drafts it was made on: here the other half behaves otherwise."""
    origin = Origin.of_checkpoint(drafter)
    lengths = dict.fromkeys(range(1, K + 1), 3000)
    one = runs(lengths, origin=origin, scale=np.ones(SIZE), bias=np.full(SIZE, 1.5))
    two = runs(lengths, origin=origin, scale=np.ones(SIZE), bias=np.zeros(SIZE))
    odd = one.request % 2 == 1
    held = two.request % 2 == 0
    one, two = one.select(~odd), two.select(~held)
    names = ("request", "load", "position", "length", "accepted", "pre_logits", "post_logits")
    mixed = {n: np.concatenate((getattr(one, n), getattr(two, n))) for n in names}
    save_drafts(replace(one, **mixed), tmp_path / "t.parquet")
    before = everything(drafter)
    code, output = command(
        tmp_path / "t.parquet", "--checkpoint", drafter, "--report", tmp_path / "r.json"
    )
    assert code == 1 and "held-out pre-draft ECE would rise" in output
    assert everything(drafter) == before and not (tmp_path / "r.json").exists()


def test_the_report_says_what_was_measured_on_what(tmp_path: Path, drafter: Path) -> None:
    """Catches a report without the figures or the origin that a later reader needs."""
    trace = trace_of(drafter, tmp_path / "t.parquet")
    file = tmp_path / "deep" / "calibration.json"
    code, output = command(trace, "--checkpoint", drafter, "--report", file)
    assert code == 0 and "entries had fewer than 500 drafts" in output
    record = json.loads(file.read_text())
    assert 0 < record["ece_floor"] < record["ece_after"] < record["ece_before"]
    assert record["cells_improved"] <= record["cells"] == len(record["by_cell"]) <= SIZE
    assert sum(record["held_out_by_length"].values()) == load_drafts(trace).halves()[1].length.size
    for name in ("ece_before", "ece_after", "brier_before", "brier_after"):
        assert len(record["post_draft"][name]) == K
    assert record["provenance"]["estimators_sha256"] == Origin.of_checkpoint(drafter).estimators
    assert file.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in file.parent.iterdir()) == ["calibration.json", "calibration.png"]
