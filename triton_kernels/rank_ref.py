"""Specification of `rank` in plain torch, and what CPU tensors run."""

from __future__ import annotations

import torch


def rank_ref(
    scores: torch.Tensor,  # f32 [n, K]
    limits: torch.Tensor,  # i32 [n], clipped to 0..K
    budget: int | torch.Tensor,  # integer, or integer tensor [1]
    order: torch.Tensor | None = None,  # i32 [n] request slots, distinct
    floor: int = 0,
) -> torch.Tensor:
    """i32 [n]: how many of the `budget` first entries lie in each row.

    Entries (i, j) with j < limits[i] are ranked by: inside the floor first (j < floor), then higher
    score (NaN counts as -inf, -0 as 0), then lower order[i], then lower j. For rows that never
    increase the winners of a row are a prefix, and the count is its length.
    """
    num_rows, width = scores.shape
    rows = torch.arange(num_rows, device=scores.device)
    by_slot = rows if order is None else torch.argsort(order, stable=True)
    position = torch.arange(width, device=scores.device)
    limit = limits.clamp(0, width)[by_slot, None]
    # 0: inside the floor, 1: eligible, 2: past the limit
    tier = (position >= floor).to(torch.int8) + 2 * (position >= limit).to(torch.int8)
    tier = tier.clamp(max=2).flatten()
    keys = scores[by_slot].nan_to_num(nan=float("-inf"), posinf=None, neginf=None)
    keys = torch.where(scores[by_slot].isinf(), scores[by_slot], keys).flatten()
    # Stable sorts from the least significant key to the most: (slot, position), score, tier.
    ranked = torch.sort(keys, descending=True, stable=True).indices
    ranked = ranked[torch.sort(tier[ranked], stable=True).indices]
    wins = (torch.arange(ranked.numel(), device=scores.device) < budget) & (tier[ranked] < 2)
    owner = by_slot.repeat_interleave(width)[ranked]
    lengths = torch.zeros(num_rows, dtype=torch.int32, device=scores.device)
    return lengths.index_add_(0, owner, wins.to(torch.int32))
