"""The accept/reject decision of rejection sampling, one request at a time.

Shares its buffers' meaning with `kernels_rejection` (column 0 describes the row).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.kernels_rejection import judged_rows, log_ratios, row_lse
from forespark.cpu_mode.noise import ACCEPT_STREAM, row_keys, row_uniform


def accept_thresholds(
    seeds: torch.Tensor,  # [slots]
    slots: torch.Tensor,  # [rows]
    positions: torch.Tensor,  # [rows]
) -> np.ndarray:  # [rows] uniforms in (0, 1)
    """The uniform that decides about the draft judged by each row."""
    keys = row_keys(seeds.numpy()[slots.numpy()], positions.numpy(), ACCEPT_STREAM)
    return row_uniform(keys)


def rejection(
    sampled: torch.Tensor,  # [n, K + 1], out
    _s0: int,
    accepted: torch.Tensor,  # [n], out: accepted drafts
    target_rejected_lse: torch.Tensor,  # [n], out: normaliser of the row that rejected
    draft_rejected_lse: torch.Tensor,  # [n], out
    target_logits: torch.Tensor,  # [rows, V]
    _s1: int,
    target_argmax: torch.Tensor,
    _s2: int,
    target_max: torch.Tensor,
    _s3: int,
    target_sumexp: torch.Tensor,
    _s4: int,
    draft_sampled: torch.Tensor,  # [rows]
    draft_logits: torch.Tensor | None,  # [slots, K, V]
    _s5: int,
    _s6: int,
    draft_max: torch.Tensor,
    _s7: int,
    draft_sumexp: torch.Tensor,
    _s8: int,
    cu_num_logits: torch.Tensor,  # [n + 1]
    idx_mapping: torch.Tensor,  # [n]
    temperatures: torch.Tensor,  # [slots]
    seeds: torch.Tensor,  # [slots]
    positions: torch.Tensor,  # [rows]
    synthetic_rates: torch.Tensor | None,  # [K]
    log_p: torch.Tensor | None,  # [rows]
    residual_mass: torch.Tensor | None,  # [rows, blocks]
    _s9: int,
    _blocks: int,
    HAS_DRAFT_LOGITS: bool = False,
    SYNTHETIC_MODE: bool = False,
    USE_BLOCK_VERIFICATION: bool = False,
    **_launch: Any,
) -> None:
    """Accept drafts while they pass; a greedy request then stores the target's argmax."""
    bounds = cu_num_logits.tolist()
    drafts = draft_sampled.tolist()
    greedy = (temperatures[idx_mapping.long()] == 0.0).tolist()
    argmax = target_argmax[:, 0].tolist() if any(greedy) else []
    draft = (draft_logits, draft_max, draft_sumexp) if HAS_DRAFT_LOGITS else None
    target = (target_logits, target_max, target_sumexp)
    thresholds: np.ndarray | None = None
    if SYNTHETIC_MODE or not all(greedy):
        counts = (cu_num_logits[1:] - cu_num_logits[:-1]).long()
        slots = torch.repeat_interleave(idx_mapping.long(), counts)
        thresholds = accept_thresholds(seeds, slots, positions[: slots.numel()])
    ratios: dict[int, float] = {}
    if not all(greedy) and not USE_BLOCK_VERIFICATION and not SYNTHETIC_MODE:
        rows, tokens, slots, steps, temps = judged_rows(
            cu_num_logits, idx_mapping, draft_sampled, temperatures
        )
        values = log_ratios(rows, tokens, slots, steps, temps, target, draft)
        ratios = dict(zip(rows.tolist(), values.tolist(), strict=True))

    for request, is_greedy in enumerate(greedy):
        start, end = bounds[request], bounds[request + 1]
        tokens_out: list[int] = []
        count = 0
        for step, row in enumerate(range(start, end - 1)):
            token = drafts[row + 1]
            if token < 0 and not is_greedy:
                break
            if USE_BLOCK_VERIFICATION and not is_greedy:
                assert log_p is not None and thresholds is not None
                following = drafts[row + 2] if row + 2 < end else -1
                mass = _block_threshold(row, following, log_p, residual_mass, target)
                tokens_out.append(token)
                count = step + 1 if thresholds[row] <= mass else count
                continue
            if SYNTHETIC_MODE:
                assert synthetic_rates is not None and thresholds is not None
                passed = token >= 0 and thresholds[row] < float(synthetic_rates[step])
            elif is_greedy:
                passed = token == argmax[row]
            else:
                assert thresholds is not None
                passed = ratios[row] > np.log(thresholds[row])
            tokens_out.append(argmax[row] if is_greedy and not passed else token)
            if not passed:
                break
            count += 1
        sampled[request, : len(tokens_out)] = torch.tensor(tokens_out, dtype=sampled.dtype)
        accepted[request] = count
        if not is_greedy and count < end - 1 - start:
            rejected = torch.tensor([start + count])
            target_rejected_lse[request] = row_lse(target_max, target_sumexp, rejected)[0]
            if draft is not None:
                draft_rejected_lse[request] = row_lse(draft_max, draft_sumexp, rejected)[0]


def _block_threshold(
    row: int,
    following: int,  # the next draft token, -1 at the end of the block
    log_p: torch.Tensor,
    residual_mass: torch.Tensor | None,
    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> float:
    """h of block verification: the block up to `row` is kept when the uniform is at most h."""
    joint = float(log_p[row].exp())
    if following < 0:
        return joint
    if residual_mass is not None:
        mass = float(residual_mass[row + 1, 0])
    else:
        # A one-hot draft leaves p * (1 - target(following)) of residual mass.
        logits, maxima, sums = target
        lse = row_lse(maxima, sums, torch.tensor([row + 1]))[0]
        mass = joint * (1.0 - float((logits[row + 1, following].float() - lse).exp()))
    denominator = mass + 1.0 - joint
    return mass / denominator if denominator > 0.0 else 1.0
