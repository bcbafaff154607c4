"""Copying a run's results out in pieces small enough for a narrow channel.

The checkpoint travels as one uncompressed tar cut into `checkpoint.tar.00`, `.01`, ...; put it
together with `cat checkpoint.tar.* | tar x`.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from forespark.training.recipe import Recipe

_PIECE_BYTES = 15_000_000
_REPORTS = ("evaluation.json", "evaluation.png", "metrics.jsonl", "curve.jsonl")


def export(recipe: Recipe, folder: Path, say: Callable[[str], None] = print) -> None:
    """Copy the checkpoint and the reports that exist to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _REPORTS:
        if (Path(recipe.workdir) / name).is_file():
            shutil.copy(Path(recipe.workdir) / name, folder / name)
    if not recipe.checkpoint.is_dir():
        return
    whole = folder / "checkpoint.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(recipe.checkpoint, "checkpoint")
    data = whole.read_bytes()
    whole.unlink()
    pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
    for index, piece in enumerate(pieces):
        (folder / f"checkpoint.tar.{index:02d}").write_bytes(piece)
    say(f"export: {len(pieces)} pieces of the checkpoint ({len(data)} bytes) in {folder}")
