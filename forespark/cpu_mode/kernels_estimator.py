"""vLLM's own online acceptance estimator: the launches of `spec_decode.acceptance_estimator`.

Only stock adaptive verification uses it. Partial reductions live in column 0, as in
`kernels_rejection`.
"""

from __future__ import annotations

from typing import Any

import torch


def local_max_sumexp(
    local_max: torch.Tensor,  # [rows, blocks], out
    _s0: int,
    local_sumexp: torch.Tensor,  # [rows, blocks], out
    _s1: int,
    logits: torch.Tensor,  # [rows, V] before temperature
    _s2: int,
    idx: torch.Tensor,  # [rows], negative: padding
    _idx_stride: int,
    temperatures: torch.Tensor,  # [slots]
    num_tokens: int,
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Max and sum of exponentials of the tempered draft logits."""
    slots = idx[:num_tokens].long()
    temps = temperatures[slots.clamp(min=0)].float()
    temps = torch.where(temps > 0.0, temps, 1.0)
    rows = logits[:num_tokens].float() / temps.unsqueeze(1)
    top = rows.amax(dim=1)
    local_max[:num_tokens, 0] = top
    local_sumexp[:num_tokens, 0] = (rows - top.unsqueeze(1)).exp_().sum(dim=1)


def predict(
    features: torch.Tensor,  # [slots, K], out
    _s0: int,
    predictions: torch.Tensor,  # [slots, K], out
    _s1: int,
    confidence: torch.Tensor,  # [n, K], out
    _s2: int,
    slope: torch.Tensor,  # [1]
    intercepts: torch.Tensor,  # [K]
    _local_max: torch.Tensor,
    _s3: int,
    local_sumexp: torch.Tensor,  # [rows, blocks]
    _s4: int,
    idx: torch.Tensor,  # [rows]
    _idx_stride: int,
    step: torch.Tensor,  # scalar, or [rows] with per_token_step
    num_tokens: int,
    _blocks: int,
    per_token_step: bool = False,
    NUM_SPECULATIVE_STEPS: int = 1,
    MAX_LOG_ODDS: float = 40.0,
    **_launch: Any,
) -> None:
    """Acceptance probability from the log-odds of the most likely draft token."""
    rows = torch.arange(num_tokens)
    slots = idx[:num_tokens].long()
    rows, slots = rows[slots >= 0], slots[slots >= 0]
    steps = step[:num_tokens].long()[rows] if per_token_step else step.long().expand(len(rows))
    batch = rows // NUM_SPECULATIVE_STEPS if per_token_step else rows
    others = (local_sumexp[rows, 0] - 1.0).clamp_(min=0.0)
    odds = (-others.log()).clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    probability = torch.sigmoid(slope * odds + intercepts[steps])
    features[slots, steps] = odds
    predictions[slots, steps] = probability
    confidence[batch, steps] = probability


def accumulate(
    info: torch.Tensor,  # [K, 3]: sums of w f f, w f, w
    grad: torch.Tensor,  # [K, 2]: sums of r f, r
    idx_mapping: torch.Tensor,  # [n]
    num_sampled: torch.Tensor,  # [n]
    num_rejected: torch.Tensor,  # [n]
    features: torch.Tensor,  # [slots, K]
    _s0: int,
    predictions: torch.Tensor,  # [slots, K]
    _s1: int,
    counts: torch.Tensor,  # [K]
    num_reqs: int,
    **_launch: Any,
) -> None:
    """Add the drafts that verification graded: the accepted ones and the first rejected."""
    slots = idx_mapping[:num_reqs].long()
    accepted = (num_sampled[:num_reqs].long() - 1).clamp(min=0).unsqueeze(1)
    admitted = accepted + num_rejected[:num_reqs].long().unsqueeze(1)
    steps = torch.arange(counts.shape[0]).unsqueeze(0)
    graded = (steps <= accepted) & (steps < admitted)
    feature, predicted = features[slots], predictions[slots]
    weight = torch.where(graded, predicted * (1.0 - predicted), 0.0)
    residual = torch.where(graded, (steps < accepted).float() - predicted, 0.0)
    info += torch.stack([weight * feature * feature, weight * feature, weight], -1).sum(dim=0)
    grad += torch.stack([residual * feature, residual], -1).sum(dim=0)
    counts += graded.float().sum(dim=0)


def refit(
    slope: torch.Tensor,  # [1], in and out
    intercepts: torch.Tensor,  # [K], in and out
    info: torch.Tensor,  # [K, 3], cleared
    _s0: int,
    grad: torch.Tensor,  # [K, 2], cleared
    _s1: int,
    counts: torch.Tensor,  # [K], cleared
    L2: float = 0.0,
    DAMPING: float = 0.0,
    **_launch: Any,
) -> None:
    """One damped Newton step of the shared slope and the per-position intercepts."""
    a, b, c = info[:, 0].sum() + L2, info[:, 1], info[:, 2] + L2
    g0, g1 = grad[:, 0].sum(), grad[:, 1]
    delta = (g0 - (b * g1 / c).sum()) / (a - (b * b / c).sum())
    total = counts.sum()
    delta = delta * total / (total + DAMPING)
    # A slope below zero would rank confident drafts last.
    usable = torch.isfinite(delta) & (slope[0] + delta >= 0.0)
    delta = torch.where(usable, delta, 0.0)
    shift = (g1 - b * delta) / c * counts / (counts + DAMPING)
    slope += delta
    intercepts += torch.nan_to_num(shift)
    for statistics in (info, grad, counts):
        statistics.zero_()
