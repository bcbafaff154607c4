"""What every budget of one step costs, as two slices of the latency tables."""

from __future__ import annotations

from dataclasses import dataclass

from forespark.core import Candidate, FloatArray, LatencyTable, Plan, StepInputs, VerifyInputs


@dataclass(frozen=True)
class Prices:
    """Milliseconds by budget: `draft_ms[D]` (0 for D = 0: nothing is launched), `verify_ms[B]`."""

    draft_ms: FloatArray  # float64 [>= D_max + 1], never decreasing
    verify_ms: FloatArray  # float64 [>= D_max + 1], never decreasing; with the step's fixed cost
    num_emit: int

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
        draft_ms = draft.dense(anchors + max_draft)[anchors : anchors + max_draft + 1].copy()
        draft_ms[0] = 0.0
        verify_ms = verify.dense(non_draft + max_draft)[non_draft : non_draft + max_draft + 1]
        return cls(draft_ms, verify_ms + fixed_ms, num_emit)

    def candidate(self, draft_budget: int, verify_budget: int, gain: float) -> Candidate:
        """The priced plan that expects `gain` accepted tokens beyond the guaranteed ones."""
        draft_ms = float(self.draft_ms[draft_budget])
        return Candidate(
            Plan(draft_budget, verify_budget),
            self.num_emit + gain,
            draft_ms + float(self.verify_ms[verify_budget]),
            draft_ms,
        )
