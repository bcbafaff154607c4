"""The joint plan with the value of post-draft selection (`selection.py`) in its objective.

    (D, B) = argmax (n_emit + G(D, B)) / (T_draft(D + n) + T_verify(N + B) + fixed cost),

where G(D, B) is what the B best of D drafted tokens are expected to earn once the post-draft
estimator has ranked them. Without spread between the two estimators G is the sum of the B largest
scores and this is `joint.py`. D is tried at the ends of buckets, thinned to `MOST_DRAFTS`; for
each, B at the corners of G; then B is refined to the ends of the verify buckets, thinned to
`MOST_VERIFIED`. Goodput is flat around its peak, so what thinning gives up is far below `min_gain`.
"""

from __future__ import annotations

import numpy as np

from forespark.core import (
    Candidate,
    Decision,
    FloatArray,
    IntArray,
    LatencyTable,
    StepInputs,
    VerifyInputs,
)
from forespark.scheduler.joint import (
    decide,
    decide_verification,
    flat_notes,
    plan_joint,
    replan_verify,
)
from forespark.scheduler.pool import Pool, pool_scores
from forespark.scheduler.prices import Prices
from forespark.scheduler.selection import SelectionModel

MOST_DRAFTS = 48
MOST_VERIFIED = 256


def plan_selective(
    inputs: StepInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    min_gain: float,
    model: SelectionModel,
    policy: str = "joint",
) -> Decision:
    """The plan with the highest predicted goodput, after the guards of `joint.py`.

    With a floor (`min_draft_len`), or when nothing may be drafted, the plain joint plan.
    """
    pool = pool_scores(inputs.scores, inputs.draft_limits, inputs.min_draft_len)
    if pool.floors.size or pool.total == 0:
        return plan_joint(inputs, draft, verify, min_gain, policy)
    prices = Prices.of_step(inputs, pool.total, draft, verify)
    drafts = _draft_budgets(prices, pool.total)
    verified, gain = model.curves(pool.others, drafts)
    filled = np.minimum(np.ceil(verified).astype(np.int64), drafts[:, None])
    ms = prices.draft_ms[drafts][:, None] + prices.verify_ms[filled]
    goodput = ((prices.num_emit + gain) / ms).max(axis=1)
    best = int(drafts[goodput.argmax()])
    none = prices.candidate(0, 0, 0.0)
    full, *_ = _refined(prices, pool, model, pool.total, pool.total)
    found = _refined(prices, pool, model, best, best) if best < pool.total else (full,)
    return decide(inputs, found, none, full, min_gain, flat_notes(draft, verify), policy)


def replan_selective(
    inputs: VerifyInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    model: SelectionModel,
    policy: str = "joint",
) -> Decision:
    """B for a draft already launched: the same objective at the real N, with T_draft fixed."""
    pool = pool_scores(inputs.scores, inputs.draft_limits, inputs.min_draft_len)
    if pool.floors.size:
        return replan_verify(inputs, draft, verify, policy)
    prices = Prices.of_verification(inputs, draft, verify)
    cap = max(0, min(inputs.verify_cap, inputs.draft_budget, pool.total))
    found = _refined(prices, pool, model, inputs.draft_budget, cap)
    return decide_verification(inputs, found, flat_notes(draft, verify), policy)


def _draft_budgets(prices: Prices, most: int) -> IntArray:
    """int64 [m], ascending: D > 0 at bucket ends up to `most`, which is the last."""
    ends = _bucket_ends(prices.draft_ms[: most + 1], MOST_DRAFTS)
    return ends[ends > 0]


def _bucket_ends(ms: FloatArray, most: int) -> IntArray:
    """int64 [m <= most]: where the price is about to rise, thinned evenly, and the last index."""
    last = ms.size - 1
    ends = np.append(np.flatnonzero(ms[1:] > ms[:-1]), last)
    if ends.size > most:
        ends = ends[np.linspace(0, ends.size - 1, most).astype(np.int64)]
    return ends


def _refined(
    prices: Prices, pool: Pool, model: SelectionModel, drafted: int, cap: int
) -> tuple[Candidate, ...]:
    """The best B of 0..cap for a fixed D, then the second best (if any)."""
    verify_ms = prices.verify_ms[: cap + 1]
    ends = _bucket_ends(verify_ms, MOST_VERIFIED)
    gains = model.gains(pool.others, min(drafted, pool.total), ends)
    goodput = (prices.num_emit + gains) / (prices.draft_ms[drafted] + verify_ms[ends])
    best = goodput.argsort(kind="stable")[::-1][:2]
    return tuple(prices.candidate(drafted, int(ends[at]), float(gains[at])) for at in best)
