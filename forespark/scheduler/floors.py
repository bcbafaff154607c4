"""The joint search when every request is owed a minimum draft (`min_draft_len`).

The floors are drafted whatever they are worth, so D and B no longer determine each other: the
tokens verified are the B best of (floors + the D - F best others). Both budgets are searched on a
grid of bucket ends, thinned to a bounded size and refined around its best point until no candidate
is left out there.
"""

from __future__ import annotations

import numpy as np

from forespark.core import Candidate, FloatArray, IntArray
from forespark.scheduler.pool import Pool
from forespark.scheduler.prices import Prices, step_ends

GRID = 64  # candidates per axis and round, so a round prices at most GRID * 2 GRID cells


def search_with_floors(prices: Prices, pool: Pool) -> tuple[Candidate, ...]:
    """The best plan with D >= F, then the best other plan that was priced (if any)."""
    value = _Value(pool)
    drafts, verifies = (pool.floors.size, pool.total), (0, pool.total)
    found: list[Candidate] = []
    while True:
        draft = step_ends(prices.draft_ms, *drafts, GRID)
        verify_ends = step_ends(prices.verify_ms, *verifies, GRID)
        # B = D is the largest feasible B where the verify bucket reaches beyond the draft.
        verify = np.union1d(verify_ends, draft)
        gain = value.at(draft, verify)
        ms = prices.draft_ms[draft][:, None] + prices.verify_ms[verify]
        goodput = np.where(verify <= draft[:, None], (prices.num_emit + gain) / ms, -1.0)
        row, column = divmod(int(goodput.argmax()), verify.size)
        for at_row, at_column in ((row, column), _second(goodput, row, column)):
            if goodput[at_row, at_column] >= 0:
                budgets = int(draft[at_row]), int(verify[at_column])
                found.append(prices.candidate(*budgets, float(gain[at_row, at_column])))
        window = _around(draft, row, drafts), _around(verify, column, verifies)
        complete = draft.size < GRID and verify_ends.size < GRID
        if complete or window == (drafts, verifies):
            break
        drafts, verifies = window
    found.sort(key=lambda plan: -plan.goodput)
    return (found[0], *(plan for plan in found[1:] if plan.plan != found[0].plan))[:2]


def _second(goodput: FloatArray, row: int, column: int) -> tuple[int, int]:
    """Cell of the highest goodput besides (row, column)."""
    others = goodput.copy()
    others[row, column] = -1.0
    row, column = divmod(int(others.argmax()), goodput.shape[1])
    return row, column


def _around(candidates: IntArray, best: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """The gap between the neighbours of the best candidate."""
    low = int(candidates[best - 1]) + 1 if best else bounds[0]
    high = int(candidates[best + 1]) if best + 1 < candidates.size else bounds[1]
    return low, high


class _Value:
    """Sum of the B best drafted scores for a grid of (D, B), without sorting again per D."""

    def __init__(self, pool: Pool) -> None:
        self.floor_total = pool.floors.size
        self.gains = pool.gains
        self.floor_gains = np.concatenate(([0.0], np.cumsum(pool.floors, dtype=np.float64)))
        self.other_gains = np.concatenate(([0.0], np.cumsum(pool.others, dtype=np.float64)))
        # Others among the b best of all; on equal scores the floors go first, being drafted anyway.
        ahead = np.searchsorted(-pool.floors, -pool.others, side="right")
        self.others_in_best = np.zeros(pool.total + 1, dtype=np.int64)
        self.others_in_best[1 + ahead + np.arange(pool.others.size)] = 1
        np.cumsum(self.others_in_best, out=self.others_in_best)

    def at(self, draft: IntArray, verify: IntArray) -> FloatArray:
        """float64 [len(draft), len(verify)]; cells with B > D hold no meaning."""
        spare = (draft - self.floor_total)[:, None]
        from_floors = np.clip(verify - spare, 0, self.floor_total)
        short = self.other_gains[spare] + self.floor_gains[from_floors]
        return np.where(self.others_in_best[verify] <= spare, self.gains[verify], short)
