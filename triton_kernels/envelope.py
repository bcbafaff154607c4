"""Survival scores of every request in one launch: logits to slopes of the concave envelope.

One program, one warp, per request; nothing but the logits is read and nothing but the scores is
written. The triangle sits in a [draft length, position] tile: a running product along a row gives
the survival curve, its sum the reward R(d). The slopes come from the max-min form

    g[d] = min over a < d of max over b >= d of (R(b) - R(a)) / (b - a),

clamped at 0, which never increases in d exactly and not only up to rounding: a larger d takes its
maxima over fewer b and its minimum over more a. A single curve needs no envelope (its R is concave
and g is the curve), so that path is a running product over a tile of several requests.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import next_power_of_2, tl, triton
from forespark.triton_kernels.checks import check_tensor, runs_on_gpu
from forespark.triton_kernels.envelope_ref import envelope_ref

MAX_STEPS = 31  # the tile is 32 x 32 then
CURVES_PER_PROGRAM = 8


@triton.jit
def _accept(
    logits_ptr, scale_ptr, bias_ptr, request, index, mask, stride, CALIBRATED: tl.constexpr
):
    # sigma(a z + b), and 1 where masked so that running products pass through
    logit = tl.load(logits_ptr + request * stride + index, mask=mask, other=0.0)
    if CALIBRATED:
        logit = logit * tl.load(scale_ptr + index, mask=mask, other=0.0)
        logit += tl.load(bias_ptr + index, mask=mask, other=0.0)
    return tl.where(mask, 1.0 / (1.0 + tl.exp(-logit)), 1.0)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _smaller(left, right):
    return tl.minimum(left, right)


@triton.jit
def _triangle_kernel(
    logits_ptr,  # f32 [n, K (K + 1) / 2]
    scale_ptr,
    bias_ptr,
    limits_ptr,  # i32 [n]
    scores_ptr,  # f32 [n, K]
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two > STEPS
    CALIBRATED: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if HAS_LIMITS:
        limit = tl.minimum(tl.load(limits_ptr + request), STEPS)
    else:
        limit = STEPS
    draft = tl.arange(0, BLOCK)[:, None]  # draft length, 0..K
    column = tl.arange(0, BLOCK)[None, :]
    mask = (column < draft) & (draft <= STEPS)
    index = draft * (draft - 1) // 2 + column
    size: tl.constexpr = STEPS * (STEPS + 1) // 2
    accept = _accept(
        logits_ptr, scale_ptr, bias_ptr, request, index, mask, size, CALIBRATED=CALIBRATED
    )
    reward = tl.sum(tl.where(mask, tl.cumprod(accept, axis=1), 0.0), axis=1)

    # slope[a, b] of the chord from a to b, then steepest[a, d] = its maximum over b >= d
    rise = reward[None, :] - reward[:, None]
    run = tl.maximum(column - draft, 1).to(tl.float32)
    reachable = (column > draft) & (column <= limit)
    slope = tl.where(reachable, rise / run, float("-inf"))
    steepest = tl.associative_scan(slope, 1, _larger, reverse=True)
    scores = tl.min(tl.where(draft < column, steepest, float("inf")), axis=0)
    scores = tl.maximum(scores, 0.0)
    total = tl.sum(reward, axis=0)
    scores = tl.where(total == total, scores, float("nan"))
    at = tl.arange(0, BLOCK)
    tl.store(scores_ptr + request * STEPS + at - 1, scores, mask=(at > 0) & (at <= STEPS))


@triton.jit(do_not_specialize=["num_requests"])
def _curve_kernel(
    logits_ptr,  # f32 [n, stride], the curve in the last K columns
    scale_ptr,
    bias_ptr,
    limits_ptr,
    scores_ptr,
    num_requests,
    stride,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CALIBRATED: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_requests
    request = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = in_rows[:, None] & (column < STEPS)
    index = stride - STEPS + column
    accept = _accept(
        logits_ptr, scale_ptr, bias_ptr, request, index, mask, stride, CALIBRATED=CALIBRATED
    )
    curve = tl.cumprod(accept, axis=1)
    total = tl.sum(curve, axis=1)
    # A parallel product rounds each prefix on its own, so a later one can come out an ulp larger.
    curve = tl.associative_scan(curve, 1, _smaller)
    if HAS_LIMITS:
        limit = tl.load(limits_ptr + row, mask=in_rows, other=0)
        curve = tl.where(column < limit[:, None], curve, 0.0)
    scores = tl.where((total == total)[:, None], curve, float("nan"))
    tl.store(scores_ptr + request * STEPS + column, scores, mask=mask)


def launch_envelope(
    logits: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    limits: torch.Tensor | None,
    scores: torch.Tensor,
    single_curve: bool = False,
    directional: bool = False,
    num_warps: int = 1,
) -> torch.Tensor:
    """Launch the kernel on arguments that `envelope` has checked."""
    num_requests, steps = scores.shape
    if num_requests == 0:
        return scores
    calibration = (logits if scale is None else scale, logits if bias is None else bias)
    lengths = scores if limits is None else limits
    flags = {"CALIBRATED": scale is not None, "HAS_LIMITS": limits is not None}
    if single_curve or directional:
        _curve_kernel[(triton.cdiv(num_requests, CURVES_PER_PROGRAM),)](
            logits,
            *calibration,
            lengths,
            scores,
            num_requests,
            logits.shape[1],
            STEPS=steps,
            BLOCK=next_power_of_2(steps),
            ROWS=CURVES_PER_PROGRAM,
            num_warps=num_warps,
            **flags,
        )
    else:
        _triangle_kernel[(num_requests,)](
            logits,
            *calibration,
            lengths,
            scores,
            STEPS=steps,
            BLOCK=next_power_of_2(steps + 1),
            num_warps=num_warps,
            **flags,
        )
    return scores


def envelope(
    logits: torch.Tensor,  # f32 [n, K (K + 1) / 2], or [n, K] when directional
    scale: torch.Tensor | None,  # f32 [logits per request]; None with bias None: not calibrated
    bias: torch.Tensor | None,
    limits: torch.Tensor | None,  # i32 [n]: longest draft of each request; None: K
    scores: torch.Tensor,  # f32 [n, K], written
    single_curve: bool = False,  # row K of the triangle for every length
    directional: bool = False,  # the logits are one row
) -> torch.Tensor:
    """Write g, the scores of tokens 1..K of every request, to `scores` and return it.

    g never increases along a row and is >= 0; it is 0 past the limit, and lengths past the limit
    take no part in the envelope. A NaN among the logits that are read makes the request's whole row
    NaN, for `check_finite` to find. K <= 31. One launch that a CUDA graph can capture; CPU tensors
    run `envelope_ref`. Raises ValueError on any other argument.
    """
    num_requests, steps = scores.shape if scores.dim() == 2 else (-1, -1)
    device = scores.device
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(
            f"envelope: scores {list(scores.shape)}; [n, K] with K 1..{MAX_STEPS} work"
        )
    width = steps if directional else steps * (steps + 1) // 2
    check_tensor("envelope", "scores", scores, torch.float32, (num_requests, steps), device)
    check_tensor("envelope", "logits", logits, torch.float32, (num_requests, width), device)
    if (scale is None) != (bias is None):
        raise ValueError("envelope: scale and bias come together, or neither")
    if scale is not None and bias is not None:
        check_tensor("envelope", "scale", scale, torch.float32, (width,), device)
        check_tensor("envelope", "bias", bias, torch.float32, (width,), device)
    if limits is not None:
        check_tensor("envelope", "limits", limits, torch.int32, (num_requests,), device)
    if not runs_on_gpu("envelope", scores):
        return scores.copy_(
            envelope_ref(logits, steps, scale, bias, limits, single_curve, directional)
        )
    return launch_envelope(logits, scale, bias, limits, scores, single_curve, directional)
