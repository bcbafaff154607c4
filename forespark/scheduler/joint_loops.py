"""The searches of `joint.py` compiled: same plans, bit for bit, in one pass over the scores."""

from __future__ import annotations

import numpy as np

from forespark.core import FloatArray, IntArray
from forespark.scheduler.compiled import compiled

FIELDS = 5  # of a plan in an output row: D, B, gain, draft ms, verify ms; D < 0: no such plan


@compiled
def pack_eligible(scores: FloatArray, limits: IntArray) -> tuple[FloatArray, bool]:
    """([M] eligible scores in row order, at least 0; whether all are below +inf and no NaN)."""
    rows, steps = scores.shape
    packed = np.empty(rows * steps, scores.dtype)
    zero = scores.dtype.type(0.0)
    top = scores.dtype.type(np.inf)
    count = unsound = 0
    for row in range(rows):
        stop = min(max(limits[row], 0), steps)
        for at in range(steps):
            score = scores[row, at]
            unsound += (at < stop) & (not score < top)
            packed[count + at] = zero if score < zero else score
        count += stop
    return packed[:count], unsound == 0


@compiled
def _draft_price(draft_ms: FloatArray, drafted: int) -> float:
    return 0.0 if drafted == 0 else draft_ms[drafted]


@compiled
def write_plan(
    out: FloatArray, drafted: int, verified: int, gain: float, ms: tuple[float, float]
) -> None:
    out[0], out[1], out[2], out[3], out[4] = drafted, verified, gain, ms[0], ms[1]


@compiled
def search_joint(
    ascending: FloatArray,  # [M] eligible scores
    draft_ms: FloatArray,
    verify_ms: FloatArray,
    verify_extra: float,
    num_emit: int,
    out: FloatArray,  # float64 [3, FIELDS], written: best, second best, best with D = M
) -> None:
    """Every B with its cheapest draft, and every B for full blocks, in one pass."""
    total = ascending.size
    full_ms = _draft_price(draft_ms, total)
    best = second = full = -1.0
    best_at = second_at = full_at = -1
    best_gain = second_gain = full_gain = 0.0
    gain = 0.0
    ms = verify_ms[0] + verify_extra
    checked = full_ms + ms
    for at in range(total + 1):
        next_ms, next_checked = np.inf, np.inf
        if at < total:
            verify = verify_ms[at + 1] + verify_extra
            next_ms = draft_ms[at + 1] + verify
            next_checked = full_ms + verify
        if next_ms > ms:
            goodput = (num_emit + gain) / ms
            if goodput > best:
                second, second_at, second_gain = best, best_at, best_gain
                best, best_at, best_gain = goodput, at, gain
            elif goodput > second:
                second, second_at, second_gain = goodput, at, gain
        if next_checked > checked:
            goodput = (num_emit + gain) / checked
            if goodput > full:
                full, full_at, full_gain = goodput, at, gain
        if at < total:
            gain += ascending[total - 1 - at]
        ms, checked = next_ms, next_checked
    out[1, 0] = -1.0
    for row, verified, earned in ((0, best_at, best_gain), (1, second_at, second_gain)):
        if verified >= 0:
            price = _draft_price(draft_ms, verified)
            drafted = verified
            while drafted < total and _draft_price(draft_ms, drafted + 1) <= price:
                drafted += 1
            prices = (
                _draft_price(draft_ms, drafted),
                verify_ms[verified] + verify_extra,
            )
            write_plan(out[row], drafted, verified, earned, prices)
    write_plan(out[2], total, full_at, full_gain, (full_ms, verify_ms[full_at] + verify_extra))


@compiled
def search_verified(
    ascending: FloatArray,  # [M] eligible scores
    drafted: int,
    cap: int,
    draft_ms: float,
    verify_ms: FloatArray,
    verify_extra: float,
    num_emit: int,
    out: FloatArray,  # float64 [2, FIELDS], written: best and second best
) -> None:
    """Every B of 0..cap for a fixed draft."""
    best = second = -1.0
    best_at = second_at = -1
    best_gain = second_gain = 0.0
    gain = 0.0
    ms = draft_ms + (verify_ms[0] + verify_extra)
    for at in range(cap + 1):
        next_ms = np.inf
        if at < cap:
            next_ms = draft_ms + (verify_ms[at + 1] + verify_extra)
        if next_ms > ms:
            goodput = (num_emit + gain) / ms
            if goodput > best:
                second, second_at, second_gain = best, best_at, best_gain
                best, best_at, best_gain = goodput, at, gain
            elif goodput > second:
                second, second_at, second_gain = goodput, at, gain
        if at < cap:
            gain += ascending[ascending.size - 1 - at]
        ms = next_ms
    out[1, 0] = -1.0
    write_plan(out[0], drafted, best_at, best_gain, (draft_ms, verify_ms[best_at] + verify_extra))
    if second_at >= 0:
        prices = (draft_ms, verify_ms[second_at] + verify_extra)
        write_plan(out[1], drafted, second_at, second_gain, prices)
