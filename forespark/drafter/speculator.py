"""The variable-length DFlash2 speculator: estimate -> schedule -> draft, in one `propose`.

Draft lengths live on the device. vLLM's scheduler keeps believing in K drafts per request: columns
past a draft hold -1, the slot's drafted count bounds what can be verified, and whatever is not
verified counts as rejected, on the host and on the device alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator

from forespark.config import ForeSparkConfig
from forespark.core import IntArray
from forespark.drafter.batch import pack_batch
from forespark.drafter.checkpoint import device_estimators
from forespark.drafter.estimate import DeviceEstimators
from forespark.drafter.feedback import Feedback, step_shapes
from forespark.drafter.full_record import FullBlockRecords
from forespark.drafter.graphs import BucketGraphs, DrafterGraphs, capturable_rows
from forespark.drafter.heads import DraftHeads
from forespark.drafter.packed_conv import use_packed_convolutions
from forespark.drafter.planner import DraftRecord, StepPlanner
from forespark.drafter.ranks import Ranks
from forespark.estimators.numbers import check_estimates, check_weights
from forespark.scheduler.policies import ScoreSource
from forespark.scheduler.split import even_split
from forespark.triton_kernels.pack_types import PackBuffers
from forespark.triton_kernels.rank import rank


class ForeSparkSpeculator(DFlash2Speculator):
    """DFlash2 whose drafts are exactly as long as the scheduler decided."""

    _speculator_name = "ForeSpark"

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, config: ForeSparkConfig
    ) -> None:
        super().__init__(vllm_config, device)
        self.config = config
        self.ranks = Ranks(get_tp_group())
        # The post-draft estimator replaces vLLM's online one.
        self.use_acceptance_estimator = False
        self.planner: StepPlanner | None = None  # set once the step costs are known
        # T_draft and T_verify, where the plan needs them
        self.prices: tuple[Any, Any] = (None, None)
        self.pricing_s: float | None = None  # seconds that measuring or loading them took
        self.estimators: DeviceEstimators | None = None
        reqs, steps = self.max_num_reqs, self.num_speculative_steps
        self.draft_lens = torch.zeros(reqs, dtype=torch.int32, device=device)  # by batch index
        self.slot_draft_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self.slot_scores = torch.zeros(reqs, steps, device=device)  # g, by request slot
        self.slot_survival = torch.zeros(reqs, steps, device=device)  # S~, by request slot
        self._scores = torch.zeros(reqs, steps, device=device)
        self._since_ms = torch.zeros(1, device=device)  # rank 0's, beside other ranks
        self._columns = torch.arange(steps, device=device)
        self.packed = PackBuffers.allocate(
            reqs, self.max_num_tokens, steps, device, pad_slot_id=PAD_SLOT_ID
        )
        self.heads = DraftHeads(self, self.packed)
        # vLLM's memory profiling finds and drops graph managers among these attributes.
        self.context_graphs: BucketGraphs | None = None
        self.backbone_graphs: BucketGraphs | None = None
        self.head_graphs: BucketGraphs | None = None
        self.graphs = DrafterGraphs(self)
        self.host_split = False  # whether the host decides lengths (verifier.lengths)
        self.packed_lens: IntArray | None = None  # d_i [n] of this step, if it does
        self.feedback = Feedback(step_shapes(reqs, steps, self.ranks.several), device)
        # Without asynchronous scheduling the host has seen the step's results before it schedules
        # the next one, so reading d_i as well costs nothing.
        self.reads_lengths = device.type == "cpu"
        self._full_records = FullBlockRecords(steps)  # while nothing is planned
        self.profile_draft: int | None = None  # D of a timed dummy draft; see verifier.profile
        self.profile_spreads: list[float] = []  # of its repeats, size by size
        self.mark: Callable[[str], object] = str  # told which stage begins; benchmarks.stages

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        if not use_packed_convolutions(model, self.packed.row_offset):
            raise ValueError(
                f"model: {self.draft_model_config.model} has no grouped convolution, so it is not "
                "a DFlash2 drafter; use a DFlash2 checkpoint, or vLLM's own method for this one"
            )
        self.estimators = device_estimators(self.config, self.draft_model_config, model, self)
        self.heads.estimators = self.estimators
        check_weights(self._weights(model), self.draft_model_config.model)
        return model

    def _weights(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        yield from model.named_parameters()
        if self.estimators is not None:
            yield from self.estimators.named_parameters()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(CUDAGraphMode.NONE)  # no graphs of full blocks
        self.graphs.fresh(capturable_rows(self, cudagraph_mode))

    def capture(self) -> None:
        """The packed drafter's graphs; vLLM calls this with the target's graphs in place."""
        self.graphs.capture()

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        timed = dummy_run and self.profile_draft is not None
        if dummy_run and not timed:
            return super().propose(
                input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
                num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds,
                dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs, is_profile,
                num_speculative_tokens,
            )  # fmt: skip
        num_reqs, num_tokens = input_batch.num_reqs, input_batch.num_tokens
        # schedule (host): D from last step's scores
        record, drafted = (None, 0) if timed else self._schedule(input_batch)
        self.packed_lens = None if record is None else record.lens
        slots = input_batch.idx_mapping
        # estimate: context features of every row, scores at the anchors
        assert aux_hidden_states is not None
        features = self.model.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
        self.hidden_states[:num_tokens].copy_(features[:num_tokens])
        anchors = torch.where(
            num_sampled > 0,
            last_sampled.flatten()[slots].long(),
            next_prefill_tokens.view(-1, self.max_num_reqs)[0][slots].long(),
        )
        draft_lens = self.draft_lens[:num_reqs]
        if timed:
            drafted = self.profile_draft or 0
            async_tensor_h2d(even_split(drafted, num_reqs), out=draft_lens)
        elif record is None:
            # Before prices exist (warm-up), full blocks: every column must hold a token.
            drafted = num_reqs * self.num_speculative_steps
            draft_lens.fill_(self.num_speculative_steps)
        else:
            self._split(record, input_batch, num_rejected, anchors, draft_lens)
        # draft: exactly these lengths, nothing padded
        self.mark("pack")
        for group in pack_batch(
            self, self.packed, input_batch, num_sampled, num_rejected, last_sampled,
            next_prefill_tokens, temperature, seeds, draft_lens,
        ):  # fmt: skip
            if timed:
                # Dummy block tables are placeholders: write no keys or values.
                self.block_tables.slot_mappings[self.draft_kv_cache_group_ids[group]].fill_(
                    PAD_SLOT_ID
                )
                self.packed.context_slot_mapping.fill_(PAD_SLOT_ID)
            self._context_slot_mappings[group].copy_(self.packed.context_slot_mapping)
        self.context_positions.copy_(self.packed.context_positions)
        # The drafter's context keys and values exist for every accepted row, drafted from or not.
        self.mark("draft")
        self.graphs.context(num_tokens)
        tokens = self.draft_tokens[:num_reqs]
        if drafted:
            self._draft(input_batch, drafted)
            tokens.masked_fill_(self._columns >= draft_lens[:, None], -1)
        else:
            tokens.fill_(-1)
            self.heads.post_logits(num_reqs).fill_(0.0)
        self.mark("post_draft")
        if not timed:
            if record is None and self.feedback.observer is not None:
                record = self._full_records.next(input_batch)
                draft_lens.mul_(num_sampled > 0)
            self._publish(record, slots, draft_lens, drafted, num_sampled, num_rejected)
        return tokens

    def take_in(self) -> None:
        """Give the planner what the device sent last; also called when the engine goes idle."""
        arrived = self.feedback.receive()
        if arrived is None or self.planner is None:
            return
        ticket, arrays = arrived.context.ticket, arrived.arrays
        check_estimates(arrays, self._weights(self.model))
        arrays = self.planner.corrected(arrived.context, arrays)
        self.planner.publish(ScoreSource.PRE_DRAFT, arrays["scores"], ticket)
        self.planner.publish(ScoreSource.SINGLE_CURVE, arrays["scores"], ticket)
        self.planner.publish(ScoreSource.POST_DRAFT, arrays["survival"], ticket)
        self.planner.learn_selection(arrived.context, arrays)
        if self.ranks.several:
            self.planner.learn_cost(arrived.context, float(arrays["since_ms"][0]))

    def _schedule(self, input_batch: InputBatch) -> tuple[DraftRecord | None, int]:
        """Take in last step's measurements, then plan this one."""
        self.take_in()
        if self.planner is None:
            return None, 0
        drafts = input_batch.num_draft_tokens_per_req
        scheduled = input_batch.num_scheduled_tokens
        drafts = np.zeros_like(scheduled) if drafts is None else drafts
        computed = input_batch.num_computed_tokens_np
        record = self.planner.plan(
            input_batch.req_ids,
            input_batch.idx_mapping_np,
            computed,
            scheduled,
            drafts,
            computed + scheduled - drafts >= input_batch.prefill_len_np,
        )
        return record, record.drafted

    def _split(
        self,
        record: DraftRecord,
        input_batch: InputBatch,
        num_rejected: torch.Tensor,
        anchors: torch.Tensor,
        draft_lens: torch.Tensor,
    ) -> None:
        """D over the requests by their current scores, on the device (or as the host split it)."""
        num_reqs = input_batch.num_reqs
        limits = async_tensor_h2d(record.limits, device=self.device, dtype=torch.int32)
        scores = self._scores[:num_reqs]
        if self.estimators is None:
            scores.zero_()
        else:
            last_row = input_batch.query_start_loc[1 : num_reqs + 1] - num_rejected - 1
            self.estimators.scores(
                self.hidden_states[last_row], anchors, limits, scores, mark=self.mark
            )
        if self.ranks.several:
            self._since_ms.fill_(record.since_ms)
            self.ranks.follow(scores, self._since_ms)
        self.mark("split")
        slots = input_batch.idx_mapping
        self.slot_scores[slots] = scores
        if record.lens is not None:
            async_tensor_h2d(record.lens, out=draft_lens)  # the host split: nothing to rank
        elif record.drafted == int(record.limits.sum()):
            draft_lens.copy_(limits)  # everything eligible: nothing to rank
        elif record.drafted == 0:
            draft_lens.zero_()
        else:
            rank(
                scores, limits, record.drafted, draft_lens, slots.to(torch.int32),
                self.config.scheduler.min_draft_len,
            )  # fmt: skip

    def run_packed(
        self,
        rows: int,
        attention: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The backbone's outputs [rows, H] for the packed rows in the input buffers."""
        if slot_mappings is None:
            slot_mappings = build_slot_mappings_by_layer(
                self.block_tables.slot_mappings[:, :rows], self.kv_cache_config
            )
        return self._run_model(rows, attention, slot_mappings, None)

    def _draft(self, input_batch: InputBatch, drafted: int) -> None:
        """Backbone on D + n packed rows, heads on the D drafted ones."""
        num_reqs = input_batch.num_reqs
        longest = int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        self.draft_max_seq_len = min(longest + self.num_query_per_req, self.max_model_len)
        hidden = self.graphs.backbone(input_batch, drafted + num_reqs)
        self.graphs.heads(hidden, drafted, num_reqs)

    def _publish(
        self,
        record: DraftRecord | None,
        slots: torch.Tensor,
        draft_lens: torch.Tensor,
        drafted: int,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        """Keep lengths and S~ by request slot for the verifier; start their copy to the host."""
        num_reqs = slots.shape[0]
        tokens = self.draft_tokens[:num_reqs]
        self.slot_draft_lens[slots] = draft_lens
        if self.estimators is not None:
            survival = self.estimators.post_survival(self.heads.post_logits(num_reqs), draft_lens)
            if drafted:
                self.ranks.follow(tokens, survival)
            self.slot_survival[slots] = survival
        elif drafted:
            self.ranks.follow(tokens)
        if record is None:
            return
        if self.reads_lengths and record.exact_lens is None:
            lengths = draft_lens.tolist()
            record.exact_lens = dict(zip(record.req_ids, lengths, strict=True))
        self.feedback.send(
            record,
            {
                "scores": self.slot_scores,
                "survival": self.slot_survival,
                "draft_lens": draft_lens,
                "num_sampled": num_sampled,
                "num_rejected": num_rejected,
                **({"since_ms": self._since_ms} if self.ranks.several else {}),
            },
        )
