"""The records `pack` takes. The long-lived ones are checked once, when they are built."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from forespark.triton_kernels.checks import check_tensor

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PackLayout:
    """Constants of one engine."""

    mask_token_id: int  # what a drafted position reads
    block_size: int  # tokens per KV block of the drafter
    num_speculative_tokens: int  # K
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    pad_slot_id: int = -1  # a slot that attention never writes


@dataclass(frozen=True)
class EngineBuffers:
    """Persistent buffers that the engine owns and a captured drafter reads."""

    input_ids: torch.Tensor  # i32 [max_num_tokens]
    positions: torch.Tensor  # i64 [max_num_tokens]
    query_start_loc: torch.Tensor  # i32 [max_num_reqs + 1]
    seq_lens: torch.Tensor  # i32 [max_num_reqs]
    slot_mapping: torch.Tensor  # i64 [max_num_tokens]

    def __post_init__(self) -> None:
        device, tokens = self.input_ids.device, self.input_ids.shape[:1]
        reqs = self.seq_lens.shape[0]
        check_tensor("pack", "input_ids", self.input_ids, torch.int32, (-1,), device)
        check_tensor("pack", "positions", self.positions, torch.int64, tokens, device)
        check_tensor("pack", "slot_mapping", self.slot_mapping, torch.int64, tokens, device)
        check_tensor("pack", "seq_lens", self.seq_lens, torch.int32, (-1,), device)
        start_loc = self.query_start_loc
        check_tensor("pack", "query_start_loc", start_loc, torch.int32, (reqs + 1,), device)


@dataclass(frozen=True)
class PackBuffers:
    """Persistent outputs beside the engine's own; M = max_num_reqs, T = max_num_tokens."""

    context_positions: torch.Tensor  # i64 [T]
    context_slot_mapping: torch.Tensor  # i64 [T]
    row_offset: torch.Tensor  # i32 [T]: 0..d_i in each packed row, 0 past the packed batch
    sample_row: torch.Tensor  # i64 [M K]: packed row of each drafted position, 0 past the end
    sample_slot: torch.Tensor  # i64 [M K]: request slot, -1 past the end
    sample_step: torch.Tensor  # i32 [M K]: 0..d_i - 1, 0 past the end
    sample_pos: torch.Tensor  # i64 [M K]: position of the predicted token, 0 past the end
    sample_start: torch.Tensor  # i32 [M + 1]: exclusive scan of d_i, the total from n on
    temperature: torch.Tensor  # f32 [M], by request slot
    seeds: torch.Tensor  # i64 [M], by request slot

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        max_num_tokens: int,
        num_speculative_tokens: int,
        device: torch.device | str,
        pad_slot_id: int = -1,
    ) -> PackBuffers:
        """Buffers in the state of an empty batch, safe for a graph capture before any `pack`."""
        samples = max_num_reqs * num_speculative_tokens

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            context_positions=zeros(max_num_tokens, torch.int64),
            context_slot_mapping=zeros(max_num_tokens, torch.int64).fill_(pad_slot_id),
            row_offset=zeros(max_num_tokens, torch.int32),
            sample_row=zeros(samples, torch.int64),
            sample_slot=zeros(samples, torch.int64).fill_(-1),
            sample_step=zeros(samples, torch.int32),
            sample_pos=zeros(samples, torch.int64),
            sample_start=zeros(max_num_reqs + 1, torch.int32),
            temperature=zeros(max_num_reqs, torch.float32),
            seeds=zeros(max_num_reqs, torch.int64),
        )

    def __post_init__(self) -> None:
        device = self.row_offset.device
        tokens, samples = self.row_offset.shape[:1], self.sample_row.shape[:1]
        reqs = self.temperature.shape[0]
        for name, dtype, shape in (
            ("context_positions", torch.int64, tokens),
            ("context_slot_mapping", torch.int64, tokens),
            ("row_offset", torch.int32, (-1,)),
            ("sample_row", torch.int64, (-1,)),
            ("sample_slot", torch.int64, samples),
            ("sample_step", torch.int32, samples),
            ("sample_pos", torch.int64, samples),
            ("sample_start", torch.int32, (reqs + 1,)),
            ("temperature", torch.float32, (-1,)),
            ("seeds", torch.int64, (reqs,)),
        ):
            check_tensor("pack", f"buffer {name}", getattr(self, name), dtype, shape, device)


@dataclass(frozen=True)
class PackInputs:
    """The target batch that was just verified. Rows of request i: query_start_loc[i] .. [i + 1]."""

    positions: torch.Tensor  # i64 [>= tokens]
    query_start_loc: torch.Tensor  # i32 [>= n + 1]
    idx_mapping: torch.Tensor  # i32 [>= n]: batch index -> request slot
    num_sampled: torch.Tensor  # i32 [>= n]: 0 while a prompt is still being prefilled
    num_rejected: torch.Tensor  # i32 [>= n]: trailing rows of the request that were rejected
    last_sampled: torch.Tensor  # integer [slots]
    next_prefill_tokens: torch.Tensor  # integer [slots]
    temperature: torch.Tensor  # f32 [slots]
    seeds: torch.Tensor  # i64 [slots]
    block_table: torch.Tensor  # i32 [>= n, max_blocks], by batch index; block 0 is the null block

    def __post_init__(self) -> None:
        device = self.positions.device
        for name, dtype in (
            ("positions", torch.int64),
            ("query_start_loc", torch.int32),
            ("idx_mapping", torch.int32),
            ("num_sampled", torch.int32),
            ("num_rejected", torch.int32),
            ("last_sampled", INTEGERS),
            ("next_prefill_tokens", INTEGERS),
            ("temperature", torch.float32),
            ("seeds", torch.int64),
        ):
            check_tensor("pack", name, getattr(self, name), dtype, (-1,), device)
        check_tensor(
            "pack", "block_table", self.block_table, torch.int32, (-1, -1), device, contiguous=False
        )

    def check_rows(self, num_reqs: int) -> None:
        """Raise ValueError when an input has fewer rows than the batch."""
        for name, want in (
            ("query_start_loc", num_reqs + 1),
            ("idx_mapping", num_reqs),
            ("num_sampled", num_reqs),
            ("num_rejected", num_reqs),
            ("block_table", num_reqs),
        ):
            got = getattr(self, name).shape[0]
            if got < want:
                raise ValueError(f"pack: {name} has {got} rows; {num_reqs} requests need {want}")
