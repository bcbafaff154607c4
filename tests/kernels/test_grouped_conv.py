"""`grouped_conv`: kernel against reference, and the reference against the sum written out.

Tolerance: both sides add `taps` float32 products, in another order and with or without fused
multiply-add, so float32 outputs differ by a few ulp of the largest product (1e-5 for values near
10); half-precision outputs add one rounding, at most one ulp of the output (2^-8 for bfloat16).
"""

from __future__ import annotations

import pytest
import torch
from forespark.triton_kernels.grouped_conv import grouped_conv, launch_grouped_conv
from forespark.triton_kernels.grouped_conv_ref import grouped_conv_ref

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-5, "rtol": 2**-7},
    torch.float16: {"atol": 1e-5, "rtol": 2**-10},
}
SIZES = [(0, 4, 4, 8), (1, 4, 4, 8), (2, 4, 3, 6), (17, 5, 2, 16), (33, 3, 4, 1)]


def make_case(generator, rows, groups, taps, group_size, dtype):
    """x, delta, base and offsets of blocks of 1..6 rows."""
    channels = groups * group_size
    x = torch.randn(rows, channels, generator=generator).to(dtype)
    # The model projects both sides of a layer at once, so delta is a slice with a row stride.
    delta = torch.randn(rows, 2, taps, groups, generator=generator).to(dtype)[:, 1]
    base = torch.randn(taps, channels, generator=generator).to(dtype)
    lens = torch.randint(1, 7, (rows,), generator=generator)
    offsets = torch.cat([torch.arange(int(length)) for length in lens] + [torch.zeros(0)])[:rows]
    return x, delta, base, offsets.to(torch.int32)


def plain_conv(x, delta, base, row_offset, group_size):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row, offset in enumerate(row_offset.tolist()):
        for tap in range(min(offset + 1, base.shape[0])):
            weight = base[tap].double() + delta[row, tap].double().repeat_interleave(group_size)
            out[row] += weight * x[row - tap].double()
    return out.to(x.dtype)


@pytest.mark.parametrize("rows, groups, taps, group_size", SIZES)
def test_reference_matches_the_sum(rows, groups, taps, group_size):
    """Catches fewer rows than taps, and a shift that reads a neighbour's tap weights."""
    generator = torch.Generator().manual_seed(rows)
    case = make_case(generator, rows, groups, taps, group_size, torch.float32)
    got = grouped_conv_ref(*case, group_size)
    want = plain_conv(*case, group_size)
    torch.testing.assert_close(got, want, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, groups, taps, group_size", SIZES)
def test_kernel_matches_reference(device, rows, groups, taps, group_size, dtype):
    """Catches a group index off by one and a channel tail that is not written or overruns."""
    generator = torch.Generator().manual_seed(50 + rows)
    case = make_case(generator, rows, groups, taps, group_size, dtype)
    out = launch_grouped_conv(*(tensor.to(device) for tensor in case), group_size, block=16)
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.cpu(), grouped_conv_ref(*case, group_size), **TOLERANCE[dtype])


def test_another_request_never_leaks_in(device):
    """Catches the fixed-stride mask (row % block): a short draft would read its neighbour's NaN."""
    x = torch.ones(6, 4)
    x[2] = float("nan")  # last row of the first block
    offsets = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    case = (x, torch.zeros(6, 4, 2), torch.ones(4, 4), offsets)
    for out in (
        grouped_conv_ref(*case, 2),
        launch_grouped_conv(*(tensor.to(device) for tensor in case), 2).cpu(),
    ):
        assert bool(out[2].isnan().all())
        assert out[3:, 0].tolist() == [1.0, 2.0, 3.0]


def test_equal_blocks_match_the_fixed_stride_form(device):
    """Catches a table of offsets that disagrees with the full-block drafter it generalises."""
    generator = torch.Generator().manual_seed(4)
    x, delta, base, _ = make_case(generator, 32, 4, 4, 8, torch.float32)
    offsets = (torch.arange(32) % 16).to(torch.int32)
    blocks = x.view(2, 16, 32)
    want = torch.zeros_like(blocks)
    for tap in range(4):
        shifted = torch.nn.functional.pad(blocks, (0, 0, tap, 0))[:, :16]
        weight = base[tap] + delta[:, tap].repeat_interleave(8, dim=1).view(2, 16, 32)
        want += weight * shifted
    case = [tensor.to(device) for tensor in (x, delta, base, offsets)]
    out = launch_grouped_conv(*case, 8).cpu()
    torch.testing.assert_close(out, want.view(32, 32), **TOLERANCE[torch.float32])


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches a refusal that does not say which argument is wrong and what it was."""
    x, delta, base = torch.ones(3, 4), torch.zeros(3, 2, 2), torch.ones(2, 4)
    offsets = torch.tensor([0, 1, 0], dtype=torch.int32)
    assert grouped_conv(x, delta, base, offsets, 2)[:, 0].tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(ValueError, match=r"row_offset is torch\.int64.*torch\.int32"):
        grouped_conv(x, delta, base, offsets.long(), 2)
    with pytest.raises(ValueError, match=r"group_size 3 must divide 4 channels"):
        grouped_conv(x, delta, base, offsets, 3)
    with pytest.raises(ValueError, match=r"delta is .*\[3, 2, 2\].*shape must be \[3, 2, 4\]"):
        grouped_conv(x, delta, base, offsets, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, groups, group_size", [(1, 80, 64), (8192, 40, 64), (131, 17, 48)])
def test_model_sizes(device, rows, groups, group_size, dtype):
    """Catches vectorised loads that go wrong only at real channel counts and strides."""
    generator = torch.Generator().manual_seed(rows)
    case = make_case(generator, rows, groups, 4, group_size, dtype)
    for block in (256, 512, 1024, 2048):
        out = launch_grouped_conv(*(tensor.to(device) for tensor in case), group_size, block)
        want = grouped_conv_ref(*case, group_size)
        torch.testing.assert_close(out.cpu(), want, **TOLERANCE[dtype])
