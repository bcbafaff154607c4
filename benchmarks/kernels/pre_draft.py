"""The whole pre-draft path at 14B dimensions: norm, embedding, estimator, `envelope`, `rank`.

Target on an H200: n = 256, K = 15 in 60 us, as one captured piece. `eager_us` is the same calls
launched one by one.
"""

from __future__ import annotations

from typing import Any

import torch

from .timing import eager_us, graph_us, need_gpu, print_json, print_rows, report

from forespark.estimators.pre_draft import PreDraftEstimator  # isort: skip
from forespark.triton_kernels.envelope import envelope  # isort: skip
from forespark.triton_kernels.rank import rank  # isort: skip

SIZES = (1, 32, 64, 256, 512)
HIDDEN, VOCAB = 5120, 151_936


def bench(steps: int = 15) -> dict[str, Any]:
    """Rows per n."""
    device, rows = need_gpu(), []
    torch.manual_seed(0)
    dtype = torch.bfloat16
    estimator = PreDraftEstimator(HIDDEN, HIDDEN, steps).to(device=device, dtype=dtype).eval()
    norm = torch.nn.RMSNorm(HIDDEN, device=device, dtype=dtype)
    table = torch.randn(VOCAB, HIDDEN, device=device, dtype=dtype)
    scale, bias = torch.ones(2, steps * (steps + 1) // 2, device=device).unbind()
    for count in SIZES:
        context = torch.randn(count, HIDDEN, device=device, dtype=dtype)
        anchors = torch.randint(VOCAB, (count,), device=device)
        limits = torch.full((count,), steps, dtype=torch.int32, device=device)
        budget = torch.tensor([count * 4], dtype=torch.int32, device=device)
        slots = torch.randperm(count, device=device).int()
        scores = torch.zeros(count, steps, device=device)
        lengths = torch.zeros(count, dtype=torch.int32, device=device)

        @torch.inference_mode()
        def path(
            context: torch.Tensor = context,
            anchors: torch.Tensor = anchors,
            limits: torch.Tensor = limits,
            budget: torch.Tensor = budget,
            slots: torch.Tensor = slots,
            scores: torch.Tensor = scores,
            lengths: torch.Tensor = lengths,
        ) -> None:
            logits = estimator(norm(context), table[anchors])
            envelope(logits.contiguous(), scale, bias, limits, scores)
            rank(scores, limits, budget, lengths, slots)

        rows.append({"n": count, "K": steps, **graph_us(path), "eager_us": eager_us(path)["us"]})
    return report("pre_draft", rows, baseline="none: figures against the target in microseconds")


if __name__ == "__main__":
    record = bench()
    print_rows(record["rows"])
    print_json(record)
