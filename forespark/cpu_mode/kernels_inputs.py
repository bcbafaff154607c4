"""Batch bookkeeping: what `vllm.v1.worker.gpu.input_batch` and its neighbours launch.

n = requests in the batch; `idx_mapping` is batch index -> request slot. Strides and block sizes
of the Triton launches are accepted and ignored: the tensors carry their shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.arrays import flat, ragged


def prepare_prefill_inputs(
    input_ids: torch.Tensor,  # [tokens]
    next_prefill_tokens: torch.Tensor,  # [lookahead, slots]
    _next_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,  # [n]
    query_start_loc: torch.Tensor,  # [n + 1]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    prefill_lens: torch.Tensor,  # [slots]
    num_computed_tokens: torch.Tensor,  # [slots]
    **_launch: Any,
) -> None:
    """Copy this step's chunk of the known tokens of every request that is still prefilling."""
    slots = idx_mapping.numpy()
    prefill, computed = prefill_lens.numpy(), num_computed_tokens.numpy()
    starts = query_start_loc.numpy()
    for row in np.nonzero(computed[slots] < prefill[slots])[0]:
        slot, start, end = slots[row], starts[row], starts[row + 1]
        known = all_token_ids[slot].numpy()
        first = computed[slot]
        after = first + end - start
        input_ids.numpy()[start:end] = known[first:after]
        upcoming = known[after : min(after + num_lookahead, prefill[slot])]
        following = next_prefill_tokens.numpy()[:, slot]
        following[: len(upcoming)] = upcoming
        following[len(upcoming) : num_lookahead] = 0


def prepare_pos_seq_lens(
    positions: torch.Tensor,  # [tokens]
    seq_lens: torch.Tensor,  # [max_num_reqs]
    idx_mapping: torch.Tensor,  # [n]
    query_start_loc: torch.Tensor,  # [n + 1]
    num_computed_tokens: torch.Tensor,  # [slots]
    _max_num_reqs: int,
    **_launch: Any,
) -> None:
    """Absolute position of every token and length of every sequence; unused lengths become 0."""
    n = idx_mapping.shape[0]
    starts = query_start_loc.numpy()[: n + 1]
    lengths = np.diff(starts)
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    lens = seq_lens.numpy()
    lens[:n] = computed + lengths
    lens[n:] = 0
    rows, offsets = ragged(lengths)
    positions.numpy()[starts[0] : starts[n]] = computed[rows] + offsets


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,  # [tokens]
    idx_mapping: torch.Tensor,  # [n]
    last_sampled_tokens: torch.Tensor,  # [slots] or [slots, 1]
    query_start_loc: torch.Tensor,  # [n + 1]
    seq_lens: torch.Tensor,  # [n]
    prefill_len: torch.Tensor,  # [slots]
    draft_tokens: torch.Tensor,  # [slots, K]
    _draft_stride: int,
    cu_num_logits: torch.Tensor,  # [n + 1]
    logits_indices: torch.Tensor,  # [rows of logits], out
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_launch: Any,
) -> None:
    """Input rows that produce logits; write last sampled and draft tokens past the prompt's end."""
    slots = idx_mapping.numpy()
    n = slots.shape[0]
    offsets = cu_num_logits.numpy()[: n + 1]
    counts = np.diff(offsets)
    first_rows = query_start_loc.numpy()[1 : n + 1] - counts
    rows, local = ragged(counts)
    indices = first_rows[rows] + local
    logits_indices.numpy()[offsets[0] : offsets[n]] = indices
    lens, prefill = seq_lens.numpy()[:n], prefill_len.numpy()[slots]
    generating = lens > prefill
    ids = input_ids.numpy()
    if NUM_NEW_SAMPLED_TOKENS > 0:
        # A logit row inside the prompt keeps its prompt token.
        sampled = generating & (lens - counts >= prefill)
        ids[first_rows[sampled]] = flat(last_sampled_tokens)[slots[sampled]]
    drafted = generating[rows] & (local >= NUM_NEW_SAMPLED_TOKENS)
    step = local[drafted] - NUM_NEW_SAMPLED_TOKENS
    ids[indices[drafted]] = draft_tokens.numpy()[slots[rows[drafted]], step]


def num_sampled_and_rejected(
    num_sampled: torch.Tensor,  # [n], in and out
    num_rejected: torch.Tensor,  # [n], out
    seq_lens: torch.Tensor,  # [n]
    cu_num_logits: torch.Tensor,  # [n + 1]
    idx_mapping: torch.Tensor,  # [n]
    prefill_len: torch.Tensor,  # [slots]
    **_launch: Any,
) -> None:
    """Rejected = rows of logits minus sampled; a chunk that ends inside the prompt has neither."""
    n = idx_mapping.shape[0]
    inside_prompt = seq_lens.numpy()[:n] < prefill_len.numpy()[idx_mapping.numpy()]
    sampled = num_sampled.numpy()[:n]
    sampled[inside_prompt] = 0
    rejected = np.diff(cu_num_logits.numpy()[: n + 1]) - sampled
    rejected[inside_prompt] = 0
    num_rejected.numpy()[:n] = rejected


def post_update(
    idx_mapping: torch.Tensor,  # [n], negative: skip
    num_computed_tokens: torch.Tensor,  # [slots]
    last_sampled_tokens: torch.Tensor,  # [slots] or [slots, 1]
    output_bin_counts: torch.Tensor | None,  # [slots, V]
    _bin_stride: int,
    sampled_tokens: torch.Tensor,  # [n, K + 1]
    _sampled_stride: int,
    num_sampled: torch.Tensor,  # [n]
    num_rejected: torch.Tensor,  # [n]
    query_start_loc: torch.Tensor | None,  # [n + 1]
    all_token_ids: torch.Tensor,  # [slots, max_model_len]
    _all_stride: int,
    total_len: torch.Tensor,  # [slots]
    **_launch: Any,
) -> None:
    """Append the sampled tokens of each request and advance its computed count by the accepted."""
    batch = np.nonzero(idx_mapping.numpy() >= 0)[0]
    slots = idx_mapping.numpy()[batch]
    counts = num_sampled.numpy()[batch]
    totals = total_len.numpy()
    rows, offsets = ragged(counts)
    tokens = sampled_tokens.numpy()[batch[rows], offsets]
    owners = slots[rows]
    all_token_ids.numpy()[owners, totals[owners] + offsets] = tokens
    if output_bin_counts is not None:
        np.add.at(output_bin_counts.numpy(), (owners, tokens), 1)
    last = offsets == counts[rows] - 1
    flat(last_sampled_tokens)[owners[last]] = tokens[last]
    totals[slots] += counts
    delta = -num_rejected.numpy()[batch]
    if query_start_loc is not None:
        delta = delta + np.diff(query_start_loc.numpy()[: idx_mapping.shape[0] + 1])[batch]
    num_computed_tokens.numpy()[slots] += delta


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor,  # [n]
    num_computed_tokens: torch.Tensor,  # [slots]
    query_start_loc: torch.Tensor,  # [n + 1]
    **_launch: Any,
) -> None:
    """Advance the computed count by the query length, for steps that sample nothing."""
    slots = idx_mapping.numpy()
    num_computed_tokens.numpy()[slots] += np.diff(query_start_loc.numpy()[: slots.shape[0] + 1])


def expand_idx_mapping(
    idx_mapping: torch.Tensor,  # [n]
    expanded_idx_mapping: torch.Tensor,  # [rows of logits], out
    expanded_local_pos: torch.Tensor,  # [rows of logits], out
    cu_num_logits: torch.Tensor,  # [n + 1]
    **_launch: Any,
) -> None:
    """Request slot and position within the request of every row of logits."""
    n = idx_mapping.shape[0]
    rows, local = ragged(np.diff(cu_num_logits.numpy()[: n + 1]))
    expanded_idx_mapping.numpy()[: rows.shape[0]] = idx_mapping.numpy()[rows]
    expanded_local_pos.numpy()[: rows.shape[0]] = local


def gather_draft_sampled(
    draft_sampled: torch.Tensor,  # [rows of logits], out
    row_positions: torch.Tensor,  # [rows of logits], out
    input_ids: torch.Tensor,  # [tokens]
    positions: torch.Tensor,  # [tokens]
    logits_indices: torch.Tensor,  # [rows of logits]
    expanded_idx_mapping: torch.Tensor,  # [rows of logits]
    expanded_local_pos: torch.Tensor,  # [rows of logits]
    prefill_len: torch.Tensor,  # [slots]
    num_logits: int,
    **_launch: Any,
) -> None:
    """Input token and position of every row of logits; draft rows inside the prompt become -1."""
    source = logits_indices.numpy()[:num_logits]
    local = expanded_local_pos.numpy()[:num_logits]
    where = positions.numpy()[source]
    prefill = prefill_len.numpy()[expanded_idx_mapping.numpy()[:num_logits]]
    placeholder = (local > 0) & (where - local < prefill)
    draft_sampled.numpy()[:num_logits] = np.where(placeholder, -1, input_ids.numpy()[source])
    row_positions.numpy()[:num_logits] = where


def flatten_sampled(
    flat_sampled: torch.Tensor,  # [rows of logits], out
    sampled: torch.Tensor,  # [n, K + 1]
    _sampled_stride: int,
    num_sampled: torch.Tensor,  # [n]
    cu_num_logits: torch.Tensor,  # [n + 1]
    **_launch: Any,
) -> None:
    """Spread each request's sampled tokens over its first rows of logits."""
    n = sampled.shape[0]
    rows, offsets = ragged(num_sampled.numpy()[:n])
    starts = cu_num_logits.numpy()[:n]
    flat_sampled.numpy()[starts[rows] + offsets] = sampled.numpy()[rows, offsets]
