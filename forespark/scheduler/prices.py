"""What every budget of one step costs, as two slices of the latency tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from forespark.core import Candidate, FloatArray, LatencyTable, Plan, StepInputs, VerifyInputs


@dataclass(frozen=True)
class Prices:
    """Milliseconds by budget: what the tables say, and what is paid beyond them.

    `draft_ms[D]` (0 for D = 0: nothing is launched) and `verify_ms[B]` are the two together.
    """

    draft_table: FloatArray  # float64 [>= D_max + 1], never decreasing; [0] is not a price
    verify_table: FloatArray  # float64 [>= D_max + 1], never decreasing
    num_emit: int
    verify_extra_ms: float = 0.0

    @cached_property
    def draft_ms(self) -> FloatArray:
        """float64 [>= D_max + 1], never decreasing."""
        ms = self.draft_table.copy()
        ms[0] = 0.0
        return ms

    @cached_property
    def verify_ms(self) -> FloatArray:
        """float64 [>= D_max + 1], never decreasing; with the step's fixed cost."""
        return self.verify_table + self.verify_extra_ms

    @classmethod
    def of_step(
        cls, inputs: StepInputs, max_draft: int, draft: LatencyTable, verify: LatencyTable
    ) -> Prices:
        """Prices of D, B = 0..max_draft for a step not started."""
        return cls._slices(
            max_draft,
            len(inputs.draft_limits),
            inputs.num_non_draft_tokens,
            inputs.num_emit,
            inputs.fixed_ms,
            draft,
            verify,
        )

    @classmethod
    def of_verification(
        cls, inputs: VerifyInputs, draft: LatencyTable, verify: LatencyTable
    ) -> Prices:
        """Prices of B = 0..D for a draft that was launched with `num_drafted_reqs` anchors."""
        return cls._slices(
            inputs.draft_budget,
            inputs.num_drafted_reqs,
            inputs.num_non_draft_tokens,
            inputs.num_emit,
            inputs.fixed_ms,
            draft,
            verify,
        )

    @classmethod
    def _slices(
        cls,
        max_draft: int,
        anchors: int,
        non_draft: int,
        num_emit: int,
        fixed_ms: float,
        draft: LatencyTable,
        verify: LatencyTable,
    ) -> Prices:
        if non_draft < 1 and max_draft:
            raise ValueError(
                f"num_non_draft_tokens must be >= 1 in a step that drafts, got {non_draft}: "
                "every decoding request verifies its anchor"
            )
        return cls(
            draft.dense(anchors + max_draft)[anchors : anchors + max_draft + 1],
            verify.dense(non_draft + max_draft)[non_draft : non_draft + max_draft + 1],
            num_emit,
            fixed_ms,
        )

    def draft_price(self, draft_budget: int) -> float:
        """`draft_ms[draft_budget]`."""
        return float(self.draft_table[draft_budget]) if draft_budget else 0.0

    def candidate(self, draft_budget: int, verify_budget: int, gain: float) -> Candidate:
        """The priced plan that expects `gain` accepted tokens beyond the guaranteed ones."""
        draft_ms = self.draft_price(draft_budget)
        verify_ms = float(self.verify_table[verify_budget]) + self.verify_extra_ms
        return Candidate(
            Plan(draft_budget, verify_budget), self.num_emit + gain, draft_ms + verify_ms, draft_ms
        )
