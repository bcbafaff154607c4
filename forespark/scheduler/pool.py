"""The batch's pooled scores: what verifying b tokens earns (section 4.3, global score gather)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forespark.core import FloatArray, IntArray

NOT_FINITE = "schedule: a survival score is NaN or +inf; see envelope.check_finite"


@dataclass(frozen=True)
class Pool:
    """Eligible scores in descending order, floors (always drafted while D > 0) kept apart.

    Scores below 0, and the -inf of a position that was never drafted, count as 0: nothing is known
    to be gained there.
    """

    floors: FloatArray  # [F] descending: the first min(min_draft_len, limit) of every request
    others: FloatArray  # [M] descending: every other eligible position
    gains: FloatArray  # float64 [F + M + 1]: sum of the b largest scores of all, b = 0..F + M

    @property
    def total(self) -> int:
        """D of full blocks: every eligible token."""
        return self.gains.size - 1

    def drafted_gains(self, draft_budget: int) -> FloatArray:
        """float64 [D + 1]: sum of the b largest among the D drafted tokens (D >= F)."""
        if not self.floors.size:
            return self.gains[: draft_budget + 1]
        kept = self.others[: draft_budget - self.floors.size]
        return _running_sum(_descending(np.concatenate((self.floors, kept))))


def pool_scores(scores: FloatArray, limits: IntArray, min_draft_len: int = 0) -> Pool:
    """Pool `scores` [n, K] within `limits` [n] (clipped to 0..K).

    Raises ValueError on a shape mismatch and on a score that is NaN or +inf.
    """
    scores = np.asarray(scores)
    check_pool(scores, limits)
    position = np.arange(scores.shape[1])
    eligible = position < np.asarray(limits)[:, None]
    none = scores[:0, 0:0].ravel()
    if min_draft_len <= 0:
        ranked = _descending(scores[eligible])
        pool = Pool(none, ranked, _running_sum(ranked))
    else:
        first = position < min_draft_len
        floors = _descending(scores[eligible & first])
        others = _descending(scores[eligible & ~first])
        ranked = _descending(np.concatenate((floors, others)))
        pool = Pool(floors, others, _running_sum(ranked))
    if not np.isfinite(pool.gains[-1]):
        raise ValueError(NOT_FINITE)
    return pool


def check_pool(scores: FloatArray, limits: IntArray) -> None:
    """Raise ValueError unless `scores` are [n, K] and `limits` [n]."""
    if scores.ndim != 2 or np.shape(limits) != scores.shape[:1]:
        raise ValueError(
            f"schedule: scores {scores.shape} and draft limits {np.shape(limits)}; "
            "expected [n, K] and [n]"
        )


def _descending(scores: FloatArray) -> FloatArray:
    ranked: FloatArray = np.maximum(np.sort(scores)[::-1], 0.0)
    return ranked


def _running_sum(ranked: FloatArray) -> FloatArray:
    sums = np.zeros(ranked.size + 1)
    np.cumsum(ranked, dtype=np.float64, out=sums[1:])
    return sums
