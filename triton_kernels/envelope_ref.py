"""Specification of `envelope` in plain torch, and what CPU tensors run."""

from __future__ import annotations

import torch


def envelope_ref(
    logits: torch.Tensor,  # f32 [n, K (K + 1) / 2], or [n, K] when directional
    num_speculative_tokens: int,
    scale: torch.Tensor | None = None,  # f32, one per logit
    bias: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,  # i32 [n]: longest draft of each request
    single_curve: bool = False,
    directional: bool = False,
) -> torch.Tensor:
    """f32 [n, K]: slopes of the least concave non-decreasing function above R on {0..limit}.

    Row d of the triangle starts at d (d - 1) / 2; R(d) sums the running products of its acceptance
    probabilities. The scores never increase along a row (exactly, in floats too), are clamped at 0
    and are 0 past the limit. A NaN among the logits that are read makes the whole row NaN.
    """
    steps = num_speculative_tokens
    if scale is not None:
        logits = logits * scale
    if bias is not None:
        logits = logits + bias
    accept = torch.sigmoid(logits)
    column = torch.arange(steps, device=logits.device)
    past = column >= steps if limits is None else column >= limits[:, None]
    if single_curve or directional:
        # Every row is a prefix of one curve: R is concave and its slopes are the curve itself.
        scores = accept[:, -steps:].cumprod(dim=-1)
        broken = scores[:, -1:].isnan()
    else:
        start = (column * (column + 1) // 2)[:, None]  # row d = column + 1
        inside = column <= column[:, None]
        curves = accept[:, torch.where(inside, start + column, 0)].cumprod(dim=-1)
        reward = curves.where(inside, 0.0).sum(dim=-1)
        reward = torch.nn.functional.pad(reward, (1, 0))
        broken = reward.sum(dim=-1, keepdim=True).isnan()
        scores = _slopes(reward, limits)
    scores = scores.masked_fill(past, 0.0)
    return scores.masked_fill(broken, float("nan"))


def _slopes(reward: torch.Tensor, limits: torch.Tensor | None) -> torch.Tensor:
    """f32 [n, K] from R f32 [n, K + 1]: min over a < d of max over d <= b <= limit of the slope."""
    points = torch.arange(reward.shape[1], device=reward.device)
    run = points - points[:, None]  # [a, b]
    usable = run > 0 if limits is None else (run > 0) & (points <= limits[:, None, None])
    slope = (reward[:, None, :] - reward[:, :, None]) / run.clamp(min=1)
    steepest = slope.where(usable, float("-inf")).flip(-1).cummax(dim=-1).values.flip(-1)
    return steepest.where(run > 0, float("inf")).amin(dim=1)[:, 1:].clamp(min=0.0)
