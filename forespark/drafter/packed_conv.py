"""The drafter's grouped convolution over packed blocks of different lengths.

vLLM's convolution finds a row's place in its block as `row % (K + 1)`. Packed rows start anywhere,
so their offsets come from the `row_offset` table that `pack` writes. A row before a block's first
one belongs to another request: reading it would mix requests silently.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv
from vllm.utils.torch_utils import direct_register_custom_op

from forespark.triton_kernels.grouped_conv import grouped_conv
from forespark.triton_kernels.grouped_conv_ref import grouped_conv_ref


def _packed_conv(
    x: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    row_offset: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    return grouped_conv(x, delta, base, row_offset, group_size)


def _packed_conv_fake(
    x: torch.Tensor,
    delta: torch.Tensor,
    base: torch.Tensor,
    row_offset: torch.Tensor,
    group_size: int,
) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op(
    op_name="forespark_grouped_conv",
    op_func=_packed_conv,
    fake_impl=_packed_conv_fake,
    tags=(torch.Tag.needs_fixed_stride_order,),
)


class PackedGroupedConv(DFlashGroupedConv):
    """`DFlashGroupedConv` reading in-block offsets from a table. Shares its parameters."""

    row_offset: torch.Tensor  # i32 [max_num_tokens], persistent, written by `pack`

    def _convolve(
        self, hidden_states: torch.Tensor, delta: torch.Tensor, side: int
    ) -> torch.Tensor:
        offsets = self.row_offset[: hidden_states.shape[0]]
        if not hidden_states.is_cuda:
            return grouped_conv_ref(
                hidden_states, delta, self.base_kernel[side], offsets, self.group_size
            )
        return torch.ops.vllm.forespark_grouped_conv(
            hidden_states, delta, self.base_kernel[side], offsets, self.group_size
        )


def use_packed_convolutions(model: nn.Module, row_offset: torch.Tensor) -> int:
    """Make every grouped convolution of a loaded drafter read `row_offset`; return their number.

    Must run before the drafter's first forward pass, which is when it is compiled.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, DFlashGroupedConv):
            module.__class__ = PackedGroupedConv
            module.row_offset = row_offset
            count += 1
    return count
