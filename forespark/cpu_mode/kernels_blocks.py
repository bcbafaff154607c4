"""Block tables and staged writes: what `block_table` and `buffer_utils` launch.

These launches pass addresses of int32 tables (one per KV cache group) instead of tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.arrays import int32_at, ragged


def apply_write(
    output: torch.Tensor,  # table, or [groups] addresses of tables with MULTI_GROUP
    output_stride: int | torch.Tensor,  # row stride, or [groups] row strides
    write_indices: torch.Tensor,  # [writes] row
    write_starts: torch.Tensor,  # [writes] first column
    write_contents: torch.Tensor,  # [values]
    write_cu_lens: torch.Tensor,  # [writes] running end in write_contents
    write_group_ids: torch.Tensor | None,  # [writes]
    MULTI_GROUP: bool = False,
    **_launch: Any,
) -> None:
    """Apply the pending (row, start column, values) writes of one table or of several."""
    contents = write_contents.numpy()
    ends = write_cu_lens.tolist()
    begin = 0
    for i, (row, start) in enumerate(
        zip(write_indices.tolist(), write_starts.tolist(), strict=True)
    ):
        values = contents[begin : ends[i]]
        begin = ends[i]
        if MULTI_GROUP:
            assert write_group_ids is not None and isinstance(output_stride, torch.Tensor)
            group = int(write_group_ids[i])
            table = int32_at(int(output[group]), row + 1, int(output_stride[group]))
            table[row, start : start + len(values)] = values
        else:
            offset = row * int(output_stride) + start
            output.view(-1).numpy()[offset : offset + len(values)] = values


def gather_block_tables(
    idx_mapping: torch.Tensor,  # [n]
    source_tables: torch.Tensor,  # [groups] addresses of [slots, blocks]
    batch_tables: torch.Tensor,  # [groups] addresses of [max_num_reqs, blocks]
    row_strides: torch.Tensor,  # [groups] blocks per row
    num_blocks: torch.Tensor,  # [groups, slots]
    _num_blocks_stride: int,
    num_reqs: int,
    **_launch: Any,
) -> None:
    """Copy each scheduled request's block ids into batch order (no graph padding on a CPU)."""
    slots = idx_mapping.numpy()[:num_reqs]
    if num_reqs == 0:
        return
    rows = num_blocks.shape[1]
    for group, stride in enumerate(row_strides.tolist()):
        width = int(num_blocks.numpy()[group, slots].max())
        source = int32_at(int(source_tables[group]), rows, stride)
        target = int32_at(int(batch_tables[group]), num_reqs, stride)
        target[:, :width] = source[slots, :width]


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [n], negative: a dummy request that owns no blocks
    query_start_loc: torch.Tensor,  # [n + 1]
    positions: torch.Tensor,  # [tokens]
    block_tables: torch.Tensor,  # [groups] addresses of [slots, blocks]
    row_strides: torch.Tensor,  # [groups]
    block_sizes: torch.Tensor,  # [groups]
    mapping_enabled: torch.Tensor,  # [groups]
    _dcp_sharded: torch.Tensor,
    slot_mappings: torch.Tensor,  # [groups, max_num_tokens], out
    _slot_stride: int,
    _cp_rank: int,
    CP_SIZE: int = 1,
    PAD_ID: int = -1,
    **_launch: Any,
) -> None:
    """KV cache slot of every token; PAD for dummies, disabled groups and the unused tail."""
    if CP_SIZE != 1:
        raise ValueError(
            f"decode_context_parallel_size: {CP_SIZE}: CPU mode has no context parallelism; use 1"
        )
    slots = idx_mapping.numpy()
    n = slots.shape[0]
    starts = query_start_loc.numpy()[: n + 1]
    rows, offsets = ragged(np.diff(starts))
    tokens = starts[rows] + offsets
    where = positions.numpy()[tokens]
    owners = slots[rows]
    real = owners >= 0
    mappings = slot_mappings.numpy()
    num_slots = int(slots.max(initial=0)) + 1
    for group, stride in enumerate(row_strides.tolist()):
        mapping = mappings[group]
        mapping[starts[n] : max_num_tokens] = PAD_ID
        if not bool(mapping_enabled[group]):
            mapping[tokens] = PAD_ID
            continue
        size = int(block_sizes[group])
        table = int32_at(int(block_tables[group]), num_slots, stride)
        blocks = table[np.where(real, owners, 0), where // size].astype(np.int64)
        mapping[tokens] = np.where(real, blocks * size + where % size, PAD_ID)
