"""The searches of `selective.py` compiled: same plans, bit for bit, without sorting the scores.

The gain of a draft depends on how many scores each bin holds, and drafts differ in the bin they end
in: the sums of whole bins are carried from one D to the next.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forespark.core import FloatArray, IntArray
from forespark.scheduler.compiled import compiled
from forespark.scheduler.joint_loops import FIELDS, write_plan


@compiled
def count_bins(packed: FloatArray, edges: FloatArray) -> IntArray:
    """int64 [bins]: scores by bin; `edges` are ascending and of the scores' own type."""
    counts = np.empty(edges.size + 1, np.int64)
    above = packed.size
    for place in range(edges.size):
        edge = edges[place]
        reached: Any = np.int32(0)
        for at in range(packed.size):
            reached = np.int32(reached + np.int32(packed[at] >= edge))  # 32 bits: twice the lanes
        counts[place] = above - reached
        above = reached
    counts[edges.size] = above
    return counts


def edges_in(edges: FloatArray, dtype: np.dtype[np.floating]) -> FloatArray:
    """`edges` rounded up to `dtype`: a score of that type reaches both or neither."""
    rounded = edges.astype(dtype)
    return np.where(rounded < edges, np.nextafter(rounded, dtype.type(np.inf)), rounded)


@compiled
def _bucket_ends(ms: FloatArray, extra: float, last: int, start: int) -> IntArray:
    """int64 [m]: indices >= `start` where the price is about to rise, and `last`."""
    ends = np.empty(last + 2, np.int64)
    count = 0
    before = ms[start] + extra
    for at in range(start, last):
        after = ms[at + 1] + extra
        ends[count] = at
        count += after > before
        before = after
    ends[count] = last
    return ends[: count + 1]


@compiled
def _thinned(ends: IntArray, most: int) -> IntArray:
    """int64 [m <= most]: `ends` or as many of them, evenly, with the last."""
    if ends.size <= most:
        return ends
    kept = np.empty(most, np.int64)
    step = (ends.size - 1) / (most - 1)
    for at in range(most - 1):
        kept[at] = ends[int(at * step)]
    kept[most - 1] = ends[ends.size - 1]
    return kept


@compiled
def _running(counts: IntArray, sums: FloatArray) -> FloatArray:
    """float64 [bins + 1, bins + 1]: row p is what all bins from p on hold, the best bin first."""
    bins = counts.size
    held = np.zeros((bins + 1, bins + 1))
    for place in range(bins - 1, -1, -1):
        for corner in range(bins + 1):
            held[place, corner] = held[place + 1, corner] + counts[place] * sums[place, corner]
    return held


@compiled
def _place_of(counts: IntArray, drafted: int) -> tuple[int, int]:
    """(bin that the `drafted` largest scores end in, how many of them lie in it)."""
    place, left = counts.size - 1, drafted
    while place > 0 and counts[place] <= left:
        left -= counts[place]
        place -= 1
    return place, min(left, counts[place])


@compiled
def _best_verified(
    drafted: int,
    ends: IntArray,  # B that are tried
    corners: FloatArray,  # float64 [2, bins + 1]: tokens verified, gain
    draft_ms: float,
    verify_ms: FloatArray,
    verify_extra: float,
    num_emit: int,
    out: FloatArray,  # float64 [2, FIELDS], written
) -> None:
    """The best B for a fixed draft and the second best; ties go to the larger B."""
    verified, gains = corners[0], corners[1]
    last = verified.size - 1
    best = second = -1.0
    best_at = second_at = -1
    best_gain = second_gain = 0.0
    corner = 0
    for budget in ends:
        while corner < last and verified[corner + 1] <= budget:
            corner += 1
        gain = gains[corner]
        if corner < last and verified[corner] != budget:
            slope = (gains[corner + 1] - gains[corner]) / (verified[corner + 1] - verified[corner])
            gain = slope * (budget - verified[corner]) + gains[corner]
        goodput = (num_emit + gain) / (draft_ms + (verify_ms[budget] + verify_extra))
        if goodput >= best:
            second, second_at, second_gain = best, best_at, best_gain
            best, best_at, best_gain = goodput, budget, gain
        elif goodput >= second:
            second, second_at, second_gain = goodput, budget, gain
    write_plan(out[0], drafted, best_at, best_gain, (draft_ms, verify_ms[best_at] + verify_extra))
    out[1, 0] = -1.0
    if second_at >= 0:
        prices = (draft_ms, verify_ms[second_at] + verify_extra)
        write_plan(out[1], drafted, second_at, second_gain, prices)


@compiled
def _corners(
    counts: IntArray, drafted: int, share: FloatArray, value: FloatArray, held: FloatArray
) -> FloatArray:
    """float64 [2, bins + 1]: tokens and gain of verifying the `drafted` largest scores."""
    place, rest = _place_of(counts, drafted)
    corners = np.empty((2, share.shape[1]))
    for corner in range(share.shape[1]):
        corners[0, corner] = held[0, place + 1, corner] + rest * share[place, corner]
        corners[1, corner] = held[1, place + 1, corner] + rest * value[place, corner]
    return corners


@compiled
def search_selective(
    counts: IntArray,  # [bins] eligible scores by bin
    draft_ms: FloatArray,
    verify_ms: FloatArray,
    verify_extra: float,
    num_emit: int,
    share: FloatArray,  # float64 [bins, bins + 1]: tokens, by score bin, in the best survival bins
    value: FloatArray,  # float64 [bins, bins + 1]: what they earn
    most_drafts: int,
    most_verified: int,
    out: FloatArray,  # float64 [3, FIELDS], written: best, second best, best with D = M
) -> None:
    """D at bucket ends by the corners of its gain, then B at bucket ends."""
    total = counts.sum()
    held = np.stack((_running(counts, share), _running(counts, value)))
    drafts = _with_zero(_bucket_ends(draft_ms, 0.0, total, 1))
    highest, chosen = -np.inf, total
    for drafted in _thinned(drafts, most_drafts):
        if drafted == 0:
            continue
        corners = _corners(counts, drafted, share, value, held)
        price = draft_ms[drafted]
        goodput = -np.inf
        for corner in range(corners.shape[1]):
            budget = min(int(math.ceil(corners[0, corner])), drafted)
            ms = price + (verify_ms[budget] + verify_extra)
            goodput = max(goodput, (num_emit + corners[1, corner]) / ms)
        if goodput > highest:
            highest, chosen = goodput, drafted
    ends = _bucket_ends(verify_ms, verify_extra, total, 0)
    best = np.empty((2, FIELDS))
    _best_verified(
        total, _thinned(ends, most_verified), _corners(counts, total, share, value, held),
        draft_ms[total], verify_ms, verify_extra, num_emit, best,
    )  # fmt: skip
    out[2] = best[0]
    if chosen == total:
        out[0] = best[0]
        out[1, 0] = -1.0
        return
    below = np.searchsorted(ends, chosen)
    ends[below] = chosen
    _best_verified(
        chosen, _thinned(ends[: below + 1], most_verified),
        _corners(counts, chosen, share, value, held),
        draft_ms[chosen], verify_ms, verify_extra, num_emit, out[:2],
    )  # fmt: skip


@compiled
def _with_zero(ends: IntArray) -> IntArray:
    """`ends` after D = 0, which nothing costs: the next size always costs more."""
    more = np.zeros(ends.size + 1, np.int64)
    more[1:] = ends
    return more


@compiled
def search_selected(
    counts: IntArray,  # [bins] eligible scores by bin
    drafted: int,
    cap: int,
    most_verified: int,
    draft_ms: float,
    verify_ms: FloatArray,
    verify_extra: float,
    num_emit: int,
    share: FloatArray,  # as for `search_selective`
    value: FloatArray,
    out: FloatArray,  # float64 [2, FIELDS], written: best and second best
) -> None:
    """B of 0..cap for a draft already launched."""
    held = np.stack((_running(counts, share), _running(counts, value)))
    corners = _corners(counts, min(drafted, counts.sum()), share, value, held)
    ends = _thinned(_bucket_ends(verify_ms, verify_extra, cap, 0), most_verified)
    _best_verified(drafted, ends, corners, draft_ms, verify_ms, verify_extra, num_emit, out)
