"""The schedulers behind one protocol: every comparison of the paper is one name apart.

| name | drafts | verifies | scores at plan / re-plan |
| --- | --- | --- | --- |
| off | nothing | nothing | none |
| full | every eligible token | everything drafted | none |
| batchwise | one length for the whole batch, by batch size | everything drafted | none |
| adaptive_verification | every eligible token | the best B | post-draft / post-draft |
| single_curve | the joint plan | the joint plan | single curve / single curve |
| joint | the joint plan | the joint plan | pre-draft / pre-draft |

All scores on the host are those of the previous step. How the GPU splits B is not decided here:
every policy that verifies less than it drafted ranks the current post-draft survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from forespark.core import (
    Candidate,
    Decision,
    LatencyTable,
    Plan,
    StepInputs,
    VerifyInputs,
)
from forespark.scheduler.fast import (
    plan_joint,
    plan_selective,
    replan_selective,
    replan_verify,
)
from forespark.scheduler.selection import SelectionModel


class ScoreSource(Enum):
    """Which scores a policy's `plan` or `replan` reads."""

    NONE = "none"
    PRE_DRAFT = "pre_draft"  # envelope scores of every length's own curve
    SINGLE_CURVE = "single_curve"  # envelope scores of row K for every length
    POST_DRAFT = "post_draft"  # survival S~ after drafting, -inf where nothing was drafted


class Policy(Protocol):
    """One way to choose the budgets of a step."""

    @property
    def name(self) -> str: ...

    @property
    def plan_scores(self) -> ScoreSource: ...

    @property
    def replan_scores(self) -> ScoreSource: ...

    def plan(self, inputs: StepInputs) -> Decision:
        """D and a first B, before the draft is launched."""

    def replan(self, inputs: VerifyInputs) -> Decision:
        """B at the verification step's actual N, while the drafter runs."""


@dataclass(frozen=True)
class Tables:
    """Latency of the two stages by token count, in ms."""

    draft: LatencyTable
    verify: LatencyTable


@dataclass(frozen=True)
class FixedPolicy:
    """`off`, `full` and `batchwise`: one length for every request, all of it verified.

    `schedule` holds inclusive (first batch, last batch, k) ranges: a batch in a gap or beyond the
    last range takes the k of the range before it, as vLLM does. None drafts every eligible token.
    Without `tables` the plan is the same and its price NaN.
    """

    name: str
    schedule: tuple[tuple[int, int, int], ...] | None = None
    tables: Tables | None = None
    plan_scores: ScoreSource = ScoreSource.NONE
    replan_scores: ScoreSource = ScoreSource.NONE

    def draft_len(self, num_reqs: int) -> int | None:
        """k for a batch of `num_reqs`; None when only the requests' limits bound it."""
        if self.schedule is None:
            return None
        return next((k for first, _, k in reversed(self.schedule) if first <= num_reqs), 0)

    def plan(self, inputs: StepInputs) -> Decision:
        num_reqs = len(inputs.draft_limits)
        length = self.draft_len(num_reqs)
        most = np.shape(inputs.scores)[1]
        limits = np.clip(inputs.draft_limits, 0, most if length is None else min(length, most))
        total = int(limits.sum())
        decision = self._decide(Plan(total, total), inputs, num_reqs)
        return replace(decision, max_draft_len=length)

    def replan(self, inputs: VerifyInputs) -> Decision:
        budget = max(0, min(inputs.verify_cap, inputs.draft_budget))
        return self._decide(Plan(inputs.draft_budget, budget), inputs, inputs.num_drafted_reqs)

    def _decide(self, plan: Plan, inputs: StepInputs | VerifyInputs, num_drafted: int) -> Decision:
        """Predicted tokens are the guaranteed ones: these policies have no estimate."""
        draft_ms, verify_ms = float("nan"), float("nan")
        non_draft = inputs.num_non_draft_tokens
        if self.tables is not None:
            drafted = plan.draft_budget + num_drafted if plan.draft_budget else 0
            draft_ms = float(self.tables.draft.at(drafted))
            verify_ms = float(self.tables.verify.at(non_draft + plan.verify_budget))
            verify_ms += inputs.fixed_ms
        chosen = Candidate(plan, float(inputs.num_emit), draft_ms + verify_ms, draft_ms)
        return Decision(
            self.name,
            chosen,
            num_reqs=len(inputs.draft_limits),
            num_non_draft_tokens=non_draft,
        )


@dataclass(frozen=True)
class JointPolicy:
    """`joint` and `single_curve`: the same planner on different scores.

    With `selection` the plan counts on the post-draft ranking; without, it is the paper's.
    """

    name: str
    tables: Tables
    min_gain: float
    plan_scores: ScoreSource
    replan_scores: ScoreSource
    selection: SelectionModel | None = None

    def plan(self, inputs: StepInputs) -> Decision:
        if self.selection is not None:
            return plan_selective(
                inputs,
                self.tables.draft,
                self.tables.verify,
                self.min_gain,
                self.selection,
                self.name,
            )
        return plan_joint(inputs, self.tables.draft, self.tables.verify, self.min_gain, self.name)

    def replan(self, inputs: VerifyInputs) -> Decision:
        if self.selection is not None:
            return replan_selective(
                inputs, self.tables.draft, self.tables.verify, self.selection, self.name
            )
        return replan_verify(inputs, self.tables.draft, self.tables.verify, self.name)


@dataclass(frozen=True)
class AdaptiveVerification:
    """Full blocks, then the B that pays ("w/o JS"): drafting is never in question."""

    tables: Tables
    name: str = "adaptive_verification"
    plan_scores: ScoreSource = ScoreSource.POST_DRAFT
    replan_scores: ScoreSource = ScoreSource.POST_DRAFT

    def plan(self, inputs: StepInputs) -> Decision:
        num_reqs = len(inputs.draft_limits)
        total = int(np.clip(inputs.draft_limits, 0, np.shape(inputs.scores)[1]).sum())
        return self.replan(
            VerifyInputs(
                scores=inputs.scores,
                draft_limits=inputs.draft_limits,
                num_emit=inputs.num_emit,
                num_non_draft_tokens=inputs.num_non_draft_tokens,
                draft_budget=total,
                num_drafted_reqs=num_reqs,
                verify_cap=total,
                fixed_ms=inputs.fixed_ms,
            )
        )

    def replan(self, inputs: VerifyInputs) -> Decision:
        return replan_verify(inputs, self.tables.draft, self.tables.verify, self.name)


POLICIES = ("off", "full", "batchwise", "adaptive_verification", "single_curve", "joint")


def make_policy(
    name: str,
    draft: LatencyTable | None = None,
    verify: LatencyTable | None = None,
    min_gain: float = 0.0,
    schedule: Sequence[Sequence[int]] | None = None,
    selection: SelectionModel | None = None,
) -> Policy:
    """The policy called `name`. Raises ValueError for an unknown name or a missing ingredient."""
    if name not in POLICIES:
        raise ValueError(f"scheduler.policy: unknown {name!r}; supported: {', '.join(POLICIES)}")
    tables = None if draft is None or verify is None else Tables(draft, verify)
    if name == "off":
        return FixedPolicy(name, ((1, 1, 0),), tables)
    if name == "full":
        return FixedPolicy(name, None, tables)
    if name == "batchwise":
        return FixedPolicy(name, parse_schedule(schedule), tables)
    if tables is None:
        raise ValueError(
            f"scheduler.policy: {name!r} needs a draft and a verify latency table; "
            "profile this machine, or use off, full or batchwise, which need none"
        )
    if name == "adaptive_verification":
        return AdaptiveVerification(tables)
    source = ScoreSource.PRE_DRAFT if name == "joint" else ScoreSource.SINGLE_CURVE
    return JointPolicy(name, tables, min_gain, source, source, selection)


def parse_schedule(schedule: Sequence[Sequence[int]] | None) -> tuple[tuple[int, int, int], ...]:
    """Inclusive (first, last, k) ranges from those, or from the shorter (max_batch, k) pairs.

    Raises ValueError unless the ranges start at 1, ascend without overlap and hold k >= 0.
    """
    if not schedule:
        raise ValueError("batchwise schedule: empty; give [[first_batch, last_batch, k], ...]")
    ranges: list[tuple[int, int, int]] = []
    previous = 0
    for entry in schedule:
        if len(entry) not in (2, 3):
            raise ValueError(
                f"batchwise schedule: {list(entry)} is neither [first, last, k] nor [max_batch, k]"
            )
        first, last, length = (previous + 1, *entry) if len(entry) == 2 else entry
        if first <= previous or last < first or length < 0 or (not ranges and first != 1):
            raise ValueError(
                f"batchwise schedule: {list(entry)} after batch {previous}; ranges must start at "
                "1, ascend without overlap, and have k >= 0"
            )
        ranges.append((int(first), int(last), int(length)))
        previous = int(last)
    return tuple(ranges)
