"""`policy: full`: vLLM's own DFlash2 drafting and verification, with ForeSpark's counters."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from forespark.core import Candidate, Decision, Plan
from forespark.drafter.feedback import Feedback
from forespark.drafter.planner import DraftRecord
from forespark.estimators.stale import CopyTicket


class FullBlockSpeculator(DFlash2Speculator):
    """Nothing of the drafting changes: `propose` is upstream's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.feedback = Feedback(
            {
                name: ((self.max_num_reqs,), torch.int32)
                for name in ("draft_lens", "num_sampled", "num_rejected")
            },
            device,
        )
        self._lengths = torch.full(
            (self.max_num_reqs,), self.num_speculative_steps, dtype=torch.int32, device=device
        )
        self._drafts = 0

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens: torch.Tensor = super().propose(input_batch, *args, **kwargs)
        if self.feedback.observer is None or kwargs.get("dummy_run"):
            return tokens
        self.take_in()
        num_reqs = input_batch.num_reqs
        num_sampled, num_rejected = args[4], args[5]
        lengths = self._lengths[:num_reqs] * (num_sampled > 0)
        self.feedback.send(
            self._record(input_batch),
            {
                "draft_lens": lengths.to(torch.int32),
                "num_sampled": num_sampled,
                "num_rejected": num_rejected,
            },
        )
        return tokens

    def take_in(self) -> None:
        """Count what the device sent last; also called when the engine goes idle."""
        self.feedback.receive()

    def _record(self, input_batch: Any) -> DraftRecord:
        num_reqs, steps = input_batch.num_reqs, self.num_speculative_steps
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
            CopyTicket(slots, slots), self._drafts, time.perf_counter(),
        )  # fmt: skip
