"""Logit processors: min-p, penalties, biases, bad words and grammar masks.

Rows of logits are [rows, V] and change in place; `idx` maps a row to its request slot and
`local_pos` to its position among the request's rows (0 = after the last committed token, then the
drafts).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.arrays import unpack_bits

_NEVER = -float("inf")


def min_p(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    idx: torch.Tensor,  # [rows]
    thresholds: torch.Tensor,  # [slots], 0 = off
    _vocab_size: int,
    **_launch: Any,
) -> None:
    """Drop tokens less likely than min_p times the most likely one."""
    floor = logits.amax(dim=1) + thresholds[idx.long()].float().log()
    logits.masked_fill_(logits < floor.unsqueeze(1), _NEVER)


def penalties(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    idx: torch.Tensor,  # [rows]
    token_ids: torch.Tensor,  # [rows] input token of each row
    local_pos: torch.Tensor,  # [rows]
    repetition: torch.Tensor,  # [slots], 1 = off
    frequency: torch.Tensor,  # [slots], 0 = off
    presence: torch.Tensor,  # [slots], 0 = off
    prompt_mask: torch.Tensor,  # [slots, ceil(V / 32)] packed bits
    _mask_stride: int,
    output_counts: torch.Tensor,  # [slots, V]
    _counts_stride: int,
    vocab_size: int,
    **_launch: Any,
) -> None:
    """Repetition, frequency and presence penalties, drafts before the row counted as output."""
    slots, local, inputs = idx.tolist(), local_pos.tolist(), token_ids.tolist()
    rep, freq, pres = (t.numpy() for t in (repetition, frequency, presence))
    prompt_slot, in_prompt = -1, None
    for row, slot in enumerate(slots):
        if rep[slot] == 1.0 and freq[slot] == 0.0 and pres[slot] == 0.0:
            continue
        counts = output_counts[slot]
        drafted = inputs[row - local[row] + 1 : row + 1]
        if drafted:
            counts = counts.clone()
            np.add.at(counts.numpy(), drafted, 1)
        scores = logits[row]
        seen = counts > 0
        if rep[slot] != 1.0:
            if slot != prompt_slot:
                bits = unpack_bits(prompt_mask[slot].numpy(), vocab_size)
                prompt_slot, in_prompt = slot, torch.from_numpy(bits).bool()
            factor = float(rep[slot])
            penalised = torch.where(scores > 0, scores / factor, scores * factor)
            scores = torch.where(seen | in_prompt, penalised, scores)
        scores = scores - float(freq[slot]) * counts - float(pres[slot]) * seen
        logits[row] = scores


def bincount(
    slots: torch.Tensor,  # [new requests]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    prompt_len: torch.Tensor,  # [slots]
    prefill_len: torch.Tensor,  # [slots]
    prompt_mask: torch.Tensor,  # [slots, ceil(V / 32)] packed bits, cleared by the caller
    _mask_stride: int,
    output_counts: torch.Tensor,  # [slots, V], cleared by the caller
    _counts_stride: int,
    **_launch: Any,
) -> None:
    """Which tokens the prompt holds, and how often each one was already generated."""
    for slot in slots.tolist():
        prompt, known = int(prompt_len[slot]), int(prefill_len[slot])
        tokens = all_token_ids[slot, :known].numpy()
        bits = np.zeros(prompt_mask.shape[1] * 32, dtype=np.uint8)
        bits[tokens[: min(prompt, known)]] = 1
        prompt_mask[slot].numpy()[:] |= np.packbits(bits, bitorder="little").view(np.int32)
        np.add.at(output_counts[slot].numpy(), tokens[prompt:], 1)


def logit_bias(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    _vocab_size: int,
    idx: torch.Tensor,  # [rows]
    num_allowed: torch.Tensor,  # [slots]
    allowed_ids: torch.Tensor,  # [slots, max]
    _allowed_stride: int,
    num_bias: torch.Tensor,  # [slots]
    bias_ids: torch.Tensor,  # [slots, max]
    _ids_stride: int,
    bias: torch.Tensor,  # [slots, max]
    _bias_stride: int,
    positions: torch.Tensor,  # [rows]
    min_lens: torch.Tensor,  # [slots]
    num_stop: torch.Tensor,  # [slots]
    restore_when_all_masked: torch.Tensor,  # [slots]
    stop_ids: torch.Tensor,  # [slots, max]
    _stop_stride: int,
    CHECK_ALL_MASKED_ROWS: bool = False,
    **_launch: Any,
) -> None:
    """Allowed tokens only, then additive biases, then no stop token before the minimum length."""
    where = positions.tolist()
    for row, slot in enumerate(idx.tolist()):
        scores = logits[row]
        count = int(num_allowed[slot])
        if count > 0:
            allowed = allowed_ids[slot, :count].long()
            kept = scores[allowed]
            scores.fill_(_NEVER)
            scores[allowed] = kept
        count = int(num_bias[slot])
        if count > 0:
            ids = bias_ids[slot, :count].long()
            scores[ids] += bias[slot, :count].to(scores.dtype)
        count = int(num_stop[slot])
        if count > 0 and where[row] + 1 < int(min_lens[slot]):
            stops = stop_ids[slot, :count].long()
            kept = scores[stops]
            scores[stops] = _NEVER
            # A grammar may allow nothing but stop tokens: then they come back.
            if CHECK_ALL_MASKED_ROWS and int(restore_when_all_masked[slot]):
                if bool((scores == _NEVER).all()):
                    scores[stops] = torch.where(torch.isfinite(kept), kept, _NEVER)


def bad_words(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    idx: torch.Tensor,  # [rows]
    word_tokens: torch.Tensor,  # [slots, max] words end to end
    _tokens_stride: int,
    word_offsets: torch.Tensor,  # [slots, words + 1]
    _offsets_stride: int,
    num_words: torch.Tensor,  # [slots]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    prompt_len: torch.Tensor,  # [slots]
    total_len: torch.Tensor,  # [slots]
    input_ids: torch.Tensor,  # [rows] input token of each row
    local_pos: torch.Tensor,  # [rows]
    **_launch: Any,
) -> None:
    """Forbid the last token of a bad word where the output already ends with the rest of it."""
    local, inputs = local_pos.tolist(), input_ids.tolist()
    for row, slot in enumerate(idx.tolist()):
        words = int(num_words[slot])
        if words == 0:
            continue
        offsets = word_offsets[slot, : words + 1].tolist()
        tokens = word_tokens[slot, : offsets[-1]].tolist()
        longest = max(b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True))
        start = max(int(prompt_len[slot]), int(total_len[slot]) - longest)
        output = all_token_ids[slot, start : int(total_len[slot])].tolist()
        output += inputs[row - local[row] + 1 : row + 1]
        for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
            prefix = tokens[begin : end - 1]
            if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
                logits[row, tokens[end - 1]] = _NEVER


def grammar_bitmask(
    logits: torch.Tensor,  # [rows, V], in place
    _stride: int,
    mapping: torch.Tensor,  # [masks] request * MASK_STRIDE + position
    cu_num_logits: torch.Tensor,  # [n + 1]
    bitmask: torch.Tensor,  # [masks, ceil(V / 32)] packed bits, 1 = allowed
    _bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int = 1,
    **_launch: Any,
) -> None:
    """Forbid what the grammar does not allow; masks of trimmed drafts are skipped."""
    bounds = cu_num_logits.tolist()
    for mask, encoded in enumerate(mapping.tolist()):
        request, position = divmod(encoded, MASK_STRIDE)
        row = bounds[request] + position
        if row < bounds[request + 1]:
            denied = unpack_bits(bitmask[mask].numpy(), vocab_size) == 0
            logits[row, :vocab_size].masked_fill_(torch.from_numpy(denied), _NEVER)
