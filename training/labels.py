"""Soft acceptance targets and the schedule of draft lengths (section 4.5, appendix A).

alpha_j = sum over v in C_j of min(P_j(v), Q_j(v)): C_j the candidates the selector keeps, P_j the
target's distribution, Q_j the proposal over C_j after the selector's choice. Predecessors are the
sequence's own tokens, because position j matters only where all drafted tokens before it were
accepted, that is, where they equal them.
"""

from __future__ import annotations

import torch


def draft_length(step: int, num_speculative_tokens: int) -> int:
    """Length trained at global step `step` (from 0): K, 1, 2, ..., K - 1, K, 1, ..."""
    return step % num_speculative_tokens or num_speculative_tokens


def acceptance_targets(
    scores: torch.Tensor,  # [..., k] selector scores of the candidates
    candidate_ids: torch.Tensor,  # int64 [..., k]
    target_logits: torch.Tensor,  # [..., V]
    temperature: float = 1.0,
) -> torch.Tensor:
    """alpha f32 [...]: probability that speculative sampling accepts the proposal.

    Temperature 0 is greedy verification: 1 where the chosen candidate is the target's argmax.
    """
    summary = target_summary(target_logits, temperature)
    kept = target_logits.gather(-1, candidate_ids)
    return acceptance_of_kept(scores, candidate_ids, kept, summary, temperature)


def target_summary(target_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What labels need of a whole row [..., V]: argmax int64 [...] (greedy) or log-sum-exp f32."""
    if temperature == 0:
        return target_logits.argmax(-1)
    scaled = target_logits.float() / temperature
    # One fused pass where logsumexp takes several; at the largest entry nothing cancels.
    return scaled.amax(-1) - scaled.log_softmax(-1).amax(-1)


def acceptance_of_kept(
    scores: torch.Tensor,  # [..., k]
    candidate_ids: torch.Tensor,  # int64 [..., k]
    kept_logits: torch.Tensor,  # [..., k] the target's logits of the candidates
    summary: torch.Tensor,  # [...] of `target_summary` at the same temperature
    temperature: float,
) -> torch.Tensor:
    """alpha f32 [...] without another pass over the vocabulary."""
    if temperature == 0:
        chosen = candidate_ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        return (chosen == summary).float()
    target = (kept_logits.float() / temperature - summary[..., None]).exp()
    proposal = (scores.float() / temperature).softmax(-1)
    return torch.minimum(target, proposal).sum(-1)


def valid_slots(
    loss_mask: torch.Tensor,  # [B, S] 1 on supervised tokens
    anchors: torch.Tensor,  # int64 [B, A]
    anchor_valid: torch.Tensor,  # bool [B, A]
    width: int,
) -> torch.Tensor:
    """bool [B, A, w]: slots whose token exists and is supervised, with all slots before them.

    Slot 0, the anchor, predicts nothing and is always excluded.
    """
    steps = torch.arange(width, device=anchors.device)
    position = anchors[..., None] + steps
    inside = position < loss_mask.shape[1]
    flat = position.clamp(max=loss_mask.shape[1] - 1).flatten(1)
    supervised = loss_mask.gather(1, flat).view_as(position) > 0
    alive = (supervised & inside & anchor_valid[..., None]).cumprod(-1).bool()
    alive[..., 0] = False
    return alive
