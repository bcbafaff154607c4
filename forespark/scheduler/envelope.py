"""Survival scores (section 4.3): slopes of the least concave function above the reward.

g[d] = F(d) - F(d - 1), with F the least concave function above R on {0..K}. Where one more token
earns little but opens a larger gain later, F spreads that gain evenly over the tokens between, so
that picking the largest scores never stops early. Where R falls past its peak the slopes of F are
negative; they are clamped at 0, which makes F the least concave *non-decreasing* function above R:
a token that is drafted there is worth nothing, and no schedule is paid for dropping it.

The vectorised form is the max-min formula for the slopes of a concave majorant,

    g[d] = min_{a < d} max_{b >= d} (R(b) - R(a)) / (b - a).

Both forms give scores that never increase in d, exactly and not only up to rounding: a larger d
takes its maxima over fewer b and its minimum over more a. One NaN in a reward row makes the whole
row of scores NaN, so that `check_finite` can name the layer it came from.
"""

from __future__ import annotations

import numpy as np
import torch

from forespark.core import FloatArray


def envelope_scores(rewards: torch.Tensor) -> torch.Tensor:
    """f32 [n, K] scores g, non-increasing and >= 0, from rewards [n, K + 1].

    Runs on the device of `rewards` in O(K^2) per row without a sync (n K^2 floats of scratch).
    """
    rewards = rewards.float()
    steps = torch.arange(rewards.shape[-1], device=rewards.device)
    start, stop = steps[:, None], steps[None, :]
    rise = rewards[:, None, :] - rewards[:, :, None]
    slope = (rise / (stop - start).clamp(min=1)).masked_fill(stop <= start, float("-inf"))
    steepest = slope.flip(-1).cummax(dim=-1).values.flip(-1)  # [n, a, d]: over b >= d
    scores = steepest.masked_fill(start >= stop, float("inf")).amin(dim=1)
    return scores[:, 1:].clamp(min=0.0)


def envelope(rewards: torch.Tensor) -> torch.Tensor:
    """f32 [n, K + 1]: F, the least concave non-decreasing function above rewards [n, K + 1]."""
    gained = envelope_scores(rewards).cumsum(dim=-1)
    return torch.nn.functional.pad(gained, (1, 0)) + rewards[:, :1].float()


def envelope_scores_np(rewards: FloatArray) -> FloatArray:
    """float64 [n, K] scores of rewards [n, K + 1]: the plain O(K) upper hull, row by row."""
    rewards = np.asarray(rewards, dtype=np.float64)
    scores = np.full((rewards.shape[0], rewards.shape[1] - 1), np.nan)
    for row, curve in enumerate(rewards):
        if not np.isnan(curve).any():
            scores[row] = _hull_slopes(curve)
    return scores


def _hull_slopes(curve: FloatArray) -> FloatArray:
    """float64 [K]: slopes of the upper hull of the points (d, curve[d]), clamped at 0."""
    corners = [0]
    slopes: list[float] = []
    for point in range(1, curve.size):
        slope = float(curve[point] - curve[corners[-1]]) / (point - corners[-1])
        while slopes and slope >= slopes[-1]:
            corners.pop()
            slopes.pop()
            slope = float(curve[point] - curve[corners[-1]]) / (point - corners[-1])
        corners.append(point)
        slopes.append(slope)
    return np.repeat(np.maximum(slopes, 0.0), np.diff(corners))


def check_finite(scores: FloatArray | torch.Tensor, layer: str) -> None:
    """Raise ValueError naming `layer` when a score is NaN or infinite (a GPU tensor syncs here)."""
    host = scores.detach().cpu().numpy() if isinstance(scores, torch.Tensor) else scores
    bad = np.argwhere(~np.isfinite(host))
    if bad.size:
        at = tuple(int(index) for index in bad[0])
        raise ValueError(
            f"{layer}: {len(bad)} of {host.size} scores are not finite, the first at {at} "
            f"({host[at]}); check the layer's weights and calibration"
        )
