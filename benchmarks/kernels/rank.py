"""`rank` against sorting in torch (`rank_ref` in a graph), over search widths and warp counts.

Targets on an H200: n = 512, K = 15 in 10 us per replay, n = 64 in 5 us. `equal` (all scores tie) is
the worst case of the search: it runs every round and then splits the ties by request slot.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .timing import graph_us, need_gpu, print_json, print_rows, report

from forespark.triton_kernels.rank import launch_rank, rank  # isort: skip
from forespark.triton_kernels.rank_ref import rank_ref  # isort: skip

SIZES = (1, 16, 64, 192, 512, 2048)
WAYS = (2, 3, 4)
WARPS = (4, 8, 16, 32)


def make_inputs(num_rows: int, width: int, kind: str, device: torch.device) -> dict[str, Any]:
    """Scores like survival curves (or all equal), every position eligible, a third of it paid."""
    generator = torch.Generator().manual_seed(num_rows)
    accept = 0.5 + 0.5 * torch.rand(num_rows, width, generator=generator)
    scores = accept.cumprod(dim=1) if kind == "curves" else torch.full((num_rows, width), 0.5)
    return {
        "scores": scores.to(device),
        "limits": torch.full((num_rows,), width, dtype=torch.int32, device=device),
        "budget": torch.tensor([num_rows * width // 3], dtype=torch.int32, device=device),
        "out": torch.full((num_rows,), -77, dtype=torch.int32, device=device),
        "order": torch.randperm(num_rows, generator=generator).int().to(device),
    }


def vllm_us(case: dict[str, Any]) -> dict[str, float]:
    """vLLM's compiled top-k assignment of the same budget, in a graph; nothing without vLLM."""
    try:
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock
    except ImportError:
        return {}
    num_rows, width = case["scores"].shape
    budget = int(case["budget"])
    rows = torch.arange(num_rows, device=case["scores"].device)
    capacities = torch.empty_like(case["limits"])

    def call() -> None:
        # It leaves its result where its limits were: they are written anew, as vLLM does.
        capacities.copy_(case["limits"])
        stock._assign_draft_token_budget_compiled(case["scores"], rows, capacities, budget, width)

    copy = graph_us(lambda: capacities.copy_(case["limits"]))
    timed = graph_us(call)
    return {
        "vllm_us": timed["us"] - copy["us"],
        "vllm_replay_us": timed["replay_us"] - copy["us"],
    }


def bench(width: int = 15) -> dict[str, Any]:
    """Rows per (n, data): torch, the default launch, and the fastest variant that is right."""
    device, rows = need_gpu(), []
    for num_rows in SIZES:
        for kind in ("curves", "equal"):
            case = make_inputs(num_rows, width, kind, device)
            reference = [case[name] for name in ("scores", "limits", "budget", "order")]
            want = rank_ref(*reference)
            variants = {}
            for ways in WAYS:
                for warps in WARPS:
                    launch_rank(**case, ways=ways, num_warps=warps)
                    if not torch.equal(case["out"], want):
                        raise SystemExit(f"rank: wrong lengths, n {num_rows} {kind} {ways} {warps}")
                    timed = graph_us(
                        lambda case=case, ways=ways, warps=warps: launch_rank(
                            **case, ways=ways, num_warps=warps
                        )
                    )
                    variants[f"{ways}w{warps}"] = timed["us"]
                print(f"  n={num_rows} {kind} ways={ways} us by warps {WARPS}:", end=" ")
                print(*(f"{variants[f'{ways}w{warps}']:.2f}" for warps in WARPS), flush=True)
            best = min(variants, key=variants.__getitem__)
            rows.append(
                {
                    "n": num_rows,
                    "K": width,
                    "data": kind,
                    "torch_sort_us": graph_us(lambda args=reference: rank_ref(*args))["us"],
                    **vllm_us(case),
                    **graph_us(lambda case=case: rank(**case)),
                    "best": best,
                    "best_us": variants[best],
                }
            )
    return report("rank", rows, baseline="rank_ref: stable torch sorts in one graph")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=15, help="K, drafted positions per request")
    record = bench(parser.parse_args().width)
    print_rows(record["rows"])
    print_json(record)
