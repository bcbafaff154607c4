"""Brute force: the reference that the fast search is tested and measured against.

Nothing here is used while serving. Latencies are asked of the tables one by one, scores are summed
by sorting what is drafted, and no bucket or concavity argument is relied upon.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from forespark.core import Candidate, FloatArray, IntArray, LatencyTable, Plan, StepInputs


def exhaustive_plan(inputs: StepInputs, draft: LatencyTable, verify: LatencyTable) -> Candidate:
    """The best (D, B) over every pair with B <= D; ties go to the smaller draft, then smaller B."""
    scores = np.asarray(inputs.scores)
    position = np.arange(scores.shape[1])
    limits = np.asarray(inputs.draft_limits)
    eligible = position < limits[:, None]
    owed = position < inputs.min_draft_len
    floors = scores[eligible & owed]
    others = np.sort(scores[eligible & ~owed])[::-1]
    most = floors.size + others.size
    verify_ms = verify.at(inputs.num_non_draft_tokens + np.arange(most + 1)) + inputs.fixed_ms
    best = Candidate(Plan(0, 0), float(inputs.num_emit), float(verify_ms[0]))
    for budget in range(max(1, floors.size), most + 1):
        drafted = np.sort(np.concatenate((floors, others[: budget - floors.size])))[::-1]
        gains = np.concatenate(([0.0], np.cumsum(drafted, dtype=np.float64)))
        draft_ms = float(draft.at(budget + limits.size))
        goodput = (inputs.num_emit + gains) / (draft_ms + verify_ms[: budget + 1])
        at = int(goodput.argmax())
        if goodput[at] > best.goodput:
            best = Candidate(
                Plan(budget, at),
                inputs.num_emit + float(gains[at]),
                draft_ms + float(verify_ms[at]),
                draft_ms,
            )
    return best


def exhaustive_lengths(
    inputs: StepInputs, draft: LatencyTable, verify: LatencyTable
) -> tuple[float, IntArray, IntArray]:
    """Best goodput (tokens per ms), d [n] and b [n] over all (K + 1)^(2 n) splits: tiny n, K only.

    Searches lengths of every request, so it also shows that pooling and sorting loses nothing.
    """
    limits = [int(limit) for limit in inputs.draft_limits]
    sums = np.cumsum(np.pad(inputs.scores, ((0, 0), (1, 0))), axis=1, dtype=np.float64)
    floors = [min(inputs.min_draft_len, limit) for limit in limits]
    best = (-1.0, np.zeros(len(limits), np.int64), np.zeros(len(limits), np.int64))
    for lengths in product(*(range(limit + 1) for limit in limits)):
        total = sum(lengths)
        if total and any(length < floor for length, floor in zip(lengths, floors, strict=True)):
            continue
        draft_ms = float(draft.at(total + len(limits))) if total else 0.0
        for checked in product(*(range(length + 1) for length in lengths)):
            gain = sum(float(sums[row, count]) for row, count in enumerate(checked))
            ms = draft_ms + float(verify.at(inputs.num_non_draft_tokens + sum(checked)))
            goodput = (inputs.num_emit + gain) / ms
            if goodput > best[0]:
                best = (goodput, np.array(lengths), np.array(checked))
    return best


def goodput_lost(
    chosen: Plan, inputs: StepInputs, draft: LatencyTable, verify: LatencyTable
) -> float:
    """Share of the exhaustive optimum's goodput that `chosen` gives up (0 = optimal)."""
    best = exhaustive_plan(inputs, draft, verify)
    return 1.0 - price_plan(chosen, inputs, draft, verify) / best.goodput


def price_plan(plan: Plan, inputs: StepInputs, draft: LatencyTable, verify: LatencyTable) -> float:
    """Goodput (tokens per ms) of any plan under the objective of equation 4."""
    position = np.arange(np.shape(inputs.scores)[1])
    eligible = position < np.asarray(inputs.draft_limits)[:, None]
    owed = position < inputs.min_draft_len
    scores: FloatArray = np.asarray(inputs.scores, dtype=np.float64)
    floors = scores[eligible & owed]
    others = np.sort(scores[eligible & ~owed])[::-1]
    drafted = np.concatenate((floors, others[: max(plan.draft_budget - floors.size, 0)]))
    gain = float(np.sort(drafted)[::-1][: plan.verify_budget].sum())
    ms = float(verify.at(inputs.num_non_draft_tokens + plan.verify_budget))
    if plan.draft_budget:
        ms += float(draft.at(plan.draft_budget + len(inputs.draft_limits)))
    return (inputs.num_emit + gain) / ms
