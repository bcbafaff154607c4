"""Host split of a budget: which request gets how many tokens. The specification of the GPU kernel.

The eligible entries (position < limit) are ranked by score, ties by lower request slot (row, where
no slots are given) and then earlier position, and the first `budget` win. Scores never increase
along a row, so the winners are a prefix of every row and their count is the row's length (sections
4.3 and 4.4).
"""

from __future__ import annotations

import numpy as np

from forespark.core import FloatArray, IntArray


def rank_split(
    scores: FloatArray,  # [n, K] non-increasing in a row; -inf is eligible and ranked last
    limits: IntArray,  # [n] eligible positions of each row; clipped to 0..K
    budget: int,
    floor: int = 0,  # the first min(floor, limit) positions of a row rank before all others
    order: IntArray | None = None,  # [n] distinct request slots, which break ties; None: the row
) -> IntArray:
    """int32 [n] prefix lengths that sum to min(budget, sum of limits).

    With a floor, the floors' positions rank among themselves by the same rule, so a budget that
    cannot pay every floor is spent on floors only. Raises ValueError on NaN or a shape mismatch.
    """
    scores = np.asarray(scores)
    if scores.ndim != 2 or np.shape(limits) != scores.shape[:1]:
        raise ValueError(
            f"split: scores {scores.shape} and limits {np.shape(limits)}; expected [n, K] and [n]"
        )
    if order is not None:
        by_slot = np.argsort(order, kind="stable")
        lengths = np.empty(len(by_slot), dtype=np.int32)
        lengths[by_slot] = rank_split(scores[by_slot], np.asarray(limits)[by_slot], budget, floor)
        return lengths
    limits = np.clip(limits, 0, scores.shape[1])
    floors = np.minimum(limits, max(floor, 0))
    floor_total = int(floors.sum())
    if budget < floor_total:
        return _top_prefixes(scores, np.zeros_like(limits), floors, budget)
    return _top_prefixes(scores, floors, limits, budget - floor_total)


def _top_prefixes(scores: FloatArray, start: IntArray, stop: IntArray, budget: int) -> IntArray:
    """int32 [n]: start plus the winners among positions start..stop - 1 of each row."""
    position = np.arange(scores.shape[1])
    eligible = (position >= start[:, None]) & (position < stop[:, None])
    ranked = scores[eligible]  # row-major, which is the tie order
    if np.isnan(ranked).any():
        row, column = np.argwhere(np.isnan(scores) & eligible)[0]
        raise ValueError(f"split: score [{row}, {column}] is NaN, so it has no rank")
    budget = min(max(budget, 0), ranked.size)
    if budget == ranked.size:
        return stop.astype(np.int32)
    if budget == 0:
        return start.astype(np.int32)
    threshold = np.partition(ranked, ranked.size - budget)[ranked.size - budget]
    wins = ranked > threshold
    ties = np.flatnonzero(ranked == threshold)[: budget - int(wins.sum())]
    wins[ties] = True
    rows = np.repeat(np.arange(scores.shape[0]), stop - start)
    lengths = start + np.bincount(rows[wins], minlength=scores.shape[0])
    return lengths.astype(np.int32)


def even_split(total: int, parts: int) -> IntArray:
    """int32 [parts] as equal as possible, larger shares first: where only a sum is known."""
    shares = np.full(parts, total // parts, dtype=np.int32)
    shares[: total % parts] += 1
    return shares
