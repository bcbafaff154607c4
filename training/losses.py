"""The three terms of L = L_DFlash2 + lambda_pre L_pre + lambda_post L_post (section 4.5).

L_DFlash2 is speculators' own: weighted unary losses plus the selector's cross-entropy, decayed by
position. Rows here are only the valid slots of a batch, so nothing is spent on padding.
"""

from __future__ import annotations

from functools import partial

import torch
from speculators.losses import LossConfig, compound_loss, dflash_loss_decay, loss_function
from speculators.models.dflash2.metrics import selector_training_candidates
from torch.nn import functional


def selector_cross_entropy(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Cross-entropy [1, n] of candidate scores [1, n, k] against the target's rank [1, n]."""
    return functional.cross_entropy(scores[0].float(), positions[0], reduction="none")[None]


def drafter_loss(
    unary_logits: torch.Tensor,  # [1, n, V]
    targets: torch.Tensor,  # [1, n, V] the target's logits
    candidate_ids: torch.Tensor,  # int64 [1, n, k] unary top-k
    score_candidates: object,  # callable: candidate ids [1, n, k] -> scores [1, n, k]
    slots: torch.Tensor,  # int64 [1, n] slot of each row in its block, 1..K
    *,
    loss_config: LossConfig,
    gamma: float,
    selector_weight: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """L_DFlash2 and its parts; equal to speculators' DFlash2 loss on the same anchors."""
    mask = torch.ones_like(slots)
    decay = partial(dflash_loss_decay, gamma=gamma)
    unary, parts = compound_loss(unary_logits, targets, mask, slots, loss_config, decay)
    target_ids = targets.argmax(-1)
    training_ids, ranks, contained = selector_training_candidates(candidate_ids, target_ids)
    selector = loss_function(
        score_candidates(training_ids),  # type: ignore[operator]
        ranks,
        mask,
        slots,
        loss_fn=selector_cross_entropy,
        decay_fn=decay,
    )
    parts["unary_loss"], parts["selector_loss"] = unary.detach(), selector.detach()
    parts["candidate_recall"] = contained.float().mean()
    return unary + selector_weight * selector, parts


def pre_draft_loss(
    logits: torch.Tensor,  # f32 [m, d] the trained row of the triangle, one row per anchor
    targets: torch.Tensor,  # f32 [m, d] alpha
    valid: torch.Tensor,  # bool [m, d]
) -> torch.Tensor:
    """L_pre: mean binary cross-entropy over the valid positions of one draft length."""
    weight = valid.float()
    loss = functional.binary_cross_entropy_with_logits(logits, targets, weight, reduction="sum")
    return loss / weight.sum().clamp(min=1.0)


def post_draft_loss(
    logits: torch.Tensor,  # f32 [n]
    targets: torch.Tensor,  # f32 [n] alpha
    slots: torch.Tensor,  # int64 [n] 1..K; the anchor (slot 0) is not among the rows
    gamma: float,
) -> torch.Tensor:
    """L_post: binary cross-entropy weighted by exp(-(j - 1) / gamma), as the drafter's loss."""
    weight = dflash_loss_decay(slots.float(), gamma)
    loss = functional.binary_cross_entropy_with_logits(logits, targets, weight, reduction="sum")
    return loss / weight.sum().clamp(min=1e-6)
