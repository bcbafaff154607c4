"""`pack` against `pack_ref` on the GPU, which waits for the lengths and so cannot be captured.

Full blocks (every d_i = K) and random lengths: the second is what a joint schedule packs.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from .timing import eager_us, graph_us, need_gpu, print_json, print_rows, report

from forespark.triton_kernels.pack import pack  # isort: skip
from forespark.triton_kernels.pack_ref import pack_ref  # isort: skip
from forespark.triton_kernels.pack_types import (  # isort: skip
    EngineBuffers,
    PackBuffers,
    PackInputs,
    PackLayout,
)

SIZES = (1, 16, 64, 192, 512)


def make_inputs(num_reqs: int, layout: PackLayout, device: torch.device) -> PackInputs:
    """A decode batch in which every request verified K + 1 rows and K / 2 were rejected."""
    span = layout.num_speculative_tokens + 1
    slots = layout.max_num_reqs
    starts = torch.arange(num_reqs + 1, dtype=torch.int32) * span
    cpu = {
        "positions": 100 + torch.arange(num_reqs * span) % span,
        "query_start_loc": starts,
        "idx_mapping": torch.randperm(slots)[:num_reqs].int(),
        "num_sampled": torch.ones(num_reqs, dtype=torch.int32),
        "num_rejected": torch.full((num_reqs,), span // 2, dtype=torch.int32),
        "last_sampled": torch.randint(0, 1000, (slots,)),
        "next_prefill_tokens": torch.randint(0, 1000, (slots,), dtype=torch.int32),
        "temperature": torch.rand(slots),
        "seeds": torch.randint(0, 1000, (slots,)),
        "block_table": torch.randint(1, 1000, (num_reqs, 256), dtype=torch.int32),
    }
    return PackInputs(**{name: tensor.to(device) for name, tensor in cpu.items()})


def bench(steps: int = 15, max_num_reqs: int = 512) -> dict[str, Any]:
    """Rows per (n, lengths), with buffers for `max_num_reqs` requests."""
    device, rows = need_gpu(), []
    tokens = max_num_reqs * (steps + 1)
    layout = PackLayout(1, 16, steps, max_num_reqs, tokens, 4096)
    out = PackBuffers.allocate(max_num_reqs, tokens, steps, device)
    engine = EngineBuffers(
        input_ids=torch.zeros(tokens, dtype=torch.int32, device=device),
        positions=torch.zeros(tokens, dtype=torch.int64, device=device),
        query_start_loc=torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(max_num_reqs, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )
    for num_reqs in SIZES:
        inputs = make_inputs(num_reqs, layout, device)
        for kind in ("full", "random"):
            lens = torch.full((num_reqs,), steps, dtype=torch.int32, device=device)
            if kind == "random":
                lens = torch.randint_like(lens, 0, steps + 1)
            args = (inputs, lens, engine, out, layout)
            rows.append(
                {
                    "n": num_reqs,
                    "K": steps,
                    "lengths": kind,
                    "torch_eager_us": eager_us(lambda args=args: pack_ref(*args))["us"],
                    "kernel_eager_us": eager_us(lambda args=args: pack(*args, steps + 1))["us"],
                    **graph_us(lambda args=args: pack(*args, steps + 1)),
                }
            )
    return report("pack", rows, baseline="pack_ref: torch operations, eager")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15, help="K")
    record = bench(parser.parse_args().steps)
    print_rows(record["rows"])
    print_json(record)
