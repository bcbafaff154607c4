"""Top-k and top-p without sorting the vocabulary.

The kept tokens are nearly always among the first thousand, so only those are put in order; a row
whose nucleus reaches further is sorted whole. Tokens that tie with the last kept one are kept.
"""

from __future__ import annotations

import torch

CANDIDATES = 1024


def _kept(
    logits: torch.Tensor,  # [m, V]
    k: torch.Tensor,  # [m] 1..V
    p: torch.Tensor,  # [m], inf = off
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logit of the last kept token, whether the candidates were enough to find it), both [m]."""
    best = logits.topk(candidates, dim=1).values  # [m, candidates], descending
    beyond_k = torch.arange(candidates) >= k.unsqueeze(1)
    best = best.masked_fill(beyond_k, -float("inf"))
    # Top-p counts the mass of what top-k left; without top-k that is the whole row.
    whole = k >= logits.shape[1]
    mass = torch.logsumexp(best, dim=1)
    if bool(whole.any()):
        mass[whole] = torch.logsumexp(logits[whole], dim=1)
    reached = (best - mass.unsqueeze(1)).exp_().cumsum(dim=1)
    before = torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], dim=1)
    keep = (before < p.unsqueeze(1)) & ~beyond_k
    keep[:, 0] = True
    count = keep.sum(dim=1)
    found = (count < candidates) | (k <= candidates) | (reached[:, -1] >= p)
    return best.gather(1, count.unsqueeze(1) - 1).squeeze(1), found


def apply_top_k_top_p(
    logits: torch.Tensor,  # [rows, V], changed in place
    k: torch.Tensor | None,  # [rows], V = off
    p: torch.Tensor | None,  # [rows], 1 = off
) -> torch.Tensor:
    """Keep the k most likely tokens, then the smallest set of them holding p of their mass."""
    rows, vocab = logits.shape
    top_k = torch.full((rows,), vocab) if k is None else k.long()
    top_p = torch.ones(rows) if p is None else p.float()
    active = torch.nonzero((top_k < vocab) | (top_p < 1.0)).flatten()
    if active.numel() == 0:
        return logits
    # Rounding may bring the running mass to 1 early: without top-p nothing may be dropped.
    top_k, top_p = top_k[active], top_p[active].masked_fill(top_p[active] >= 1.0, float("inf"))
    part = logits if active.numel() == rows else logits[active]
    limited = top_k[top_k < vocab]
    widest = int(limited.max()) if limited.numel() == top_k.numel() else CANDIDATES
    floor, found = _kept(part, top_k, top_p, min(max(widest, 1), vocab))
    missed = torch.nonzero(~found).flatten()
    if missed.numel():
        floor[missed] = _kept(part[missed], top_k[missed], top_p[missed], vocab)[0]
    dropped = part < floor.unsqueeze(1)
    if part is logits:
        return logits.masked_fill_(dropped, -float("inf"))
    logits[active] = part.masked_fill_(dropped, -float("inf"))
    return logits
