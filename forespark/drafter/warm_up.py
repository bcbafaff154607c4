"""Compiles what plans a step, on device and host, before the server is ready."""

from __future__ import annotations

from typing import Any

import torch

from forespark.scheduler.fast import compile_all
from forespark.triton_kernels.rank import rank


def warm_up_planning(speculator: Any) -> None:
    """The host's loops and the scores once, both rankings at every power of two of requests.

    Each of those sizes has code of its own.
    """
    device, steps = speculator.device, speculator.num_speculative_steps
    compile_all(steps)
    most = speculator.max_num_reqs
    limits = torch.full((most,), steps, dtype=torch.int32, device=device)
    lengths = torch.zeros_like(limits)
    slots = torch.arange(most, dtype=torch.int32, device=device)
    scores = torch.zeros(most, steps, device=device)
    if speculator.estimators is not None:
        few = slice(0, min(2, most))
        anchors = torch.zeros(most, dtype=torch.int64, device=device)[few]
        context = torch.zeros_like(speculator.hidden_states[few])
        with torch.inference_mode():
            speculator.estimators.scores(context, anchors, limits[few], scores[few])
    sizes = sorted({most, *(1 << k for k in range(most.bit_length()))})
    floor = speculator.config.scheduler.min_draft_len
    for size in sizes:
        rows = slice(0, size)
        for least in {0, floor}:  # drafts are ranked with the floor, verification without
            rank(scores[rows], limits[rows], 1, lengths[rows], slots[rows], least)
