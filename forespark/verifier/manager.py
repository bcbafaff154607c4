"""The budget distributor over vLLM's adaptive-verification hooks: which drafts are verified.

vLLM asks for the step's token count before it prepares the batch (`get_num_tokens`), compacts the
host's view to it, and lets the device decide who gets what (`reallocate_drafts`). Here the budget
comes from the policy's re-plan, and the device ranks the post-draft survival of the tokens that
were really drafted. With the host split the compacted view is exact: the host has decided who gets
what (`drafter.host_split`), and the device is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from forespark.core import IntArray
from forespark.drafter.speculator import ForeSparkSpeculator
from forespark.triton_kernels.rank import rank


class ForeSparkManager(AdaptiveVerificationManager):
    """Takes the place of the stock manager, which checks backends and graphs for the device's use.

    Without a stock manager vLLM keeps graphs of equal lengths; only the host split works then.
    """

    def __init__(self, runner: Any, speculator: ForeSparkSpeculator) -> None:
        super().__init__(
            runner.req_states,
            runner.input_buffers.query_start_loc,
            runner.model_state.num_new_sampled_tokens_per_step,
            max_total_logits=get_max_chunk_logits(runner.vocab_size),
        )
        self.speculator = speculator
        self.captured_sizes: list[int] = []
        reqs = self.req_states.max_num_reqs
        device = self.req_states.device
        self._survival = torch.empty(
            reqs, self.num_speculative_steps, dtype=torch.float32, device=device
        )
        self._verify_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self._host_lens: IntArray | None = None  # b_i [n] in batch order, if the host decides

    def add_request(self, req_idx: int) -> None:
        """A new or resumed request: nothing was drafted for it, whatever its slot held before."""
        self.speculator.slot_draft_lens[req_idx : req_idx + 1].zero_()
        if self.speculator.planner is not None:
            max_seq_len = int(self.req_states.max_seq_len[req_idx])
            self.speculator.planner.admit(req_idx, max_seq_len, enabled=True)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Nothing here: prices are measured once the engine is warm (`profile.py`)."""
        self.captured_sizes = list(capture_sizes)
        return iter(())

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """Stock curves price drafting by request count; ours come from `profile.py`."""

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """The speculator keeps its own estimates by request slot."""

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Tokens of the step: N plus the B that the policy re-plans for it."""
        req_ids = list(num_tokens_per_req)
        states = self.req_states
        scheduled = np.array([len(draft_tokens.get(r, ())) for r in req_ids], dtype=np.int32)
        plain = np.array(list(num_tokens_per_req.values()), dtype=np.int32) - scheduled
        slots = np.array([states.req_id_to_index[r] for r in req_ids], dtype=np.int64)
        sampling = states.num_computed_tokens_np[slots] + plain >= states.prefill_len.np[slots]
        total_plain = int(plain.sum())
        room = max(0, self._max_total_logits - len(req_ids) * self.num_bonus_tokens)
        budget = 0
        if self.speculator.planner is not None:
            decision = self.speculator.planner.replan(
                req_ids, slots, scheduled, total_plain, int(sampling.sum()), room
            )
            budget = decision.plan.verify_budget
        self._host_lens = None
        if self.speculator.host_split:
            lens = self._decide(slots, scheduled, budget)
            batch = sort_batch_req_ids(
                num_tokens_per_req,
                draft_tokens,
                self.num_speculative_steps + self.num_bonus_tokens,
            )
            by_req = dict(zip(req_ids, lens.tolist(), strict=True))
            self._host_lens = np.array([by_req[r] for r in batch], dtype=np.int32)
        self._batch_budget = (
            dict(zip(req_ids, scheduled.tolist(), strict=True)),
            dict(zip(req_ids, plain.tolist(), strict=True)),
            budget,
        )
        return total_plain + budget

    def _decide(self, slots: IntArray, scheduled: IntArray, budget: int) -> IntArray:
        planner = self.speculator.planner
        if planner is None:
            return np.zeros(len(slots), dtype=np.int32)
        return planner.verify_lens(slots, scheduled, budget)

    def compact_batch(
        self,
        num_draft_tokens_per_req: IntArray,  # [n] as scheduled
        num_scheduled_tokens: IntArray,  # [n] drafts included
        cu_num_logits_np: IntArray,  # [n + 1]
    ) -> tuple[IntArray, IntArray]:
        """The host's (token counts, offsets of logits): exact if it decided them, else a bound."""
        if self._host_lens is None:
            compacted: tuple[IntArray, IntArray] = super().compact_batch(
                num_draft_tokens_per_req, num_scheduled_tokens, cu_num_logits_np
            )
            return compacted
        exact = np.zeros_like(cu_num_logits_np)
        np.cumsum(self._host_lens + self.num_bonus_tokens, out=exact[1:])
        return num_scheduled_tokens - num_draft_tokens_per_req + self._host_lens, exact

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Give the B best surviving tokens of the batch their place, as a prefix of each draft.

        With the host split these are the host's lengths, unchanged.
        """
        batch_budget, self._batch_budget = self._batch_budget, None
        assert batch_budget is not None
        drafts_of, plain_of, budget = batch_budget
        num_reqs = idx_mapping.shape[0]
        scheduled = np.array([drafts_of[r] for r in req_ids], dtype=np.int32)
        plain = np.array([plain_of[r] for r in req_ids], dtype=np.int32)
        capacities = self._batch_draft_capacity[:num_reqs]
        lengths = self._verify_lens[:num_reqs]
        if self._host_lens is not None:
            async_tensor_h2d(self._host_lens, out=lengths)
        elif budget:
            async_tensor_h2d(scheduled, out=capacities)
            # Only what was drafted can be verified: a column past it holds no token.
            drafted = self.speculator.slot_draft_lens[idx_mapping]
            torch.minimum(capacities, drafted, out=capacities)
            survival = self._survival[:num_reqs]
            torch.index_select(self.speculator.slot_survival, 0, idx_mapping, out=survival)
            rank(survival, capacities, budget, lengths, idx_mapping.to(torch.int32))
        else:
            lengths.zero_()
        plain_gpu = self._num_non_draft_tokens[:num_reqs]
        async_tensor_h2d(plain, out=plain_gpu)
        self._cu_num_logits[:1].zero_()
        torch.cumsum(
            lengths + self.num_bonus_tokens, dim=0, out=self._cu_num_logits[1 : num_reqs + 1]
        )
        self.query_start_loc[:1].zero_()
        torch.cumsum(lengths + plain_gpu, dim=0, out=self.query_start_loc[1 : num_reqs + 1])
        self.query_start_loc[num_reqs + 1 :].fill_(int(plain.sum()) + budget)
        return self._cu_num_logits[: num_reqs + 1], self.query_start_loc, budget
