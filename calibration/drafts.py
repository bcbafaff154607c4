"""Recorded drafts one by one, as an engine makes them: each run drafts one length at a time.

`forespark.calibration.traces` holds every length at the same positions instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from forespark.calibration.origin import Origin

from forespark.core import FloatArray, IntArray


class OneLength(NamedTuple):
    """Drafts of exactly d tokens, every position of them verified."""

    pre_logits: FloatArray  # f32 [m, d] row d of z
    post_logits: FloatArray  # f32 [m, d]
    accepted: IntArray  # int [m] 0..d


class Recorded(Protocol):
    """What fits and reports read of a trace."""

    @property
    def origin(self) -> Origin: ...

    def at_length(self, draft_len: int) -> OneLength:
        """Drafts of exactly `draft_len` (1..K) tokens; none when the length was not drafted."""
        ...

    def halves(self) -> tuple[Recorded, Recorded]:
        """Drafts of even and of odd requests: to fit on and to measure on."""
        ...


@dataclass(frozen=True)
class Drafts:
    """One row a draft. Raises ValueError, naming the first such row, where one cannot be."""

    request: IntArray  # int64 [n] a prompt has the same number in every run
    load: IntArray  # int32 [n] requests decoding at once; 0: not recorded in an engine
    position: IntArray  # int32 [n] 0 = behind the first token of the answer
    length: IntArray  # int16 [n] drafted tokens d, 1..K
    accepted: IntArray  # int16 [n] accepted tokens, 0..d
    pre_logits: FloatArray  # f32 [sum of d] row d of z, draft after draft
    post_logits: FloatArray  # f32 [sum of d] likewise
    origin: Origin

    def __post_init__(self) -> None:
        most, total = self.origin.num_speculative_tokens, int(self.length.sum())
        if not self.length.size:
            raise ValueError("trace: it holds no drafts; record more")
        self._refuse((self.length < 1) | (self.length > most), f"a length outside 1..K = {most}")
        self._refuse(
            (self.accepted < 0) | (self.accepted > self.length),
            "fewer than 0 or more accepted tokens than it drafted",
        )
        self._refuse(
            (self.request < 0) | (self.position < 0) | (self.load < 0),
            "a negative request, position or load",
        )
        owner = np.repeat(np.arange(self.length.size), self.length)
        for name, logits in (("pre-draft", self.pre_logits), ("post-draft", self.post_logits)):
            if logits.shape != (total,):
                raise ValueError(f"trace: {logits.size} {name} logits for {total} drafted tokens")
            wrong = np.zeros(self.length.size, dtype=bool)
            wrong[owner[~np.isfinite(logits)]] = True
            self._refuse(wrong, f"{name} logits that are NaN or infinite")

    def _refuse(self, wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            raise ValueError(
                f"trace: draft {int(wrong.argmax())} has {what} ({int(wrong.sum())} of "
                f"{wrong.size} drafts do); check the drafter and record it again"
            )

    def at_length(self, draft_len: int) -> OneLength:
        chosen = self.length == draft_len
        begin = (self.length.cumsum(dtype=np.int64) - self.length)[chosen]
        at = begin[:, None] + np.arange(draft_len)
        return OneLength(self.pre_logits[at], self.post_logits[at], self.accepted[chosen])

    def select(self, rows: np.ndarray) -> Drafts:
        """The drafts at `rows` (bool [n])."""
        flat = np.repeat(rows, self.length)
        columns = (self.request, self.load, self.position, self.length, self.accepted)
        return Drafts(
            *(column[rows] for column in columns),
            self.pre_logits[flat],
            self.post_logits[flat],
            self.origin,
        )

    @classmethod
    def join(cls, parts: Sequence[Drafts]) -> Drafts:
        """All drafts of `parts`, one after the other. ValueError where origins differ."""
        for part in parts[1:]:
            part.origin.check(parts[0].origin)
        names = (
            "request", "load", "position", "length", "accepted", "pre_logits", "post_logits",
        )  # fmt: skip
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
        return cls(*columns, parts[0].origin)

    def halves(self) -> tuple[Drafts, Drafts]:
        even = self.request % 2 == 0
        for name, side in (("even", even), ("odd", ~even)):
            if not side.any():
                raise ValueError(
                    f"trace: no request with an {name} number to fit and measure on different "
                    "answers; record more prompts"
                )
        return self.select(even), self.select(~even)
