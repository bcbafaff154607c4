"""Rejection sampling: what `spec_decode.rejection_sampler_utils` launches.

The upstream kernels reduce the vocabulary in blocks and hand partial results to each other in
[rows, blocks] buffers. Here every reduction is over the whole row and only column 0 of those
buffers is used: `argmax`, `max` and `sumexp` of column 0 describe the row, so lse = max +
log(sumexp).

Row r of a request with d drafts is draft step r for r < d and the bonus position for r = d; the
draft token judged by row r is `draft_sampled[r + 1]`, -1 meaning "reject". Draft logits are
stored before temperature, target logits after it.
"""

from __future__ import annotations

from typing import Any

import torch

from forespark.cpu_mode.kernels_sampling import argmax_rows


def _row_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [m, V] -> [m], [m]
    top = logits.amax(dim=1)
    shift = torch.where(torch.isfinite(top), top, 0.0)
    return top, (logits - shift.unsqueeze(1)).exp_().sum(dim=1)


def row_lse(maxima: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return maxima[rows, 0] + sums[rows, 0].log()


def _scaled_draft(
    draft_logits: torch.Tensor,  # [slots, K, V]
    slots: torch.Tensor,  # [m]
    steps: torch.Tensor,  # [m]
    temps: torch.Tensor,  # [m]
    vocab_size: int,
) -> torch.Tensor:  # [m, V]
    return draft_logits[slots, steps, :vocab_size].float().div_(temps.unsqueeze(1))


def local_logits_stats(
    target_argmax: torch.Tensor,  # [rows, blocks], out
    _s0: int,
    target_max: torch.Tensor,  # [rows, blocks], out
    _s1: int,
    target_sumexp: torch.Tensor,  # [rows, blocks], out
    _s2: int,
    draft_max: torch.Tensor,  # [rows, blocks], out
    _s3: int,
    draft_sumexp: torch.Tensor,  # [rows, blocks], out
    _s4: int,
    target_logits: torch.Tensor,  # [rows, V]
    _s5: int,
    draft_logits: torch.Tensor | None,  # [slots, K, V]
    _s6: int,
    _s7: int,
    idx: torch.Tensor,  # [rows]
    local_pos: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
    vocab_size: int,
    num_speculative_steps: int,
    HAS_DRAFT_LOGITS: bool = False,
    **_launch: Any,
) -> None:
    """Per row: the argmax for greedy requests, max and sum of exponentials for the others."""
    slots = idx.long()
    temps = temperatures[slots].float()
    judged = local_pos < num_speculative_steps
    greedy = torch.nonzero(judged & (temps == 0.0)).flatten()
    if greedy.numel():
        whole = greedy.numel() == target_logits.shape[0]
        rows = target_logits if whole else target_logits[greedy]
        target_argmax[greedy, 0] = torch.from_numpy(argmax_rows(rows[:, :vocab_size]))
    random = torch.nonzero(judged & (temps != 0.0)).flatten()
    if random.numel() == 0:
        return
    top, total = _row_stats(target_logits[random, :vocab_size].float())
    target_max[random, 0], target_sumexp[random, 0] = top, total
    if HAS_DRAFT_LOGITS:
        assert draft_logits is not None
        draft = _scaled_draft(
            draft_logits, slots[random], local_pos[random].long(), temps[random], vocab_size
        )
        top, total = _row_stats(draft)
        draft_max[random, 0], draft_sumexp[random, 0] = top, total


def log_ratios(
    rows: torch.Tensor,  # [m] rows of logits
    tokens: torch.Tensor,  # [m] draft tokens >= 0
    slots: torch.Tensor,  # [m]
    steps: torch.Tensor,  # [m]
    temps: torch.Tensor,  # [m]
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # logits, max, sumexp
    draft: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:  # [m] log p(token) - log q(token)
    logits, maxima, sums = target
    ratio = logits[rows, tokens].float() - row_lse(maxima, sums, rows)
    if draft is not None:
        logits, maxima, sums = draft
        ratio -= logits[slots, steps, tokens].float() / temps - row_lse(maxima, sums, rows)
    return ratio


def judged_rows(
    cu_num_logits: torch.Tensor,  # [n + 1]
    idx_mapping: torch.Tensor,  # [n]
    draft_sampled: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of non-greedy requests that judge a real draft: (rows, tokens, slots, steps, temps)."""
    counts = (cu_num_logits[1:] - cu_num_logits[:-1]).long()
    slots = torch.repeat_interleave(idx_mapping.long(), counts)
    steps = torch.arange(slots.numel()) - torch.repeat_interleave(cu_num_logits[:-1].long(), counts)
    bonus = steps == torch.repeat_interleave(counts, counts) - 1
    following = torch.cat([draft_sampled[1 : slots.numel()].long(), steps.new_full((1,), -1)])
    temps = temperatures[slots].float()
    rows = torch.nonzero(~bonus & (following >= 0) & (temps != 0.0)).flatten()
    return rows, following[rows], slots[rows], steps[rows], temps[rows]


def cumulative_log_p(
    output: torch.Tensor,  # [rows], out: min(running log ratio, 0)
    target_logits: torch.Tensor,
    _s0: int,
    target_max: torch.Tensor,
    _s1: int,
    target_sumexp: torch.Tensor,
    _s2: int,
    draft_sampled: torch.Tensor,
    draft_logits: torch.Tensor | None,
    _s3: int,
    _s4: int,
    draft_max: torch.Tensor,
    _s5: int,
    draft_sumexp: torch.Tensor,
    _s6: int,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperatures: torch.Tensor,
    _blocks: int,
    HAS_DRAFT_LOGITS: bool = False,
    **_launch: Any,
) -> None:
    """Running joint ratio of block verification (Sun et al. 2024); placeholders carry it on."""
    rows, tokens, slots, steps, temps = judged_rows(
        cu_num_logits, idx_mapping, draft_sampled, temperatures
    )
    draft = (draft_logits, draft_max, draft_sumexp) if HAS_DRAFT_LOGITS else None
    target = (target_logits, target_max, target_sumexp)
    ratios = torch.zeros(output.shape[0])
    ratios[rows] = log_ratios(rows, tokens, slots, steps, temps, target, draft)
    bounds = cu_num_logits.tolist()
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        running = 0.0
        for row in range(start, end - 1):
            running = min(running + float(ratios[row]), 0.0)
            output[row] = running


def local_residual_mass(
    output: torch.Tensor,  # [rows, blocks], out
    _s0: int,
    log_p: torch.Tensor,  # [rows]
    target_logits: torch.Tensor,
    _s1: int,
    target_max: torch.Tensor,
    _s2: int,
    target_sumexp: torch.Tensor,
    _s3: int,
    draft_logits: torch.Tensor,
    _s4: int,
    _s5: int,
    draft_max: torch.Tensor,
    _s6: int,
    draft_sumexp: torch.Tensor,
    _s7: int,
    draft_sampled: torch.Tensor,
    idx: torch.Tensor,
    local_pos: torch.Tensor,
    temperatures: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    _blocks: int,
    **_launch: Any,
) -> None:
    """Sum over tokens of max(p * target - draft, 0) at every row after the first of a request."""
    last = idx.shape[0] - 1
    temps = temperatures[idx.long()].float()
    judged = (local_pos > 0) & (local_pos < num_speculative_steps) & (temps != 0.0)
    judged[last] = False
    judged[:last] &= draft_sampled[1 : last + 1] >= 0
    rows = torch.nonzero(judged).flatten()
    if rows.numel() == 0:
        return
    target = target_logits[rows, :vocab_size].float()
    target = target - row_lse(target_max, target_sumexp, rows).unsqueeze(1)
    draft = _scaled_draft(
        draft_logits, idx[rows].long(), local_pos[rows].long(), temps[rows], vocab_size
    )
    draft -= row_lse(draft_max, draft_sumexp, rows).unsqueeze(1)
    joint = log_p[rows - 1].exp().unsqueeze(1)
    output[rows, 0] = (joint * target.exp_() - draft.exp_()).clamp_(min=0.0).sum(dim=1)
