"""Turning rows of logits into tokens and log-probabilities.

Rows of logits are [rows, V] in fp32 after vLLM's own cast; `idx` maps a row to its request slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.noise import DRAFT_STREAM, TARGET_STREAM, add_gumbel_, row_keys


def argmax_rows(scores: torch.Tensor) -> np.ndarray:  # [rows, V] -> [rows] int64
    """First index of the largest value of each row (NumPy's argmax is several times torch's)."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    return scores.numpy().argmax(axis=-1)


def temperature(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    idx: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Divide by the temperature; 0 (greedy) and 1 leave the row alone."""
    scale = temperatures[idx.long()].float()
    scale = torch.where(scale == 0.0, 1.0, scale)
    if bool((scale != 1.0).any()):
        logits.div_(scale.unsqueeze(1))


def gumbel_sample(
    best_token: torch.Tensor,  # [rows, blocks], out: the token of the row in column 0
    _best_stride: int,
    best_score: torch.Tensor,  # [rows, blocks], out: -inf outside column 0
    _score_stride: int,
    logits_cache: torch.Tensor | None,  # [slots, columns, V], out: logits before temperature
    _cache_stride_0: int,
    _cache_stride_1: int,
    cache_column: torch.Tensor | None,  # scalar or [rows]
    cache_source: torch.Tensor | None,  # [rows, V]
    _source_stride: int,
    logits: torch.Tensor,  # [rows, V]
    _logits_stride: int,
    idx: torch.Tensor,  # [rows], negative: padding
    seeds: torch.Tensor,  # [slots]
    positions: torch.Tensor,  # [rows]
    temperatures: torch.Tensor,  # [slots]
    vocab_size: int,
    IS_DRAFTING: bool = False,
    APPLY_TEMPERATURE: bool = True,
    USE_FP64: bool = False,
    **_launch: Any,
) -> None:
    """Sample one token a row by the Gumbel-max trick; temperature 0 is a plain argmax."""
    slots = idx.numpy()
    valid = slots >= 0
    safe = np.where(valid, slots, 0)
    temps = np.where(valid, temperatures.numpy()[safe], 0.0)
    if logits_cache is not None:
        assert cache_source is not None and cache_column is not None
        columns = cache_column.long().expand(len(slots))[torch.from_numpy(valid)]
        owners = torch.from_numpy(safe[valid]).long()
        logits_cache[owners, columns, :vocab_size] = cache_source[torch.from_numpy(valid)]
    rows = logits[:, :vocab_size]
    tokens = np.empty(len(slots), dtype=np.int64)
    values = np.empty(len(slots), dtype=np.float64)
    random = np.nonzero(temps != 0.0)[0]
    greedy = np.nonzero(temps == 0.0)[0]
    for chosen in (random, greedy):
        if chosen.size == 0:
            continue
        part = rows if chosen.size == len(slots) else rows[torch.from_numpy(chosen)]
        dtype = torch.float64 if USE_FP64 else torch.float32
        if chosen is random:
            part = part.to(dtype, copy=True)
            if APPLY_TEMPERATURE:
                part.div_(torch.from_numpy(temps[chosen]).to(dtype).unsqueeze(1))
            stream = DRAFT_STREAM if IS_DRAFTING else TARGET_STREAM
            keys = row_keys(seeds.numpy()[safe[chosen]], positions.numpy()[chosen], stream)
            add_gumbel_(part, keys)
        winners = argmax_rows(part)
        tokens[chosen] = winners
        values[chosen] = part[torch.arange(len(winners)), torch.from_numpy(winners)].double()
    best_token.numpy()[:, 0] = tokens
    best_score.fill_(-float("inf"))
    # NaN and -inf rows still have to name column 0 as the best block.
    best_score.numpy()[:, 0] = np.where(np.isfinite(values), values, 0.0)


def topk_log_softmax(
    output: torch.Tensor,  # [rows, k], out
    logits: torch.Tensor,  # [rows, V]
    _stride: int,
    token_ids: torch.Tensor,  # [rows, k]
    _ids_stride: int,
    _topk: int,
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Log-probability of the given tokens."""
    scores = logits.float()
    output.copy_(scores.gather(1, token_ids) - torch.logsumexp(scores, dim=1, keepdim=True))


def ranks(
    output: torch.Tensor,  # [rows], out
    logits: torch.Tensor,  # [rows, V]
    _stride: int,
    token_ids: torch.Tensor,  # [rows]
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Rank of the given token, 1 = most likely; ties count."""
    chosen = logits.gather(1, token_ids.long().unsqueeze(1))
    output.copy_((logits >= chosen).sum(dim=1))


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,  # [rows, 1 + columns], out
    _out_stride: int,
    out_valid: torch.Tensor,  # [rows, 1 + columns] bool, out
    _valid_stride: int,
    sampled: torch.Tensor,  # [rows]
    topk_ids: torch.Tensor,  # [rows, >= NUM_TOPK]
    _topk_stride: int,
    idx: torch.Tensor,  # [rows]
    num_custom: torch.Tensor,  # [slots]
    custom_ids: torch.Tensor,  # [slots, max]
    _custom_stride: int,
    NUM_TOPK: int = 0,
    **_launch: Any,
) -> None:
    """Column 0 the sampled token, then the request's own token ids, or the top k without any."""
    out_token_ids[:, 0] = sampled
    out_valid[:, 0] = True
    counts = num_custom.numpy()
    for row, slot in enumerate(idx.tolist()):
        count = int(counts[slot]) or NUM_TOPK
        if count == 0:
            continue  # without a top k, `topk_ids` is a placeholder of another shape
        source = custom_ids[slot] if counts[slot] > 0 else topk_ids[row]
        out_token_ids[row, 1 : 1 + count] = source[:count]
        out_valid[row, 1 : 1 + count] = True


def prompt_logprobs_token_ids(
    out_token_ids: torch.Tensor,  # [tokens], out
    query_start_loc: torch.Tensor,  # [n + 1]
    idx_mapping: torch.Tensor,  # [n]
    num_computed_tokens: torch.Tensor,  # [slots]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    **_launch: Any,
) -> None:
    """For every prompt token of the step, the token that follows it."""
    starts = query_start_loc.tolist()
    for row, slot in enumerate(idx_mapping.tolist()):
        start, end = starts[row], starts[row + 1]
        first = int(num_computed_tokens[slot]) + 1
        following = all_token_ids[slot, first : first + end - start]
        out_token_ids[start : start + len(following)] = following


def num_nans(
    logits: torch.Tensor,  # [rows, V]
    _stride: int,
    counts: torch.Tensor,  # [rows], out
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Number of NaN logits of each row."""
    counts.copy_(torch.isnan(logits).sum(dim=1))


def compact_sampling_mask(
    logits: torch.Tensor,  # [rows, V]
    _row_stride: int,
    _col_stride: int,
    cu_num_logits: torch.Tensor,  # [n + 1]
    num_sampled: torch.Tensor,  # [n]
    token_ids: torch.Tensor,  # [n * ROWS_PER_REQUEST, max kept], out
    _ids_stride: int,
    packed_mask: torch.Tensor,  # [n * ROWS_PER_REQUEST, bytes], out
    _mask_stride: int,
    counts: torch.Tensor,  # [n * ROWS_PER_REQUEST], out
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int = 1,
    **_launch: Any,
) -> None:
    """Which tokens a sampled row could have produced: ids, count and packed bits."""
    counts.zero_()
    for request, sampled in enumerate(num_sampled.tolist()):
        for position in range(min(int(sampled), ROWS_PER_REQUEST)):
            row = request * ROWS_PER_REQUEST + position
            source = logits[int(cu_num_logits[request]) + position, :vocab_size].float().numpy()
            keep = np.isfinite(source)
            kept = np.nonzero(keep)[0]
            listed = kept[:max_num_kept]
            token_ids.numpy()[row, : len(listed)] = listed
            packed = np.packbits(keep, bitorder="little")
            packed_mask.numpy()[row, : len(packed)] = packed
            counts[row] = len(kept)
