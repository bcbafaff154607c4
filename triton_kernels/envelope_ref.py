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
    probabilities. F(d) is the highest chord over d, max over a <= d <= b of the line through
    (a, R(a)) and (b, R(b)); the scores are its differences, clamped at 0, and 0 past the limit.
    A NaN among the logits that are read makes the request's whole row NaN.
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
        reward = logits.new_zeros(logits.shape[0], steps + 1)
        for draft in range(1, steps + 1):
            start = draft * (draft - 1) // 2
            reward[:, draft] = accept[:, start : start + draft].cumprod(dim=-1).sum(dim=-1)
        broken = reward.sum(dim=-1, keepdim=True).isnan()
        scores = _slopes(reward, limits)
    scores = scores.masked_fill(past, 0.0)
    return scores.masked_fill(broken, float("nan"))


def _slopes(reward: torch.Tensor, limits: torch.Tensor | None) -> torch.Tensor:
    """f32 [n, K] from R f32 [n, K + 1], through F itself."""
    points = torch.arange(reward.shape[1], device=reward.device)
    left, right, at = points[:, None, None], points[None, :, None], points[None, None, :]
    share = (at - left) / (right - left).clamp(min=1)  # 0 at a, 1 at b
    # float64, so that the differences of F lose nothing to cancellation
    value = reward.double().nan_to_num()
    chords = value[:, :, None, None] * (1 - share) + value[:, None, :, None] * share
    valid = (left <= at) & (at <= right)
    if limits is not None:
        valid = valid & (right <= limits[:, None, None, None])
    hull = chords.masked_fill(~valid, float("-inf")).amax(dim=(1, 2))
    rising = hull.diff(dim=-1).nan_to_num(nan=0.0, neginf=0.0).clamp(min=0.0)
    return rising.to(reward.dtype)
