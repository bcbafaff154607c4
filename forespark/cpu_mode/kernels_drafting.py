"""The DFlash drafter's own launches: its inputs, the DFlash2 candidate walk and its logits cache.

K = draft positions a request, q = query rows a request (K + 1, or K when it samples from the
anchor).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from forespark.cpu_mode.arrays import flat, ragged
from forespark.cpu_mode.noise import DRAFT_STREAM, row_keys, token_uniform


def prepare_dflash_inputs(
    out_input_ids: torch.Tensor,  # [>= n * q]
    out_query_positions: torch.Tensor,  # [>= n * q]
    out_query_start_loc: torch.Tensor,  # [max_num_reqs + 1]
    out_seq_lens: torch.Tensor,  # [max_num_reqs]
    out_query_slots: torch.Tensor,  # [max_num_tokens]
    out_context_positions: torch.Tensor,  # [tokens]
    out_context_slots: torch.Tensor,  # [tokens]
    out_sample_indices: torch.Tensor,  # [max_num_reqs * K]
    out_sample_pos: torch.Tensor,  # [max_num_reqs * K]
    out_sample_idx: torch.Tensor,  # [max_num_reqs * K]
    out_temperature: torch.Tensor,  # [slots]
    out_seeds: torch.Tensor,  # [slots]
    target_positions: torch.Tensor,  # [tokens]
    target_query_start_loc: torch.Tensor,  # [n + 1]
    idx_mapping: torch.Tensor,  # [n]
    last_sampled: torch.Tensor,  # [slots] or [slots, 1]
    next_prefill_tokens: torch.Tensor,  # [slots]
    num_sampled: torch.Tensor,  # [n]
    num_rejected: torch.Tensor,  # [n]
    temperature: torch.Tensor,  # [slots]
    seeds: torch.Tensor,  # [slots]
    block_table: torch.Tensor,  # [max_num_reqs, blocks], batch order
    _block_table_stride: int,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    _cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool = False,
    PAD_SLOT_ID: int = -1,
    CP_SIZE: int = 1,
    **_launch: Any,
) -> None:
    """Context rows (to be written to the draft cache) and one block of query rows per request."""
    if CP_SIZE != 1:
        raise ValueError(
            f"decode_context_parallel_size: {CP_SIZE}: CPU mode has no context parallelism; use 1"
        )
    slots = idx_mapping.numpy()
    n = slots.shape[0]
    starts = target_query_start_loc.numpy()[: n + 1]
    lengths = np.diff(starts)
    valid = lengths - num_rejected.numpy()[:n]
    positions = target_positions.numpy()
    blocks = block_table.numpy()

    def cache_slots(rows: np.ndarray, where: np.ndarray) -> np.ndarray:
        column = np.minimum(where // block_size, blocks.shape[1] - 1)
        block = blocks[rows, column].astype(np.int64)
        # Block 0 is the null block: never written.
        return np.where(block != 0, block * block_size + where % block_size, PAD_SLOT_ID)

    # Rejected rows keep position 0 and write nothing.
    rows, offsets = ragged(lengths)
    tokens = starts[rows] + offsets
    kept = offsets < valid[rows]
    where = np.where(kept, positions[tokens], 0)
    out_context_positions.numpy()[tokens] = where
    out_context_slots.numpy()[tokens] = np.where(kept, cache_slots(rows, where), PAD_SLOT_ID)

    anchor_pos = positions[starts[:-1] + valid - 1].astype(np.int64)
    anchor = np.where(
        num_sampled.numpy()[:n] > 0, flat(last_sampled)[slots], flat(next_prefill_tokens)[slots]
    )
    q, k = num_query_per_req, num_speculative_steps
    total = n * q
    query_pos = (anchor_pos + 1)[:, None] + np.arange(q)  # [n, q]
    ids = out_input_ids.numpy()[:total].reshape(n, q)
    ids[:, 0] = anchor
    ids[:, 1:] = mask_token_id
    out_query_positions.numpy()[:total] = np.minimum(query_pos, max_model_len - 1).reshape(-1)
    query_slots = out_query_slots.numpy()
    query_slots[:total] = cache_slots(np.arange(n)[:, None], query_pos).reshape(-1)
    query_slots[total:max_num_tokens] = PAD_SLOT_ID

    skip = 0 if SAMPLE_FROM_ANCHOR else 1
    samples = n * k
    query_index = np.arange(total).reshape(n, q)
    for out, value, padding in (
        (out_sample_indices, query_index[:, skip : skip + k], 0),
        (out_sample_pos, query_pos[:, skip : skip + k] + (1 - skip), 0),
        (out_sample_idx, np.repeat(slots, k), -1),
    ):
        array = out.numpy()
        array[:samples] = value.reshape(-1)
        array[samples : max_num_reqs * k] = padding

    query_starts = out_query_start_loc.numpy()
    query_starts[: n + 1] = np.arange(n + 1) * q
    query_starts[n + 1 : max_num_reqs + 1] = total
    seq_lens = out_seq_lens.numpy()
    seq_lens[:n] = np.minimum(anchor_pos + 1 + q, max_model_len)
    seq_lens[n:max_num_reqs] = 0
    out_temperature.numpy()[slots] = temperature.numpy()[slots]
    out_seeds.numpy()[slots] = seeds.numpy()[slots]


def selector_walk(
    scores: torch.Tensor,  # [n, K, top_k previous, top_k]
    candidates: torch.Tensor,  # [n, K, top_k]
    sample_pos: torch.Tensor,  # [>= n * K]
    req_state: torch.Tensor,  # [>= n * K] slot of each row, negative: padding
    temperature: torch.Tensor,  # [slots]
    seeds: torch.Tensor,  # [slots]
    tokens: torch.Tensor,  # [max_num_reqs, K], out
    realized_scores: torch.Tensor,  # [max_num_reqs, K, top_k], out: the rows walked through
    num_steps: int = 0,
    top_k: int = 0,
    SAMPLE_PROBABILISTIC: bool = False,
    USE_FP64: bool = False,
    **_launch: Any,
) -> None:
    """Walk the candidate lattice: step by step, the best candidate given the one before."""
    n = candidates.shape[0]
    dtype = np.float64 if USE_FP64 else np.float32
    lattice = scores.float().numpy().reshape(n, num_steps, top_k, top_k)
    ids = candidates.numpy().reshape(n, num_steps, top_k)
    slots = req_state.numpy()[: n * num_steps : num_steps]
    live = np.nonzero(slots >= 0)[0]
    owners = slots[live]
    temps = temperature.numpy()[owners].astype(dtype) if SAMPLE_PROBABILISTIC else np.zeros(0)
    noised = lattice[live]
    random = np.nonzero(temps != 0.0)[0]
    if random.size:
        # A draw is keyed by the position before the sampled token, as the verifier's is.
        where = sample_pos.numpy()[: n * num_steps].reshape(n, num_steps)[live[random]] - 1
        keys = row_keys(
            np.repeat(seeds.numpy()[owners[random]], num_steps), where.reshape(-1), DRAFT_STREAM
        )
        draws = token_uniform(
            keys, ids[live[random]].reshape(-1, top_k).astype(np.uint32), fp64=USE_FP64
        )
        gumbel = -np.log(-np.log1p(-draws)).reshape(-1, num_steps, 1, top_k)
        noised = noised.astype(dtype)
        noised[random] = noised[random] / temps[random].reshape(-1, 1, 1, 1) + gumbel
    best = noised.argmax(axis=-1)  # [live, K, top_k previous]
    previous = np.zeros(len(live), dtype=np.int64)
    lanes = np.arange(len(live))
    walked = np.empty((len(live), num_steps), dtype=np.int64)
    choice = np.empty_like(walked)
    for step in range(num_steps):
        walked[:, step] = previous
        previous = best[lanes, step, previous]
        choice[:, step] = previous
    steps = np.arange(num_steps)
    realized = realized_scores.numpy().reshape(-1, num_steps, top_k)
    realized[live] = lattice[live[:, None], steps, walked]
    tokens.numpy().reshape(-1, num_steps)[live] = ids[live[:, None], steps, choice]


def cache_draft_logits(
    draft_logits: torch.Tensor,  # [slots, K, V], -inf outside the candidates
    cached_candidates: torch.Tensor,  # [slots, K, top_k]
    candidates: torch.Tensor,  # [n, K, top_k]
    scores: torch.Tensor,  # [max_num_reqs, K, top_k]
    req_state: torch.Tensor,  # [>= n * K]
    _stride_0: int,
    _stride_1: int,
    num_steps: int = 0,
    top_k: int = 0,
    **_launch: Any,
) -> None:
    """Replace the previous proposal's candidates of each request by this one's scores."""
    flat_ids = candidates.reshape(-1, top_k)
    rows = torch.arange(flat_ids.shape[0])
    slots = req_state[: len(rows)].long()
    rows = rows[slots >= 0]
    slots = slots[slots >= 0].unsqueeze(1)
    steps = (rows % num_steps).unsqueeze(1)
    old = cached_candidates[slots, steps].squeeze(1)
    draft_logits[slots, steps, old] = -float("inf")
    new = flat_ids[rows]
    draft_logits[slots, steps, new] = scores.reshape(-1, top_k)[rows].to(draft_logits.dtype)
    cached_candidates[slots, steps] = new.unsqueeze(1)
