"""`grouped_conv` against torch operations and against a copy of x (its floor in bytes moved).

Sizes are a drafter's: bfloat16, 4 taps, groups of 64 channels, rows = the packed batch.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .timing import graph_us, need_gpu, print_json, print_rows, report

from forespark.triton_kernels.grouped_conv import launch_grouped_conv  # isort: skip
from forespark.triton_kernels.grouped_conv_ref import grouped_conv_ref  # isort: skip

ROWS = (16, 256, 1024, 8192)
BLOCKS = (512, 1024, 2048)


def bench(channels: int = 5120, group_size: int = 64, taps: int = 4) -> dict[str, Any]:
    """Rows per packed batch size: torch, copy, and the kernel at each block of channels."""
    device, rows = need_gpu(), []
    for count in ROWS:
        kind = {"dtype": torch.bfloat16, "device": device}
        x = torch.randn(count, channels, **kind)
        delta = torch.randn(count, 2, taps, channels // group_size, **kind)[:, 1]
        base = torch.randn(taps, channels, **kind)
        offset = (torch.arange(count, device=device) % 7).to(torch.int32)
        inputs = (x, delta, base, offset, group_size)
        copy = torch.empty_like(x)
        row: dict[str, Any] = {
            "rows": count,
            "channels": channels,
            "torch_us": graph_us(lambda args=inputs: grouped_conv_ref(*args))["us"],
            "copy_us": graph_us(lambda x=x, copy=copy: copy.copy_(x))["us"],
        }
        want = grouped_conv_ref(*inputs)
        for block in BLOCKS:
            torch.testing.assert_close(
                launch_grouped_conv(*inputs, block), want, atol=1e-5, rtol=2**-7
            )
            row[f"block{block}_us"] = graph_us(
                lambda args=inputs, block=block: launch_grouped_conv(*args, block)
            )["us"]
        row["gb_per_s"] = 2 * x.nbytes / row["block1024_us"] / 1e3
        rows.append(row)
    return report("grouped_conv", rows, baseline="grouped_conv_ref: torch operations in one graph")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=5120)
    record = bench(parser.parse_args().channels)
    print_rows(record["rows"])
    print_json(record)
