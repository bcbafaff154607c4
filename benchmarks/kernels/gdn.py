"""`gdn_verify` and `gdn_commit` on the Gated DeltaNet layers of Qwen3.6-35B-A3B, against vLLM.

The baseline is what vLLM 0.32 runs for 15 drafts: its Triton recurrence
(`fused_sigmoid_gating_delta_rule_update`), which writes one state per token and has no commit. Both
sides get post-convolution inputs, float32 states in 30 distinct buffers, a CUDA graph of 30 layers.
Ours has to pay for verify + commit of all tokens. After the fixed cases, tile variants are timed
until the time is used up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .gdn_case import Case, Shape, VllmCase, relative
from .gdn_evidence import gdn_evidence
from .timing import _capture, _samples, need_gpu, print_json, print_rows, report

from forespark.benchmarks.provenance import provenance  # isort: skip

REQUESTS = (1, 16, 64)
TOKENS = (4, 8, 16)
PEAK_BYTES_PER_US = 4.3e6  # measured on an H200
# block_v, block_k, stages, num_warps
VERIFY_TILES = (
    (32, 32, 4, 4),
    (64, 32, 4, 4),
    (128, 32, 4, 8),
    (64, 64, 2, 4),
    (32, 64, 1, 4),
    (32, 32, 2, 4),
    (32, 32, 4, 2),
    (128, 32, 2, 8),
)
COMMIT_TILES = ((32, 4), (64, 4), (128, 8), (32, 2), (16, 4), (64, 8))  # block_v, num_warps


def layers_us(call: Callable[[], Any]) -> float:
    """Median time of one replay of a graph of the call, from batches of about 2 ms."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = _capture(call, 1)
    once = min(_samples(graph, 1, 1)[:10])
    replays = min(max(int(2000 / once), 1), 10)
    return sorted(_samples(graph, replays, replays))[30]


def bench_case(shape: Shape, requests: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """One row: our times, the baseline's, and whatever failed, as text."""
    row: dict[str, Any] = {"layers": shape.layers}
    torch.cuda.empty_cache()
    case = Case(shape, requests, tokens, device)
    row.update(_tried("check", lambda: case.errors(torch.float32)))
    for name in ("verify", "verify_and_norm", "commit", "both"):
        call = getattr(case, name)
        row.update(_tried(name, lambda n=name, c=call: {f"{n}_us": layers_us(c)}))
    moved = shape.layers * requests * (3 * shape.state_bytes() + 65_536 * tokens)
    if "both_us" in row:
        row["share_of_peak"] = moved / PEAK_BYTES_PER_US / row["both_us"]

    def baseline() -> dict[str, float]:
        other = VllmCase(case)
        case.verify()
        theirs, ours = other.verify().view_as(case.out).clone(), case.out
        return {"vllm_difference": relative(ours, theirs), "vllm_us": layers_us(other.verify)}

    row.update(_tried("vllm", baseline))
    if "vllm_us" in row and "both_us" in row:
        row["speedup"] = row["vllm_us"] / row["both_us"]
        row["speedup_verify_only"] = row["vllm_us"] / row["verify_us"]
    return row


def sweep(shape: Shape, device: torch.device, deadline: float) -> list[dict[str, Any]]:
    """Times of every tile variant at 16 tokens, errors beside them, as far as time allows."""
    rows = []
    cases = [Case(shape, requests, max(TOKENS), device) for requests in REQUESTS]
    for block_v, num_warps in COMMIT_TILES:
        tiles = {"block_v": block_v, "num_warps": num_warps}
        row: dict[str, Any] = {"kernel": "commit", **tiles}
        rows.append(_sweep_row(row, cases, lambda case, t=tiles: case.commit(**t), deadline))
    for block_v, block_k, stages, num_warps in VERIFY_TILES:
        tiles = {"block_v": block_v, "block_k": block_k, "stages": stages, "num_warps": num_warps}
        row = {"kernel": "verify", **tiles}
        rows.append(_sweep_row(row, cases, lambda case, t=tiles: case.verify(**t), deadline))
        if "skipped" not in row:
            row.update(_tried("check", lambda t=tiles: cases[0].errors(torch.bfloat16, **t)))
    return rows


def _sweep_row(
    row: dict[str, Any], cases: list[Case], call: Callable[[Case], None], deadline: float
) -> dict[str, Any]:
    for case in cases:
        if time.monotonic() > deadline:
            row["skipped"] = "out of time"
        else:
            name = f"us_n{case.requests}"
            row.update(_tried(name, lambda c=case, n=name: {n: layers_us(lambda: call(c))}))
    return row


def _tried(what: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    # One failing kernel or a missing baseline must not cost the figures of the others.
    try:
        return call()
    except Exception as error:
        return {f"{what}_error_text": f"{type(error).__name__}: {str(error)[:300]}"}


def bench(budget_s: float = 50.0) -> dict[str, Any]:
    """Rows per (n, w), then the tile variants until `budget_s` seconds have passed."""
    deadline = time.monotonic() + budget_s
    device, shape = need_gpu(), Shape()
    rows = []
    for requests in REQUESTS:
        for tokens in TOKENS:
            sizes = {"n": requests, "w": tokens}
            row = _tried("case", lambda s=sizes: bench_case(shape, *s.values(), device))
            rows.append({**sizes, **row})
            print_rows(rows[-1:])
    tiles = _tried("sweep", lambda: {"tiles": sweep(shape, device, deadline)})
    print_rows(tiles.get("tiles", []))
    return report("gdn", rows, baseline=VllmCase.name, **tiles)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-s", type=float, default=50.0, help="seconds for all of it")
    parser.add_argument("--evidence", type=Path, help="also write the committed figures here")
    args = parser.parse_args()
    record = bench(args.budget_s)
    if args.evidence is not None:
        figures = gdn_evidence(record) | {"provenance": provenance()}
        args.evidence.write_text(json.dumps(figures, indent=1) + "\n")
    print_json(record)
