"""The packed batch of a drafter pass: its layout and its block-diagonal attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.input_batch import InputBatch

from forespark.scheduler.split import even_split
from forespark.triton_kernels.pack import pack
from forespark.triton_kernels.pack_types import EngineBuffers, PackBuffers, PackInputs, PackLayout


def pack_batch(
    speculator: Any,  # ForeSparkSpeculator: owns the persistent buffers
    packed: PackBuffers,
    input_batch: InputBatch,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    last_sampled: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draft_lens: torch.Tensor,  # i32 [n]
) -> Iterator[int]:
    """Lay out the packed batch once for each KV cache group; yields the group's index after it."""
    buffers, tables = speculator.input_buffers, speculator.block_tables
    for index, gid in enumerate(speculator.draft_kv_cache_group_ids):
        pack(
            PackInputs(
                positions=input_batch.positions,
                query_start_loc=input_batch.query_start_loc,
                idx_mapping=input_batch.idx_mapping.to(torch.int32),
                num_sampled=num_sampled.to(torch.int32),
                num_rejected=num_rejected.to(torch.int32),
                last_sampled=last_sampled.flatten(),
                next_prefill_tokens=next_prefill_tokens.view(-1, speculator.max_num_reqs)[0],
                temperature=temperature,
                seeds=seeds,
                block_table=tables.input_block_tables[gid],
            ),
            draft_lens,
            EngineBuffers(
                input_ids=buffers.input_ids,
                positions=buffers.positions,
                query_start_loc=buffers.query_start_loc,
                seq_lens=buffers.seq_lens,
                slot_mapping=tables.slot_mappings[gid],
            ),
            packed,
            PackLayout(
                mask_token_id=speculator.parallel_drafting_token_id,
                block_size=tables.block_sizes[gid],
                num_speculative_tokens=speculator.num_speculative_steps,
                max_num_reqs=speculator.max_num_reqs,
                max_num_tokens=speculator.max_num_tokens,
                max_model_len=speculator.max_model_len,
                pad_slot_id=PAD_SLOT_ID,
            ),
            int(input_batch.num_scheduled_tokens.max()),
        )
        yield index


def packed_attention(speculator: Any, input_batch: InputBatch, rows_total: int) -> dict[str, Any]:
    """Attention metadata by layer: each request is one sequence over its own blocks.

    With the host split the host's lengths are the device's. Otherwise it knows only the total: its
    lengths are an even split and K + 1 their bound.
    """
    num_reqs = input_batch.num_reqs
    buffers, tables = speculator.input_buffers, speculator.block_tables
    lengths, longest = speculator.packed_lens, speculator.num_query_per_req
    if lengths is None:
        rows = even_split(rows_total, num_reqs)
    else:
        rows = lengths + 1
        longest = int(rows.max())
    start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(rows, out=start_loc[1:])
    upper = input_batch.seq_lens_cpu_upper_bound[:num_reqs] + speculator.num_query_per_req
    return build_attn_metadata(
        attn_groups=speculator.attn_groups,
        num_reqs=num_reqs,
        num_tokens=rows_total,
        query_start_loc_gpu=buffers.query_start_loc[: num_reqs + 1],
        query_start_loc_cpu=torch.from_numpy(start_loc),
        max_query_len=longest,
        seq_lens=buffers.seq_lens[:num_reqs],
        max_seq_len=speculator.draft_max_seq_len,
        block_tables=[table[:num_reqs] for table in tables.input_block_tables],
        slot_mappings=tables.slot_mappings[:, :rows_total],
        kv_cache_config=speculator.kv_cache_config,
        causal=speculator._group_causal,
        seq_lens_cpu_upper_bound=upper.clamp(max=speculator.max_model_len).to(torch.int32),
        positions=buffers.positions[:rows_total],
        is_prefilling=speculator.draft_is_prefilling[:num_reqs],
    )


def capture_attention(
    speculator: Any, num_reqs: int, rows: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(metadata, slot mappings) by layer for capturing `rows` rows of up to `num_reqs` requests.

    Both are views of the persistent buffers that `pack` writes. Lengths are dummies, blocks are up
    to K + 1 wide, and no slot is written.
    """
    dummy = InputBatch.make_dummy(num_reqs, rows, speculator.input_buffers)
    tables = speculator.block_tables
    slots = tables.get_dummy_slot_mappings(rows)
    metadata = build_attn_metadata(
        attn_groups=speculator.attn_groups,
        num_reqs=num_reqs,
        num_tokens=rows,
        query_start_loc_gpu=dummy.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(dummy.query_start_loc_np),
        max_query_len=speculator.num_query_per_req,
        seq_lens=dummy.seq_lens,
        max_seq_len=speculator.max_model_len,
        block_tables=tables.get_dummy_block_tables(num_reqs),
        slot_mappings=slots,
        kv_cache_config=speculator.kv_cache_config,
        for_cudagraph_capture=True,
        causal=speculator._group_causal,
    )
    return metadata, build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
