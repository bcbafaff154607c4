"""`envelope` against the same maths in torch operations (`envelope_ref` in a graph).

Target on an H200: n = 512, K = 15 in 8 us.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .timing import graph_us, need_gpu, print_json, print_rows, report

from forespark.triton_kernels.envelope import launch_envelope  # isort: skip
from forespark.triton_kernels.envelope_ref import envelope_ref  # isort: skip

SIZES = (1, 16, 64, 192, 512, 2048)
WARPS = (1, 2, 4)


def bench(steps: int = 15) -> dict[str, Any]:
    """Rows per (n, mode): torch, and the kernel at each warp count."""
    device, rows = need_gpu(), []
    generator = torch.Generator().manual_seed(0)
    for num_requests in SIZES:
        for single_curve in (False, True):
            width = steps * (steps + 1) // 2
            logits = 2 * torch.randn(num_requests, width, generator=generator).to(device)
            scale, bias = torch.ones(2, width, device=device).unbind()
            limits = torch.full((num_requests,), steps, dtype=torch.int32, device=device)
            scores = torch.full((num_requests, steps), float("nan"), device=device)
            inputs = (logits, scale, bias, limits)
            row: dict[str, Any] = {"n": num_requests, "K": steps, "single_curve": single_curve}
            want = envelope_ref(logits, steps, scale, bias, limits, single_curve)
            row["torch_us"] = graph_us(
                lambda args=inputs, single=single_curve: envelope_ref(
                    args[0], steps, *args[1:], single
                )
            )["us"]
            for warps in WARPS:
                scores.fill_(float("nan"))
                call = (*inputs, scores, single_curve, False, warps)
                launch_envelope(*call)
                row["max_error"] = float((scores - want).abs().max())
                if not row["max_error"] < 2e-5:
                    raise SystemExit(f"envelope: error {row['max_error']} at {row}")
                timed = graph_us(lambda call=call: launch_envelope(*call))
                row[f"warps{warps}_us"] = timed["us"]
                if warps == 1:
                    row["replay_us"] = timed["replay_us"]
            row["max_error"] = f"{row['max_error']:.1e}"
            rows.append(row)
    return report("envelope", rows, baseline="envelope_ref: torch operations in one graph")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="K")
    record = bench(parser.parse_args().steps)
    print_rows(record["rows"])
    print_json(record)
