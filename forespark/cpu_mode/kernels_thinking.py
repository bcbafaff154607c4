"""The thinking-token budget: force the end of reasoning once the budget is spent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_FORCED = 1.0e9


def _last_match(tokens: np.ndarray, marker: np.ndarray, first: int) -> int:
    """Last position >= first where the marker starts, -1 without one."""
    if len(tokens) - first < len(marker):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens[first:], len(marker))
    hits = np.nonzero((windows == marker).all(axis=1))[0]
    return -1 if hits.size == 0 else int(hits[-1]) + first


def update_marker_cache(
    req_ids: torch.Tensor,  # [n] slots
    budget: torch.Tensor,  # [slots], negative = off
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    total_len: torch.Tensor,  # [slots]
    last_start: torch.Tensor,  # [slots], in and out
    last_end: torch.Tensor,  # [slots], in and out
    scan_pos: torch.Tensor,  # [slots], in and out
    start_ids: torch.Tensor,  # [start marker]
    natural_end_ids: torch.Tensor,  # [end marker]
    MAX_LEN: int = 1,
    **_launch: Any,
) -> None:
    """Remember where reasoning last started and ended among the committed tokens."""
    for slot in req_ids.tolist():
        if int(budget[slot]) < 0:
            continue
        total = int(total_len[slot])
        first = int(scan_pos[slot])
        start, end = int(last_start[slot]), int(last_end[slot])
        if first > total:  # the slot was reused by a shorter request
            first, start, end = 0, -1, -1
        tokens = all_token_ids[slot, :total].numpy()
        start = max(start, _last_match(tokens, start_ids.numpy(), first))
        end = max(end, _last_match(tokens, natural_end_ids.numpy(), first))
        last_start[slot], last_end[slot] = start, end
        scan_pos[slot] = max(total - (MAX_LEN - 1), 0)


def thinking_budget(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    idx: torch.Tensor,  # [rows]
    budget: torch.Tensor,  # [slots]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    total_len: torch.Tensor,  # [slots]
    input_ids: torch.Tensor,  # [rows]
    local_pos: torch.Tensor,  # [rows]
    last_start: torch.Tensor,  # [slots]
    last_end: torch.Tensor,  # [slots]
    start_ids: torch.Tensor,  # [start marker]
    natural_end_ids: torch.Tensor,  # [end marker]
    forced_end_ids: torch.Tensor,  # [forced end marker]
    **_launch: Any,
) -> None:
    """Where the budget is spent, force the next token of the end marker."""
    local, inputs = local_pos.tolist(), input_ids.numpy()
    opening, closing = start_ids.numpy(), natural_end_ids.numpy()
    forced = forced_end_ids.tolist()
    for row, slot in enumerate(idx.tolist()):
        limit = int(budget[slot])
        if limit < 0:
            continue
        total = int(total_len[slot])
        drafted = inputs[row - local[row] + 1 : row + 1]
        tokens = np.concatenate([all_token_ids[slot, :total].numpy(), drafted])
        first = max(total - len(opening) + 1, 0)
        start = max(int(last_start[slot]), _last_match(tokens, opening, first))
        first = max(total - len(closing) + 1, 0)
        end = max(int(last_end[slot]), _last_match(tokens, closing, first))
        if start < 0 or start <= end or len(tokens) - start - len(opening) < limit:
            continue
        # Continue an end marker that the text already begins.
        begun = 0
        for length in range(1, min(len(forced) - 1, len(tokens)) + 1):
            if tokens[len(tokens) - length :].tolist() == forced[:length]:
                begun = length
        logits[row, forced[begun]] = _FORCED
