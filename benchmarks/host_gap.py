"""Goodput that a plan gives up against the best plan there is (section 6.4).

Small batches are searched exhaustively. For larger ones equation 4 has an upper bound: with a price
mu on every verified token, B tokens earn at most mu B + sum of max(g - mu, 0), whatever mu; the
least of these over many mu, divided by the cheapest step that verifies B, is a goodput that no
split of the batch exceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from forespark.core import LatencyTable, StepInputs
from forespark.scheduler.exhaustive import exhaustive_plan
from forespark.scheduler.fast import plan_joint, plan_selective
from forespark.scheduler.prices import Prices
from forespark.scheduler.selection import SelectionModel

Case = tuple[StepInputs, LatencyTable, LatencyTable]
_MULTIPLIERS = 512  # values of mu that are tried


def joint_gap(step: StepInputs, draft: LatencyTable, verify: LatencyTable) -> float:
    """Share of the exhaustive optimum of equation 4 that the plan gives up."""
    best = exhaustive_plan(step, draft, verify).goodput
    return 1.0 - plan_joint(step, draft, verify, 0.0).chosen.goodput / best


def bounded_gap(step: StepInputs, draft: LatencyTable, verify: LatencyTable) -> float:
    """Share of the Lagrangian bound of equation 4: at least what the plan gives up."""
    bound = goodput_bound(step, draft, verify)
    return 1.0 - plan_joint(step, draft, verify, 0.0).chosen.goodput / bound


def goodput_bound(step: StepInputs, draft: LatencyTable, verify: LatencyTable) -> float:
    """Tokens per ms that no (d_i, b_i) exceeds; floors are not known to it."""
    eligible = np.arange(step.scores.shape[1]) < np.asarray(step.draft_limits)[:, None]
    scores = np.asarray(step.scores, dtype=np.float64)[eligible]
    budgets = np.arange(scores.size + 1)
    earned = np.full(budgets.size, np.inf)
    for mu in np.quantile(scores, np.linspace(0, 1, _MULTIPLIERS)) if scores.size else (0.0,):
        np.minimum(earned, mu * budgets + np.maximum(scores - mu, 0.0).sum(), out=earned)
    draft_ms = np.where(budgets > 0, draft.at(budgets + len(step.draft_limits)), 0.0)
    ms = draft_ms + verify.at(step.num_non_draft_tokens + budgets) + step.fixed_ms
    return float(((step.num_emit + earned) / ms).max())


def selective_gap(
    step: StepInputs, draft: LatencyTable, verify: LatencyTable, model: SelectionModel
) -> float:
    """The same for the plan that counts on selection, against every (D, B) of its own objective."""
    chosen = plan_selective(step, draft, verify, 0.0, model).chosen.goodput
    scores = np.asarray(step.scores)
    ranked = np.sort(scores[np.arange(scores.shape[1]) < step.draft_limits[:, None]])[::-1]
    prices = Prices.of_step(step, ranked.size, draft, verify)
    best = prices.candidate(0, 0, 0.0).goodput
    drafts = np.arange(1, ranked.size + 1)
    for drafted, verified, gain in zip(drafts, *model.curves(ranked, drafts), strict=True):
        budgets = np.arange(drafted + 1)
        tokens = prices.num_emit + np.interp(budgets, verified, gain)
        ms = prices.draft_ms[drafted] + prices.verify_ms[budgets]
        best = max(best, float((tokens / ms).max()))
    return 1.0 - chosen / best


def summarise(gap: Callable[..., float], cases: Iterable[Case]) -> dict[str, float | int]:
    """Mean and largest gap, as shares; a few ulp either way are rounding, not loss."""
    gaps = np.maximum([gap(*case) for case in cases], 0.0)
    return {
        "mean": round(float(gaps.mean()), 9),
        "max": round(float(gaps.max()), 9),
        "batches": int(gaps.size),
    }
