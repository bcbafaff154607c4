"""`policy: full`: vLLM's own DFlash2 drafting and verification, with ForeSpark's counters."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from forespark.drafter.feedback import Feedback
from forespark.drafter.full_record import FullBlockRecords
from forespark.drafter.ranks import Ranks


class FullBlockSpeculator(DFlash2Speculator):
    """Nothing of the drafting changes: `propose` is upstream's."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.ranks = Ranks(get_tp_group())
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
        self._records = FullBlockRecords(self.num_speculative_steps)

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens: torch.Tensor = super().propose(input_batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return tokens
        self.ranks.follow(tokens)
        if self.feedback.observer is None:
            return tokens
        self.take_in()
        num_reqs = input_batch.num_reqs
        num_sampled, num_rejected = args[4], args[5]
        lengths = self._lengths[:num_reqs] * (num_sampled > 0)
        self.feedback.send(
            self._records.next(input_batch),
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
