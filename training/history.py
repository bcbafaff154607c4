"""The loss curve as JSON lines, kept consistent when a run resumes from an earlier step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any


class History(logging.Handler):
    """Handler of speculators' metric logger: one line per logged step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._latest: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Append the training metrics of one step."""
        message = record.msg
        if not isinstance(message, dict) or "train" not in message:
            return
        self._latest = {"step": message["global_step"], "lr": message["lr"], **message["train"]}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(self._latest) + "\n")

    def keep_before(self, step: int) -> None:
        """Forget steps at or after `step`: a resumed run writes them again."""
        kept = [row for row in self.rows() if row["step"] < step]
        write_lines(self.path, kept)

    def rows(self) -> list[dict[str, Any]]:
        """All lines written so far."""
        return read_lines(self.path)

    def last(self) -> dict[str, Any]:
        """The newest line, or nothing."""
        rows = self.rows()
        return rows[-1] if rows else {}

    def line(self) -> str:
        """The newest losses in a few words."""
        names = ("loss", "unary_loss", "selector_loss", "pre_draft_loss", "post_draft_loss")
        shown = [f"{n} {self._latest[n]:.4f}" for n in names if n in self._latest]
        return " ".join(shown)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put `rows` in the place of what a JSON-lines file holds."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, none when it is not there.

    A kill may cut the last line short: what has no newline behind it does not count.
    """
    if not path.is_file():
        return []
    complete = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in complete]
