"""Specification of `grouped_conv` in plain torch, and what CPU tensors run."""

from __future__ import annotations

import torch


def grouped_conv_ref(
    x: torch.Tensor,  # [rows, C]
    delta: torch.Tensor,  # [rows, taps, groups]
    base: torch.Tensor,  # [taps, C]
    row_offset: torch.Tensor,  # i32 [rows]: the row's offset in its block
    group_size: int,  # C = groups * group_size
) -> torch.Tensor:
    """x's dtype [rows, C]: sum over taps of (base[tap] + delta[row, tap, group]) * x[row - tap].

    Only taps <= row_offset[row] count: an earlier row belongs to another request. Sums in float32.
    """
    rows, channels = x.shape
    grouped = x.float().unflatten(1, (-1, group_size))
    kernel = base.float().view(base.shape[0], 1, -1, group_size)
    out = (kernel[0] + delta[:, 0, :, None].float()) * grouped
    for tap in range(1, min(base.shape[0], rows)):
        reaches = (row_offset[tap:] >= tap)[:, None, None]
        # where, not a product: a row of another request may hold Inf or NaN
        change = delta[tap:, tap, :, None].float().where(reaches, 0.0)
        out[tap:].addcmul_(kernel[tap] + change, grouped[:-tap].where(reaches, 0.0))
    return out.view(rows, channels).to(x.dtype)
