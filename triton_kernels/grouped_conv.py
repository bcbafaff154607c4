"""DFlash2's grouped convolution over packed drafts of any lengths.

Each row mixes itself with the taps - 1 rows before it in its own block, with weights that are a
shared kernel plus a per-row correction shared by the channels of a group. Rows of one request are
not a fixed stride apart here, so the offset of a row in its block comes from `row_offset` (which
`pack` writes) and masks the taps that would reach into another request.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import next_power_of_2, tl, triton
from forespark.triton_kernels.checks import check_tensor, runs_on_gpu
from forespark.triton_kernels.grouped_conv_ref import grouped_conv_ref

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _grouped_conv_kernel(
    x_ptr,  # [rows, C]
    delta_ptr,  # [rows, TAPS, groups]
    base_ptr,  # [TAPS, C]
    row_offset_ptr,  # i32 [rows]
    out_ptr,  # [rows, C]
    x_stride,
    delta_stride_row,
    delta_stride_tap,
    base_stride,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,  # power of two >= GROUP_SIZE
):
    row = tl.program_id(0).to(tl.int64)
    # A [groups, channels of a group] tile: a group's correction is loaded once, not per channel.
    group = (tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS))[:, None]
    inner = tl.arange(0, BLOCK_CHANNELS)[None, :]
    inside = (group < GROUPS) & (inner < GROUP_SIZE)
    channel = group * GROUP_SIZE + inner
    offset = tl.load(row_offset_ptr + row)
    total = tl.zeros([BLOCK_GROUPS, BLOCK_CHANNELS], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        in_reach = group < tl.where(offset >= tap, GROUPS, 0)
        mask = in_reach & (inner < GROUP_SIZE)
        weight = tl.load(base_ptr + tap * base_stride + channel, mask=mask, other=0.0)
        change_ptr = delta_ptr + row * delta_stride_row + tap * delta_stride_tap + group
        change = tl.load(change_ptr, mask=in_reach, other=0.0)
        # row_offset <= row, so row - tap is never negative where it is read
        value = tl.load(x_ptr + (row - tap) * x_stride + channel, mask=mask, other=0.0)
        total += (weight.to(tl.float32) + change.to(tl.float32)) * value.to(tl.float32)
    out_row = out_ptr + row * (GROUPS * GROUP_SIZE)
    tl.store(out_row + channel, total.to(out_ptr.dtype.element_ty), mask=inside)


def launch_grouped_conv(
    x: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    row_offset: torch.Tensor,
    group_size: int,
    block: int = 1024,  # channels per program, about
    num_warps: int = 4,
) -> torch.Tensor:
    """Launch the kernel on arguments that `grouped_conv` has checked."""
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    groups = channels // group_size
    block_channels = next_power_of_2(group_size)
    block_groups = min(max(block // block_channels, 1), next_power_of_2(groups))
    _grouped_conv_kernel[(rows, triton.cdiv(groups, block_groups))](
        x,
        delta,
        base,
        row_offset,
        out,
        x.stride(0),
        delta.stride(0),
        delta.stride(1),
        base.stride(0),
        GROUPS=groups,
        GROUP_SIZE=group_size,
        TAPS=base.shape[0],
        BLOCK_GROUPS=block_groups,
        BLOCK_CHANNELS=block_channels,
        num_warps=num_warps,
    )
    return out


def grouped_conv(
    x: torch.Tensor,  # float [rows, C], last dimension dense
    delta: torch.Tensor,  # float [rows, taps, C / group_size], last dimension dense
    base: torch.Tensor,  # float [taps, C], last dimension dense
    row_offset: torch.Tensor,  # i32 [rows], 0 at a block's first row
    group_size: int,
) -> torch.Tensor:
    """Contiguous [rows, C] in the dtype of x; float32 accumulation.

    `row_offset[row] <= row` is the caller's promise (`pack` keeps it). One launch that a CUDA graph
    can capture; CPU tensors run `grouped_conv_ref`. Raises ValueError on any other argument.
    """
    rows, channels = x.shape if x.dim() == 2 else (-1, -1)
    if group_size < 1 or channels % group_size:
        raise ValueError(f"grouped_conv: group_size {group_size} must divide {channels} channels")
    taps, device = base.shape[0], x.device
    groups = channels // group_size
    check_tensor("grouped_conv", "x", x, FLOATS, (rows, channels), device, contiguous=False)
    check_tensor(
        "grouped_conv", "delta", delta, FLOATS, (rows, taps, groups), device, contiguous=False
    )
    check_tensor("grouped_conv", "base", base, FLOATS, (taps, channels), device, contiguous=False)
    check_tensor("grouped_conv", "row_offset", row_offset, torch.int32, (rows,), device)
    if not runs_on_gpu("grouped_conv", x):
        return grouped_conv_ref(x, delta, base, row_offset, group_size)
    return launch_grouped_conv(x, delta, base, row_offset, group_size)
