"""The joint search when every request is owed a minimum draft (`min_draft_len`).

The floors are drafted whatever they are worth, so B no longer determines D: the tokens verified are
the B best of (floors + the D - F best others). The search starts from the best plan that drafts
exactly what its B best tokens need. That plan's goodput x bounds the rest: a (D, B) can only beat
it if n_emit + G(B) - x T_verify(N + B) > x T_draft(D + n), where G(B), the B best of the whole
pool, is at least what the floors leave. The bucket ends that pass are priced as a grid. Only in the
interpolated region can there be too many; they are thinned evenly and the best one is refined.
"""

from __future__ import annotations

import numpy as np

from forespark.core import Candidate, FloatArray, IntArray
from forespark.scheduler.pool import Pool
from forespark.scheduler.prices import Prices

MAX_SIDE = 64  # candidates per axis, which bounds the host's time


def search_with_floors(prices: Prices, pool: Pool) -> tuple[Candidate, ...]:
    """The best plan found with D >= F, then the best other plan that was priced."""
    total, floor_total = pool.total, pool.floors.size
    budgets = np.arange(total + 1)
    value = _Value(pool)

    def best_of(draft: IntArray, verify: IntArray) -> Candidate:
        gain = value.at(draft, verify)
        ms = prices.draft_ms[draft] + prices.verify_ms[verify]
        at = int(((prices.num_emit + gain) / ms).argmax())
        return prices.candidate(int(draft[at]), int(verify[at]), float(gain[at]))

    start = best_of(floor_total + value.others_in_best, budgets)
    surplus = prices.num_emit + pool.gains - start.goodput * prices.verify_ms[: total + 1]
    price = start.goodput * prices.draft_ms[: total + 1]
    drafts = _ends(prices.draft_ms[: total + 1], np.maximum.accumulate(surplus) >= price)
    drafts = drafts[drafts >= floor_total]
    verifies = _ends(
        prices.verify_ms[: total + 1], surplus >= price[np.maximum(budgets, floor_total)]
    )
    thinned = max(drafts.size, verifies.size) > MAX_SIDE
    drafts, verifies = _thin(drafts), np.union1d(_thin(verifies), _thin(drafts))
    row, column = np.nonzero(verifies <= drafts[:, None])
    met = [start]
    if row.size:
        best = best_of(drafts[row], verifies[column])
        met.append(best)
        if thinned:
            drafted = best.plan.draft_budget
            refined = best_of(np.full(drafted + 1, drafted), budgets[: drafted + 1])
            verified = refined.plan.verify_budget
            wide = budgets[max(floor_total, verified) :]
            met += [refined, best_of(wide, np.full(wide.size, verified))]
    return tuple(met)


def _ends(ms: FloatArray, keep: np.typing.NDArray[np.bool_]) -> IntArray:
    """int64: budgets that `keep` admits and after which the price rises."""
    rises = np.append(ms[1:] > ms[:-1], True)
    return np.flatnonzero(rises & keep)


def _thin(budgets: IntArray) -> IntArray:
    """At most MAX_SIDE of the budgets, evenly spread, both extremes included."""
    if budgets.size <= MAX_SIDE:
        return budgets
    return budgets[np.linspace(0, budgets.size - 1, MAX_SIDE).round().astype(np.int64)]


class _Value:
    """Sum of the B best drafted scores for any (D, B), without sorting again per D."""

    def __init__(self, pool: Pool) -> None:
        self.floor_total = pool.floors.size
        self.gains = pool.gains
        self.floor_gains = np.concatenate(([0.0], np.cumsum(pool.floors, dtype=np.float64)))
        self.other_gains = np.concatenate(([0.0], np.cumsum(pool.others, dtype=np.float64)))
        # Others among the b best of all; on equal scores the floors go first, being drafted anyway.
        ahead = np.searchsorted(-pool.others, -pool.floors, side="left")
        self.others_in_best = np.ones(pool.total + 1, dtype=np.int64)
        self.others_in_best[0] = 0
        self.others_in_best[1 + ahead + np.arange(pool.floors.size)] = 0
        np.cumsum(self.others_in_best, out=self.others_in_best)

    def at(self, draft: IntArray, verify: IntArray) -> FloatArray:
        """float64, shaped like `draft` and `verify`, which hold F <= D and B <= D."""
        spare = draft - self.floor_total
        from_floors = np.clip(verify - spare, 0, self.floor_total)
        short = self.other_gains[spare] + self.floor_gains[from_floors]
        return np.where(self.others_in_best[verify] <= spare, self.gains[verify], short)
