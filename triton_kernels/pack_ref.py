"""Specification of `pack` in plain torch, and what CPU tensors run (no loop over requests)."""

from __future__ import annotations

import torch
from forespark.triton_kernels.pack_types import EngineBuffers, PackBuffers, PackInputs, PackLayout


def pack_ref(
    inputs: PackInputs,
    draft_lens: torch.Tensor,  # i32 [n], clipped to 0..K
    engine: EngineBuffers,
    out: PackBuffers,
    layout: PackLayout,
) -> None:
    """Write the packed drafter batch to `engine` and `out`; see `pack` for each output."""
    num_reqs = draft_lens.shape[0]
    reqs = torch.arange(num_reqs, device=draft_lens.device)
    lens = draft_lens.clamp(0, layout.num_speculative_tokens).long()
    drafted = lens.cumsum(0)
    query_end = drafted + reqs + 1
    total = int(lens.sum())
    num_rows = total + num_reqs
    bounds = inputs.query_start_loc[: num_reqs + 1].long()
    valid_end = bounds[1:] - inputs.num_rejected[:num_reqs]
    slots = inputs.idx_mapping[:num_reqs].long()
    first_pos = inputs.positions[(valid_end - 1).maximum(bounds[:-1])] + 1

    # Tails: whole buffers are filled first, which is cheaper than a slice of each
    engine.slot_mapping.fill_(layout.pad_slot_id)
    engine.query_start_loc.fill_(num_rows)
    engine.seq_lens.zero_()
    out.sample_start.fill_(total)
    out.sample_slot.fill_(-1)
    for zeroed in (out.row_offset, out.sample_row, out.sample_step, out.sample_pos):
        zeroed.zero_()

    # Packed rows
    owner = reqs.repeat_interleave(lens + 1)
    row_start = query_end - lens - 1
    rows = torch.arange(num_rows, device=reqs.device)
    offset = rows - row_start.index_select(0, owner)
    pos = first_pos.index_select(0, owner) + offset
    anchor = torch.where(
        inputs.num_sampled[:num_reqs] > 0,
        inputs.last_sampled.index_select(0, slots),
        inputs.next_prefill_tokens.index_select(0, slots),
    )
    engine.input_ids[:num_rows] = layout.mask_token_id
    engine.input_ids[row_start] = anchor.to(torch.int32)
    engine.positions[:num_rows] = pos.clamp(max=layout.max_model_len - 1)
    fits = pos < layout.max_model_len
    engine.slot_mapping[:num_rows] = _slot_of(inputs, layout, owner, pos, fits)
    out.row_offset[:num_rows] = offset

    # Per request
    engine.query_start_loc[:num_reqs] = row_start
    out.sample_start[:num_reqs] = drafted - lens
    engine.seq_lens[:num_reqs] = (first_pos + lens + 1).clamp(max=layout.max_model_len)
    out.temperature[slots] = inputs.temperature.index_select(0, slots)
    out.seeds[slots] = inputs.seeds.index_select(0, slots)

    # One entry per drafted position, in packed order
    sampled = (offset > 0).nonzero().flatten()
    out.sample_row[:total] = sampled
    out.sample_slot[:total] = slots.index_select(0, owner.index_select(0, sampled))
    out.sample_step[:total] = offset.index_select(0, sampled) - 1
    out.sample_pos[:total] = pos.index_select(0, sampled)

    # Context rows keep the target batch's places; the rejected ones write no KV
    owner = reqs.repeat_interleave(bounds.diff())
    begin, end = int(bounds[0]), int(bounds[-1])
    valid = torch.arange(begin, end, device=reqs.device) < valid_end.index_select(0, owner)
    pos = inputs.positions[begin:end].where(valid, 0)
    out.context_positions[begin:end] = pos
    out.context_slot_mapping[begin:end] = _slot_of(inputs, layout, owner, pos, valid)


def _slot_of(
    inputs: PackInputs,
    layout: PackLayout,
    owner: torch.Tensor,  # i64 [rows]: batch index
    pos: torch.Tensor,  # i64 [rows]
    valid: torch.Tensor,  # bool [rows]
) -> torch.Tensor:
    """i64 [rows]: KV slot of each position, the pad slot where invalid or in the null block."""
    column = (pos // layout.block_size).clamp(max=inputs.block_table.shape[1] - 1)
    block = inputs.block_table[owner, column].long()
    slot = block * layout.block_size + pos % layout.block_size
    return slot.where(valid & (block != 0), layout.pad_slot_id)
