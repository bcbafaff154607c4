"""Results and states on disk: a full disk, and a kill while files are written or swapped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from forespark.training.curve import CurveRecorder
from forespark.training.history import read_lines
from forespark.training.saving import replacing
from safetensors import SafetensorError


@pytest.mark.parametrize(
    "failure",
    [
        OSError(28, "No space left on device"),
        RuntimeError("unexpected pos 64 vs 0"),
        SafetensorError("I/O error: No space left on device\nand a second line"),
    ],
)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, failure: Exception) -> None:
    """Catches a checkpoint that is lost while its successor is written."""
    final = tmp_path / "checkpoint"
    with replacing(final) as folder:
        folder.mkdir()
        (folder / "model").write_text("old")
    with pytest.raises(OSError, match=r"checkpoint: cannot be written .* is unchanged") as caught:
        with replacing(final) as folder:
            folder.mkdir()
            (folder / "model").write_text("half")
            raise failure
    assert "\n" not in str(caught.value)
    assert (final / "model").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_state_file_that_cannot_be_written_keeps_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a training state that is damaged by the save that failed."""
    state = tmp_path / "state.pt"
    torch.save({"step": 1}, state)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("enforce fail at inline_container.cc: file write failed")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match=r"state.pt: cannot be written"):
        with replacing(state) as temporary:
            torch.save({"step": 2}, temporary)
    assert torch.load(state)["step"] == 1


class Killed(BaseException):
    """Stands for a kill: no handler of the program may need to run after it."""


@pytest.mark.parametrize("last_rename", [1, 2])
def test_a_kill_while_folders_are_swapped_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_rename: int
) -> None:
    """Catches a checkpoint that is gone after a kill between the two renames of a swap."""
    final = tmp_path / "checkpoint"
    write(final, "old")
    renames = []
    rename = os.replace

    def stop(source: Path, target: Path) -> None:
        renames.append(source)
        if len(renames) > last_rename:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("forespark.training.saving.os.replace", stop)
        patch.setattr("forespark.training.saving._remove", lambda _: None)
        try:
            write(final, "new")
        except Killed:
            pass
    with pytest.raises(OSError, match="is unchanged"):
        with replacing(final):
            raise OSError(28, "No space left on device")
    assert (final / "model").read_text() == ("old" if last_rename == 1 else "new")
    write(final, "third")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def write(folder: Path, text: str) -> None:
    with replacing(folder) as temporary:
        temporary.mkdir()
        (temporary / "model").write_text(text)


def test_a_curve_goes_on_behind_a_line_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a new point that is glued to half a line, after which the curve cannot be read."""
    path = tmp_path / "curve.jsonl"
    path.write_text('{"step": 0, "acceptance_length": 2.0}\n{"step": 5, "acc')
    monkeypatch.setattr(CurveRecorder, "acceptance_length", lambda _: 3.0)
    stand_in: Any = None
    recorder = CurveRecorder(path, stand_in, stand_in, ["a document"], 2)
    assert recorder.maybe(0.5, 5, 1.0) is not None
    assert [row["step"] for row in read_lines(path)] == [0, 5]
    assert len(path.read_text().splitlines()) == 2
