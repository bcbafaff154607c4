"""The best plan for known acceptance: an upper bound for benchmarks, never used while serving.

With A[i, d] tokens known to be accepted when request i drafts d, verifying b <= A[i, d] of them
earns b tokens, so a total of B accepted tokens needs exactly B verified. The cheapest way to earn
them is the smallest D, found by dynamic programming over requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forespark.core import Candidate, IntArray, LatencyTable, Plan


@dataclass(frozen=True)
class OraclePlan:
    """The best schedule and its real price."""

    chosen: Candidate
    draft_lens: IntArray  # int64 [n]
    verify_lens: IntArray  # int64 [n]


def plan_oracle(
    accepted: IntArray,  # [n, K + 1] accepted tokens by draft length; column 0 is 0
    draft_limits: IntArray,  # [n]
    num_emit: int,
    num_non_draft_tokens: int,
    draft: LatencyTable,
    verify: LatencyTable,
) -> OraclePlan:
    """Highest goodput over all per-request lengths. O(n K B) time, O(n B) memory.

    Raises ValueError when a draft of d tokens is said to have more than d accepted.
    """
    accepted = np.asarray(accepted, dtype=np.int64)
    if accepted.ndim != 2 or (accepted > np.arange(accepted.shape[1])).any():
        raise ValueError(f"oracle: accepted {accepted.shape} must be [n, K + 1] with A[i, d] <= d")
    needed = _shortest_drafts(accepted, np.asarray(draft_limits))
    infinite = np.iinfo(np.int64).max // 4
    least = np.array([0], dtype=np.int64)  # least[b]: smallest D that earns b tokens so far
    taken: list[IntArray] = []
    for lengths in needed:
        grown = np.full(least.size + lengths.size - 1, infinite)
        choice = np.zeros(grown.size, dtype=np.int64)
        for earned, length in enumerate(lengths):
            window = slice(earned, earned + least.size)
            better = least + length < grown[window]
            grown[window][better] = (least + length)[better]
            choice[window][better] = earned
        least = grown
        taken.append(choice)
    earned_total = np.arange(least.size)
    drafted = np.where(least > 0, least + len(needed), 0)
    draft_ms = draft.at(drafted)
    ms = draft_ms + verify.at(num_non_draft_tokens + earned_total)
    best = int(((num_emit + earned_total) / ms).argmax())
    verify_lens = np.zeros(len(needed), dtype=np.int64)
    left = best
    for row in range(len(needed) - 1, -1, -1):
        verify_lens[row] = taken[row][left]
        left -= int(verify_lens[row])
    draft_lens = np.array(
        [needed[row][earned] for row, earned in enumerate(verify_lens)], dtype=np.int64
    )
    chosen = Candidate(
        Plan(int(draft_lens.sum()), best),
        float(num_emit + best),
        float(ms[best]),
        float(draft_ms[best]),
    )
    return OraclePlan(chosen, draft_lens, verify_lens)


def _shortest_drafts(accepted: IntArray, limits: IntArray) -> list[IntArray]:
    """For each request int64 [A_max + 1]: the shortest draft with at least b accepted tokens."""
    needed: list[IntArray] = []
    for curve, limit in zip(accepted, limits, strict=True):
        reached = np.maximum.accumulate(curve[: int(limit) + 1])
        needed.append(np.searchsorted(reached, np.arange(reached[-1] + 1), side="left"))
    return needed
