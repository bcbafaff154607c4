"""The token after the accepted drafts: the bonus token, or the replacement of a rejected draft.

Shares its buffers' meaning with `kernels_rejection` (column 0 describes the row).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.kernels_sampling import argmax_rows
from forespark.cpu_mode.noise import TARGET_STREAM, add_gumbel_, row_keys


def resample(
    best_token: torch.Tensor,  # [n, blocks], out in column 0
    _s0: int,
    _best_score: torch.Tensor,
    _s1: int,
    target_logits: torch.Tensor,  # [rows, V]
    _s2: int,
    target_lse: torch.Tensor,  # [n] of the rejected row
    draft_logits: torch.Tensor | None,  # [slots, K, V]
    _s3: int,
    _s4: int,
    draft_lse: torch.Tensor,  # [n] of the rejected row
    accepted: torch.Tensor,  # [n]
    cu_num_logits: torch.Tensor,  # [n + 1]
    idx: torch.Tensor,  # [rows]
    draft_sampled: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
    seeds: torch.Tensor,  # [slots]
    positions: torch.Tensor,  # [rows]
    log_p: torch.Tensor | None,  # [rows]
    _contexts: torch.Tensor | None,
    _contexts_stride: int,
    _watermarking: torch.Tensor | None,
    _watermarking_skip: torch.Tensor | None,
    _key_0: int,
    _key_1: int,
    vocab_size: int,
    HAS_DRAFT_LOGITS: bool = False,
    USE_FP64: bool = False,
    USE_BLOCK_VERIFICATION: bool = False,
    WATERMARK: bool = False,
    **_launch: Any,
) -> None:
    """Draw the bonus token from the target, a rejected draft's replacement from max(p - q, 0)."""
    if WATERMARK:
        raise ValueError("watermarking: CPU mode does not watermark; leave watermark_config unset")
    dtype = torch.float64 if USE_FP64 else torch.float32
    bounds = cu_num_logits.tolist()
    for request, step in enumerate(accepted.tolist()):
        row = bounds[request] + step
        bonus = row == bounds[request + 1] - 1
        slot = int(idx[row])
        temp = float(temperatures[slot])
        if temp == 0.0 and not bonus:
            continue
        scores = target_logits[row : row + 1, :vocab_size].float()
        rejected = -1 if bonus else int(draft_sampled[row + 1])
        if rejected >= 0 and HAS_DRAFT_LOGITS:
            assert draft_logits is not None
            scores = scores - target_lse[request]
            if USE_BLOCK_VERIFICATION and step > 0:
                assert log_p is not None
                scores += log_p[row - 1]
            ratio = draft_logits[slot, step, :vocab_size].float().div(temp)
            ratio = ratio.sub_(draft_lse[request]).unsqueeze(0).sub_(scores).exp_()
            scores = torch.where(ratio < 1.0, scores + torch.log1p(-ratio), -float("inf"))
        elif rejected >= 0:
            scores = scores.clone()
            scores[0, rejected] = -float("inf")
        if temp != 0.0:
            keys = row_keys(
                seeds[slot : slot + 1].numpy(), positions[row : row + 1].numpy(), TARGET_STREAM
            )
            scores = add_gumbel_(scores.to(dtype, copy=True), keys)
        best_token[request, 0] = int(argmax_rows(scores)[0])


def insert_resampled(
    sampled: torch.Tensor,  # [n, K + 1], in and out
    _s0: int,
    num_sampled: torch.Tensor,  # [n]: accepted on entry, accepted + 1 on exit
    best_token: torch.Tensor,  # [n, blocks], column 0
    _s1: int,
    _best_score: torch.Tensor,
    _s2: int,
    _blocks: int,
    cu_num_logits: torch.Tensor,  # [n + 1]
    idx: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
    **_launch: Any,
) -> None:
    """Append the resampled token; a greedy rejection already holds the target's argmax."""
    accepted = num_sampled.numpy().copy()
    bounds = cu_num_logits.numpy()
    rows = bounds[:-1] + accepted
    resampled = (rows == bounds[1:] - 1) | (temperatures.numpy()[idx.numpy()[rows]] != 0.0)
    where = np.nonzero(resampled)[0]
    sampled.numpy()[where, accepted[where]] = best_token.numpy()[where, 0]
    num_sampled.numpy()[:] = accepted + 1
