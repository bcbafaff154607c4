"""Variable-length drafter inputs in one launch: no row of a shorter draft is padded to K.

Request i gets d_i + 1 packed rows (its anchor, then d_i mask tokens). Programs 0..n - 1 of the
first grid axis write one request each and find their place by summing the draft lengths before
them; the second axis covers long context spans. The programs after those fill the tails of the
persistent buffers, so that a captured graph never replays rows of an earlier, larger batch.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import next_power_of_2, tl, triton
from forespark.triton_kernels.checks import check_tensor, runs_on_gpu
from forespark.triton_kernels.pack_ref import pack_ref
from forespark.triton_kernels.pack_types import EngineBuffers, PackBuffers, PackInputs, PackLayout

MAX_REQS = 2048
PAD_BLOCK = 1024


@triton.jit
def _slot_of(
    block_table_ptr, row_start, pos, valid, max_blocks, BLOCK_SIZE: tl.constexpr, PAD: tl.constexpr
):
    column = tl.minimum(pos // BLOCK_SIZE, max_blocks - 1)
    block = tl.load(block_table_ptr + row_start + column, mask=valid, other=0).to(tl.int64)
    return tl.where(valid & (block != 0), block * BLOCK_SIZE + pos % BLOCK_SIZE, PAD)


@triton.jit(do_not_specialize=["num_reqs"])
def _pack_kernel(
    draft_lens_ptr,
    # the target batch
    positions_ptr,
    query_start_loc_ptr,
    idx_mapping_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    last_sampled_ptr,
    next_prefill_ptr,
    temperature_ptr,
    seeds_ptr,
    block_table_ptr,
    # the engine's buffers
    out_input_ids_ptr,
    out_positions_ptr,
    out_start_loc_ptr,
    out_seq_lens_ptr,
    out_slots_ptr,
    # ours
    context_pos_ptr,
    context_slots_ptr,
    row_offset_ptr,
    sample_row_ptr,
    sample_slot_ptr,
    sample_step_ptr,
    sample_pos_ptr,
    sample_start_ptr,
    out_temperature_ptr,
    out_seeds_ptr,
    num_reqs,
    table_stride,
    max_blocks,
    mask_token_id,
    max_num_reqs,
    max_num_tokens,
    max_model_len,
    STEPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD_BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    part = tl.program_id(1)
    every = tl.arange(0, BLOCK_REQS)
    lens = tl.load(draft_lens_ptr + every, mask=every < num_reqs, other=0)
    lens = tl.minimum(tl.maximum(lens, 0), STEPS)

    if req >= num_reqs:
        if part == 0:
            total = tl.sum(lens, axis=0)
            num_rows = total + num_reqs
            at = (req - num_reqs) * PAD_BLOCK + tl.arange(0, PAD_BLOCK)
            tail = (at >= num_rows) & (at < max_num_tokens)
            tl.store(out_slots_ptr + at, PAD, mask=tail)
            tl.store(row_offset_ptr + at, 0, mask=tail)
            tail = (at >= total) & (at < max_num_reqs * STEPS)
            tl.store(sample_row_ptr + at, 0, mask=tail)
            tl.store(sample_slot_ptr + at, -1, mask=tail)
            tl.store(sample_step_ptr + at, 0, mask=tail)
            tl.store(sample_pos_ptr + at, 0, mask=tail)
            tail = (at >= num_reqs) & (at <= max_num_reqs)
            tl.store(out_start_loc_ptr + at, num_rows, mask=tail)
            tl.store(sample_start_ptr + at, total, mask=tail)
            tl.store(out_seq_lens_ptr + at, 0, mask=tail & (at < max_num_reqs))
    else:
        before = tl.sum(tl.where(every < req, lens, 0), axis=0)
        draft_len = tl.sum(tl.where(every == req, lens, 0), axis=0)
        row_start = before + req
        slot = tl.load(idx_mapping_ptr + req).to(tl.int64)
        begin = tl.load(query_start_loc_ptr + req)
        end = tl.load(query_start_loc_ptr + req + 1)
        valid_end = end - tl.load(num_rejected_ptr + req)
        first_pos = tl.load(positions_ptr + tl.maximum(valid_end - 1, begin)) + 1
        table_row = req.to(tl.int64) * table_stride

        # One span covers the context rows and, from the first rejected row on, the packed rows.
        at = part * BLOCK + tl.arange(0, BLOCK)
        in_context = at < end - begin
        valid = at < valid_end - begin
        pos = tl.load(positions_ptr + begin + at, mask=in_context & valid, other=0)
        kv_slot = _slot_of(
            block_table_ptr, table_row, pos, in_context & valid, max_blocks, BLOCK_SIZE, PAD
        )
        tl.store(context_pos_ptr + begin + at, pos, mask=in_context)
        tl.store(context_slots_ptr + begin + at, kv_slot, mask=in_context)

        offset = at - (valid_end - begin)
        row = row_start + offset
        packed = (offset >= 0) & (offset <= draft_len) & (row < max_num_tokens)
        pos = first_pos + offset
        fits = packed & (pos < max_model_len)
        kv_slot = _slot_of(block_table_ptr, table_row, pos, fits, max_blocks, BLOCK_SIZE, PAD)
        if tl.load(num_sampled_ptr + req) > 0:
            anchor = tl.load(last_sampled_ptr + slot).to(tl.int32)
        else:
            anchor = tl.load(next_prefill_ptr + slot).to(tl.int32)
        token = tl.where(offset == 0, anchor, mask_token_id)
        tl.store(out_input_ids_ptr + row, token, mask=packed)
        tl.store(out_positions_ptr + row, tl.minimum(pos, max_model_len - 1), mask=packed)
        tl.store(out_slots_ptr + row, kv_slot, mask=packed)
        tl.store(row_offset_ptr + row, offset, mask=packed)

        sampled = packed & (offset > 0)
        sample = before + offset - 1
        tl.store(sample_row_ptr + sample, row, mask=sampled)
        tl.store(sample_slot_ptr + sample, slot, mask=sampled)
        tl.store(sample_step_ptr + sample, offset - 1, mask=sampled)
        tl.store(sample_pos_ptr + sample, pos, mask=sampled)

        if part == 0:
            tl.store(out_start_loc_ptr + req, row_start)
            tl.store(sample_start_ptr + req, before)
            length = tl.minimum(first_pos + draft_len + 1, max_model_len)
            tl.store(out_seq_lens_ptr + req, length.to(tl.int32))
            tl.store(out_temperature_ptr + slot, tl.load(temperature_ptr + slot))
            tl.store(out_seeds_ptr + slot, tl.load(seeds_ptr + slot))


def launch_pack(
    inputs: PackInputs,
    draft_lens: torch.Tensor,
    engine: EngineBuffers,
    out: PackBuffers,
    layout: PackLayout,
    max_query_len: int,
    num_warps: int = 4,
) -> None:
    """Launch the kernel on arguments that `pack` has checked."""
    num_reqs = draft_lens.shape[0]
    span = max_query_len + layout.num_speculative_tokens + 1
    block = min(256, next_power_of_2(span))
    samples = layout.max_num_reqs * layout.num_speculative_tokens
    tail = max(layout.max_num_tokens, samples, layout.max_num_reqs + 1)
    _pack_kernel[(num_reqs + triton.cdiv(tail, PAD_BLOCK), triton.cdiv(span, block))](
        draft_lens,
        inputs.positions,
        inputs.query_start_loc,
        inputs.idx_mapping,
        inputs.num_sampled,
        inputs.num_rejected,
        inputs.last_sampled,
        inputs.next_prefill_tokens,
        inputs.temperature,
        inputs.seeds,
        inputs.block_table,
        engine.input_ids,
        engine.positions,
        engine.query_start_loc,
        engine.seq_lens,
        engine.slot_mapping,
        out.context_positions,
        out.context_slot_mapping,
        out.row_offset,
        out.sample_row,
        out.sample_slot,
        out.sample_step,
        out.sample_pos,
        out.sample_start,
        out.temperature,
        out.seeds,
        num_reqs,
        inputs.block_table.stride(0),
        inputs.block_table.shape[1],
        layout.mask_token_id,
        layout.max_num_reqs,
        layout.max_num_tokens,
        layout.max_model_len,
        STEPS=layout.num_speculative_tokens,
        BLOCK_SIZE=layout.block_size,
        PAD=layout.pad_slot_id,
        BLOCK_REQS=next_power_of_2(num_reqs),
        BLOCK=block,
        PAD_BLOCK=PAD_BLOCK,
        num_warps=num_warps,
    )


def pack(
    inputs: PackInputs,
    draft_lens: torch.Tensor,  # i32 [n], clipped to 0..K; on the device, never read by the host
    engine: EngineBuffers,
    out: PackBuffers,
    layout: PackLayout,
    max_query_len: int,  # host upper bound on the target rows of one request
) -> None:
    """Write one packed drafter batch: request i gets d_i + 1 rows, in batch order.

    Row offset 0 is the anchor (the last sampled token, or the next prompt token while num_sampled
    is 0) at the position after the last accepted one; offsets 1..d_i are mask tokens and are
    sampled. seq_lens = min(position of the last packed row + 1, max_model_len). Positions from
    max_model_len on are clamped and get the pad slot, as do rows in the null block 0. Context rows
    keep the target batch's places; rejected ones get position 0 and the pad slot. Entries past n
    and rows past the packed batch are padded as the records say; input_ids and positions past it
    and context rows past the target batch keep what they held.

    The caller guarantees sum(d_i + 1) <= max_num_tokens (the host knows the sum from its plan).
    Context parallelism is not supported. One launch that a CUDA graph can capture; CPU tensors run
    `pack_ref`. Raises ValueError on mismatched buffers.
    """
    device = engine.input_ids.device
    check_tensor("pack", "draft_lens", draft_lens, torch.int32, (-1,), device)
    num_reqs = draft_lens.shape[0]
    samples = layout.max_num_reqs * layout.num_speculative_tokens
    sizes = (layout.max_num_tokens, layout.max_num_reqs, layout.max_num_tokens, samples)
    held = (engine.input_ids, engine.seq_lens, out.row_offset, out.sample_row)
    if tuple(buffer.shape[0] for buffer in held) != sizes:
        raise ValueError(
            f"pack: buffers hold {[buffer.shape[0] for buffer in held]} entries (input_ids, "
            f"seq_lens, row_offset, sample_row); the layout asks for {list(sizes)}"
        )
    if inputs.positions.device != device or out.row_offset.device != device:
        raise ValueError(
            f"pack: inputs on {inputs.positions.device}, buffers on {out.row_offset.device} and "
            f"{device}; one device works"
        )
    if num_reqs > min(layout.max_num_reqs, MAX_REQS):
        raise ValueError(
            f"pack: {num_reqs} requests; at most {min(layout.max_num_reqs, MAX_REQS)} work"
        )
    inputs.check_rows(num_reqs)
    if runs_on_gpu("pack", draft_lens):
        launch_pack(inputs, draft_lens, engine, out, layout, max_query_len)
    else:
        pack_ref(inputs, draft_lens, engine, out, layout)
