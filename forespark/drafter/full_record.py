"""Records of steps that draft a full block for everyone: nothing was planned, yet it is counted."""

from __future__ import annotations

from typing import Any

import numpy as np

from forespark.core import Candidate, Decision, Plan
from forespark.drafter.planner import DraftRecord
from forespark.estimators.stale import CopyTicket


class FullBlockRecords:
    """Numbers the drafts of one worker, so that the observer sees which of them follow directly."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._drafts = 0

    def next(self, input_batch: Any) -> DraftRecord:
        """K tokens for each request of vLLM's `input_batch` that samples in this step."""
        num_reqs, steps = input_batch.num_reqs, self.num_speculative_tokens
        computed = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        limits = np.where(computed >= input_batch.prefill_len_np, steps, 0)
        total = int(limits.sum())
        decision = Decision(
            "full",
            Candidate(Plan(total, total), float(num_reqs), float("nan"), float("nan")),
            num_reqs=num_reqs,
            num_non_draft_tokens=num_reqs,
        )
        self._drafts += 1
        slots = input_batch.idx_mapping_np
        return DraftRecord(
            list(input_batch.req_ids), slots, limits, decision, total,
            CopyTicket(slots, slots), self._drafts,
        )  # fmt: skip
