"""Recorded drafts: at each position of some answers, what every draft length would have earned."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from forespark.calibration.drafts import Drafts, OneLength
from forespark.calibration.origin import Origin
from forespark.training.saving import replacing

from forespark.core import FloatArray, IntArray
from forespark.estimators.pre_draft import row_start

SCHEMA = 1
_ARRAYS = ("document", "offset", "accepted", "pre_logits", "post_logits")


@dataclass(frozen=True)
class DraftTrace:
    """One row a context: position `offset` of answer `document`, in that order.

    Raises ValueError when shapes disagree, a value is not finite, or more tokens are accepted than
    were drafted.
    """

    document: IntArray  # int32 [m]
    offset: IntArray  # int32 [m] 0 = behind the first token of the answer
    accepted: IntArray  # int8 [m, K + 1] accepted tokens by draft length; column 0 is 0
    pre_logits: FloatArray  # f32 [m, K(K+1)/2] row-major triangle
    post_logits: FloatArray  # f32 [m, K(K+1)/2] of the draft of each length, likewise
    drafter: str = ""  # sha256 of the drafter's weights; empty: unknown
    estimators: str = ""  # sha256 of the estimators' weights; empty: not recorded
    directional: bool = False

    def __post_init__(self) -> None:
        count, most = self.accepted.shape[0], self.num_speculative_tokens
        triangle = most * (most + 1) // 2
        shapes = {
            "document": (count,), "offset": (count,),
            "pre_logits": (count, triangle), "post_logits": (count, triangle),
        }  # fmt: skip
        for name, wanted in shapes.items():
            if getattr(self, name).shape != wanted:
                raise ValueError(
                    f"trace: {name} has shape {getattr(self, name).shape}, not {wanted}"
                )
        if (self.accepted > np.arange(most + 1)).any() or (self.accepted < 0).any():
            raise ValueError("trace: more tokens accepted than drafted; record it again")
        if not (np.isfinite(self.pre_logits).all() and np.isfinite(self.post_logits).all()):
            raise ValueError("trace: logits that are NaN or infinite; check the drafter")

    @property
    def num_speculative_tokens(self) -> int:
        return self.accepted.shape[1] - 1

    @property
    def num_contexts(self) -> int:
        return self.accepted.shape[0]

    @property
    def origin(self) -> Origin:
        return Origin(
            self.num_speculative_tokens, self.directional, self.drafter, self.estimators
        )  # fmt: skip

    @classmethod
    def of_lengths(cls, parts: Sequence[Any], starts: IntArray, origin: Origin) -> DraftTrace:
        """From one `forespark.training.trace.Trace` a length d = 1..K of the same positions."""
        first = parts[0]
        for part in parts:
            if not np.array_equal(part.position, first.position):
                raise ValueError(f"trace: length {part.draft_len} covers other positions")
        accepted = np.stack([np.zeros_like(first.accepted), *(p.accepted for p in parts)], axis=1)
        return cls(
            first.document.astype(np.int32),
            (first.position - starts[first.document]).astype(np.int32),
            accepted.astype(np.int8),
            np.concatenate([p.pre_logits for p in parts], axis=1).astype(np.float32),
            np.concatenate([p.post_logits for p in parts], axis=1).astype(np.float32),
            origin.drafter,
            origin.estimators,
            origin.directional,
        )

    def at_length(self, draft_len: int) -> OneLength:
        row = slice(row_start(draft_len), row_start(draft_len) + draft_len)
        return OneLength(
            self.pre_logits[:, row], self.post_logits[:, row], self.accepted[:, draft_len]
        )

    def select(self, rows: np.ndarray) -> DraftTrace:
        """The positions at `rows` (bool [m])."""
        columns = (getattr(self, name)[rows] for name in _ARRAYS)
        return DraftTrace(*columns, self.drafter, self.estimators, self.directional)

    def halves(self) -> tuple[DraftTrace, DraftTrace]:
        even = self.document % 2 == 0
        return self.select(even), self.select(~even)

    def drafts(self) -> Drafts:
        """The same drafts one by one."""
        most, count = self.num_speculative_tokens, self.num_contexts
        return Drafts(
            np.repeat(self.document.astype(np.int64), most),
            np.zeros(count * most, dtype=np.int32),
            np.repeat(self.offset, most),
            np.tile(np.arange(1, most + 1, dtype=np.int16), count),
            self.accepted[:, 1:].ravel().astype(np.int16),
            self.pre_logits.ravel(),
            self.post_logits.ravel(),
            self.origin,
        )

    def save(self, file: Path) -> None:
        """Write a compressed NumPy archive whole or not at all."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        half = {k: v.astype(np.float16) if v.dtype == np.float32 else v for k, v in arrays.items()}
        names = {"drafter": self.drafter, "estimators": self.estimators}
        with replacing(file) as temporary, temporary.open("wb") as stream:
            np.savez_compressed(
                stream, schema=SCHEMA, directional=self.directional, **names, **half
            )  # fmt: skip

    @classmethod
    def load(cls, file: Path) -> DraftTrace:
        """Read it back. Raises ValueError for a file of another schema or one that is not whole.

        Archives of before `estimators` was recorded are read, with that unknown.
        """
        if not zipfile.is_zipfile(file):
            raise ValueError(f"trace: {file} cannot be read (no archive); record it again")
        try:
            with np.load(file) as held:
                if int(held["schema"]) != SCHEMA:
                    raise ValueError(f"trace: {file} has schema {held['schema']}, not {SCHEMA}")
                arrays = {name: held[name] for name in _ARRAYS}
                drafter = str(held["drafter"])
                estimators = str(held["estimators"]) if "estimators" in held else ""
                directional = bool(held["directional"]) if "directional" in held else False
        except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"trace: {file} cannot be read ({error}); record it again") from None
        full = {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in arrays.items()}
        return cls(**full, drafter=drafter, estimators=estimators, directional=directional)
