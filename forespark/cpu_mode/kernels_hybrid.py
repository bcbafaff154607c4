"""What a hybrid target launches beside its layers: fresh cache blocks, and accepted counts."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def zero_kv_blocks(
    seg_addrs: torch.Tensor,  # u64 [segments] byte addresses
    seg_block_strides: torch.Tensor,  # [segments] in int32
    seg_page_sizes: torch.Tensor,  # [segments] in int32
    block_ids: torch.Tensor,  # [blocks]
    **_launch: Any,
) -> None:
    """Fill the pages of new blocks with zeros in every segment."""
    blocks = block_ids.tolist()
    strides, sizes = seg_block_strides.tolist(), seg_page_sizes.tolist()
    for address, stride, size in zip(seg_addrs.tolist(), strides, sizes, strict=True):
        for block in blocks:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)


def scatter_num_accepted(
    idx_mapping: torch.Tensor,  # [n] batch row -> request slot, negative: skipped
    num_sampled: torch.Tensor,  # [n]
    num_accepted: torch.Tensor,  # [slots], out
    **_launch: Any,
) -> None:
    """Tokens each request keeps; one for a prefill that samples none."""
    rows = idx_mapping >= 0
    counts = num_sampled[: len(idx_mapping)][rows].clamp(min=1)
    num_accepted[idx_mapping[rows].long()] = counts.to(num_accepted.dtype)


def fill_num_accepted(
    idx_mapping: torch.Tensor, num_accepted: torch.Tensor, num_sampled: int, **_launch: Any
) -> None:
    """The same with one count for all."""
    num_accepted[idx_mapping[idx_mapping >= 0].long()] = num_sampled
