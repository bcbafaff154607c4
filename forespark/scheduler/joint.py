"""The host decision: how many tokens to draft and to verify this step (section 4.3, equation 4).

    (D, B) = argmax (n_emit + sum of the B largest g) / (T_draft(D + n) + T_verify(N + B)),  B <= D

Only the B best drafted tokens earn anything, so for a given B the best D is the cheapest draft that
holds B tokens, filled to the end of its bucket (extra tokens there are free, and give the
post-draft ranking more to choose from). That leaves one number to search, and every B is priced at
once: within the captured sizes only bucket ends can win, and in the interpolated region, which has
no buckets, every B is a candidate. Nothing is sampled, so the result is the exact optimum. A floor
(`min_draft_len`) ties D and B together again and is searched in `floors.py`.

Two guards keep a small predicted gain from changing the plan, in this order:

1. `min_gain_over_no_speculation`: a plan that speculates must beat D = 0 by `min_gain`, relative.
2. `min_gain_over_full_block`: a plan that drafts less than full blocks must beat them by
   `min_gain`; otherwise full blocks are drafted, provided that they themselves pass guard 1.
"""

from __future__ import annotations

import numpy as np

from forespark.core import (
    Candidate,
    Decision,
    FloatArray,
    LatencyTable,
    StepInputs,
    VerifyInputs,
)
from forespark.scheduler.floors import search_with_floors
from forespark.scheduler.pool import Pool, pool_scores
from forespark.scheduler.prices import Prices

NO_SPECULATION = "no speculation"
FULL_BLOCK = "full block"
GUARD_NONE = "min_gain_over_no_speculation"
GUARD_FULL = "min_gain_over_full_block"


def plan_joint(
    inputs: StepInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    min_gain: float,
    policy: str = "joint",
) -> Decision:
    """The plan with the highest predicted goodput, after the guards.

    `min_gain` is relative (0.04 = 4 %); 0 gives the plain argmax. `runner_up` is the best other
    plan, the overridden argmax when a guard fired. Plans with a dearer draft and the same B are
    never better and are left out. Raises ValueError for a negative gain, scores that are NaN or
    +inf, or a batch without a single non-draft token.
    """
    if min_gain < 0:
        raise ValueError(f"min_gain must be >= 0, got {min_gain}")
    pool = pool_scores(inputs.scores, inputs.draft_limits, inputs.min_draft_len)
    prices = Prices.of_step(inputs, pool.total, draft, verify)
    none = prices.candidate(0, 0, 0.0)
    if pool.total == 0:
        return Decision(
            policy,
            none,
            num_reqs=len(inputs.draft_limits),
            num_non_draft_tokens=inputs.num_non_draft_tokens,
            notes=("no request may draft this step",),
            alternatives=((NO_SPECULATION, none),),
        )
    full = best_verification(prices, pool, pool.total, pool.total)[0]
    if pool.floors.size:
        found = search_with_floors(prices, pool)
    else:
        found = _search(prices, pool)
    return decide(inputs, found, none, full, min_gain, flat_notes(draft, verify), policy)


def decide(
    inputs: StepInputs,
    found: tuple[Candidate, ...],
    none: Candidate,
    full: Candidate,
    min_gain: float,
    notes: tuple[str, ...],
    policy: str,
) -> Decision:
    """The best of `found` and of both ends of the search, after the guards."""
    ranked = sorted((*found, none, full), key=lambda plan: -plan.goodput)
    chosen, guard = _apply_guards(ranked[0], none, full, min_gain)
    return Decision(
        policy,
        chosen,
        runner_up=next((plan for plan in ranked if plan.plan != chosen.plan), None),
        guard=guard,
        num_reqs=len(inputs.draft_limits),
        num_non_draft_tokens=inputs.num_non_draft_tokens,
        notes=notes,
        alternatives=((NO_SPECULATION, none), (FULL_BLOCK, full)),
    )


def replan_verify(
    inputs: VerifyInputs, draft: LatencyTable, verify: LatencyTable, policy: str = "joint"
) -> Decision:
    """B for a draft already launched: the same objective at the real N, with T_draft fixed.

    B lies in 0..min(verify_cap, D, eligible tokens), so that the GPU split can always fill it. No
    guard applies: the draft is paid for, and verifying more or less of it switches nothing.
    """
    pool = pool_scores(inputs.scores, inputs.draft_limits, inputs.min_draft_len)
    prices = Prices.of_verification(inputs, draft, verify)
    cap = max(0, min(inputs.verify_cap, inputs.draft_budget, pool.total))
    found = best_verification(prices, pool, inputs.draft_budget, cap)
    return decide_verification(inputs, found, flat_notes(draft, verify), policy)


def decide_verification(
    inputs: VerifyInputs, found: tuple[Candidate, ...], notes: tuple[str, ...], policy: str
) -> Decision:
    """The re-plan of B from its best candidates, best first."""
    return Decision(
        policy,
        found[0],
        runner_up=found[1] if len(found) > 1 else None,
        num_reqs=len(inputs.draft_limits),
        num_non_draft_tokens=inputs.num_non_draft_tokens,
        notes=notes,
    )


def best_verification(
    prices: Prices, pool: Pool, draft_budget: int, cap: int
) -> tuple[Candidate, ...]:
    """The best B of 0..cap for a fixed D, then the second best (if any)."""
    floor_total = pool.floors.size
    gains = pool.gains
    if floor_total and floor_total <= draft_budget < pool.total:
        gains = pool.drafted_gains(draft_budget)
    ms = prices.draft_ms[draft_budget] + prices.verify_ms[: cap + 1]
    return tuple(
        prices.candidate(draft_budget, best, float(gains[best]))
        for best in _two_best(prices.num_emit, gains[: cap + 1], ms)
    )


def flat_notes(draft: LatencyTable, verify: LatencyTable) -> tuple[str, ...]:
    """A warning for each table in which every size costs the same: no budget looks expensive."""
    if not (draft.is_flat or verify.is_flat):
        return ()
    return tuple(
        f"warn: the {stage} latency table ({table.source}) is flat, so trimming is off in "
        f"practice; profile this machine"
        for stage, table in (("draft", draft), ("verify", verify))
        if table.is_flat
    )


def _search(prices: Prices, pool: Pool) -> tuple[Candidate, ...]:
    """The two best plans without floors, over every B with its cheapest draft."""
    ms = prices.draft_ms[: pool.total + 1] + prices.verify_ms[: pool.total + 1]
    found = []
    for verify_budget in _two_best(prices.num_emit, pool.gains, ms):
        same_price = prices.draft_ms[verify_budget]
        end = int(np.searchsorted(prices.draft_ms[: pool.total + 1], same_price, side="right"))
        found.append(prices.candidate(end - 1, verify_budget, float(pool.gains[verify_budget])))
    return tuple(found)


def _two_best(num_emit: int, gains: FloatArray, ms: FloatArray) -> list[int]:
    """Indices of the highest goodput among bucket ends, at most two; ties go to the smaller step.

    `gains` and `ms` [m] never decrease; where the price stays, only the last index can win.
    """
    ends = np.append(np.flatnonzero(ms[1:] > ms[:-1]), ms.size - 1)
    goodput = (num_emit + gains[ends]) / ms[ends]
    best = int(goodput.argmax())
    if ends.size == 1:
        return [int(ends[best])]
    goodput[best] = -1.0
    return [int(ends[best]), int(ends[goodput.argmax()])]


def _apply_guards(
    best: Candidate, none: Candidate, full: Candidate, min_gain: float
) -> tuple[Candidate, str | None]:
    """The plan to run and the name of the guard that replaced `best`, if one did."""
    margin = 1.0 + min_gain
    if best.plan.draft_budget and best.goodput < none.goodput * margin:
        return none, GUARD_NONE
    trims_draft = 0 < best.plan.draft_budget < full.plan.draft_budget
    full_passes = full.goodput >= none.goodput * margin
    if trims_draft and full_passes and best.goodput < full.goodput * margin:
        return full, GUARD_FULL
    return best, None
