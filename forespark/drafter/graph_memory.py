"""What memory the drafter's CUDA graphs may take, and what it costs when that is too little.

Graphs come last at start-up, when weights and the KV cache already hold theirs. Running out of
memory in the middle of a capture would end the server; a coarser list of sizes only pads more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed.parallel_state import get_tp_group

from forespark.scheduler.buckets import mean_padding

logger = logging.getLogger("vllm.forespark")
RESERVE = 256 << 20  # bytes left alone: what serving allocates outside its warmed-up pool


def free_bytes(device: torch.device) -> int:
    """Bytes of `device` that graphs may still take; negative where the reserve is touched."""
    torch.accelerator.synchronize()
    # Blocks that PyTorch caches and nobody uses go to a graph's pool only when handed back.
    torch.accelerator.empty_cache()
    return int(torch.accelerator.get_memory_info(device)[0]) - RESERVE


def on_every_rank(value: float) -> int:
    """The smallest `value` of the tensor-parallel ranks, rounded down.

    Ranks that captured different sizes would pad the same step differently, and hang.
    """
    group = get_tp_group()
    least = torch.tensor([math.floor(value)], dtype=torch.int64)
    if group.world_size > 1:
        all_reduce(least, ReduceOp.MIN, group=group.cpu_group)
    return int(least.item())


def say_fewer(name: str, every: Sequence[int], kept: Sequence[int], each: int, room: float) -> None:
    """Warn that of the sizes `every` only `kept` are captured: what it costs, and what works.

    each, room  bytes of one more graph and of what is free for this set
    """
    works = "lower gpu_memory_utilization or max_num_seqs"
    if not kept:
        logger.warning(
            "gpu_memory_utilization: no memory is left for the drafter's %s CUDA graphs, so this "
            "part of every draft is launched kernel by kernel; %s",
            name, works,
        )  # fmt: skip
        return
    logger.warning(
        "gpu_memory_utilization: %.0f MiB are free for the drafter's %s CUDA graphs of %.1f MiB "
        "each, so %d of %d sizes are captured: padding costs %.0f %% of a draft's rows instead of "
        "%.0f %%; %s",
        room / 2**20, name, each / 2**20, len(kept), len(every),
        100 * mean_padding(kept), 100 * mean_padding(every), works,
    )  # fmt: skip
