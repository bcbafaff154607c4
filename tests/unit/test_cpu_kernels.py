"""CPU bookkeeping kernels against plain loops over requests."""

from __future__ import annotations

import torch

from forespark.cpu_mode import kernels_blocks, kernels_inputs


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_prefill_inputs_copy_the_chunk_and_the_tokens_after_it():
    """Catches a chunk read from the wrong offset, or lookahead running past the prompt."""
    known = torch.arange(100, 130, dtype=torch.int32).repeat(3, 1)
    ids, upcoming = torch.full((9,), -1, dtype=torch.int32), torch.full((2, 3), -7)
    kernels_inputs.prepare_prefill_inputs(
        ids, upcoming, 3, 2, ints(2, 0), ints(0, 4, 5), known, 30, ints(1, 0, 9), ints(5, 0, 4)
    )
    assert ids.tolist() == [104, 105, 106, 107, -1, -1, -1, -1, -1]
    assert upcoming[:, 2].tolist() == [108, 0]  # one prompt token left, then nothing
    assert upcoming[:, 0].tolist() == [-7, -7]  # already past its prompt


def test_positions_and_sequence_lengths_of_ragged_queries():
    """Catches positions restarting at 0 and stale lengths beyond the batch."""
    positions, lens = torch.full((8,), -1), torch.full((4,), 9, dtype=torch.int32)
    kernels_inputs.prepare_pos_seq_lens(
        positions, lens, ints(1, 0), ints(0, 3, 5, 5, 5), ints(10, 20), 4
    )
    assert positions.tolist() == [20, 21, 22, 10, 11, -1, -1, -1]
    assert lens.tolist() == [23, 12, 0, 0]


def test_sampled_and_draft_tokens_go_where_the_logits_come_from():
    """Catches drafts overwriting prompt tokens, or landing one row off."""
    ids = torch.arange(8, dtype=torch.int32)
    rows = torch.empty(4, dtype=torch.int64)
    drafts = torch.tensor([[50, 51, 52], [60, 61, 62]])
    kernels_inputs.combine_sampled_and_draft_tokens(
        ids,
        ints(1, 0),
        torch.tensor([[70], [71]]),
        ints(0, 3, 8),
        ints(13, 5),
        ints(9, 10),
        drafts,
        3,
        ints(0, 3, 4),
        rows,
        NUM_NEW_SAMPLED_TOKENS=1,
    )
    assert rows.tolist() == [0, 1, 2, 7]
    assert ids.tolist() == [71, 60, 61, 3, 4, 5, 6, 7]  # the second request is still prefilling


def test_post_update_appends_tokens_and_rolls_back_rejections():
    """Catches a wrong last token, count, or computed length after partial acceptance."""
    computed, total = ints(10, 20, 30), ints(11, 21, 31)
    last, known = torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 40, dtype=torch.int32)
    counts = torch.zeros(3, 8, dtype=torch.int32)
    sampled = torch.tensor([[3, 3, 4, -1], [5, -1, -1, -1], [6, -1, -1, -1]])
    kernels_inputs.post_update(
        ints(2, 0, -1),
        computed,
        last,
        counts,
        8,
        sampled,
        4,
        ints(3, 0, 1),
        ints(1, 0, 0),
        ints(0, 4, 9, 10),
        known,
        40,
        total,
    )
    assert computed.tolist() == [15, 20, 33]
    assert total.tolist() == [11, 21, 34]
    assert known[2, 31:34].tolist() == [3, 3, 4] and int(known.sum()) == 10
    assert last.flatten().tolist() == [0, 0, 4]
    assert counts[2].tolist() == [0, 0, 0, 2, 1, 0, 0, 0] and int(counts.sum()) == 3


def test_counts_and_row_maps():
    """Catches chunked prefills counting as sampled, and row maps of trimmed requests."""
    sampled, rejected = ints(2, 1), torch.empty(2, dtype=torch.int32)
    kernels_inputs.num_sampled_and_rejected(
        sampled, rejected, ints(9, 5), ints(0, 4, 5), ints(0, 1), ints(8, 6)
    )
    assert (sampled.tolist(), rejected.tolist()) == ([2, 0], [2, 0])
    slots, local = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    kernels_inputs.expand_idx_mapping(ints(7, 3), slots, local, ints(0, 1, 4))
    assert (slots.tolist(), local.tolist()) == ([7, 3, 3, 3], [0, 0, 1, 2])
    flat = torch.zeros(4, dtype=torch.int64)
    kernels_inputs.flatten_sampled(
        flat, torch.tensor([[5, 9], [6, 7]]), 2, ints(1, 2), ints(0, 1, 4)
    )
    assert flat.tolist() == [5, 6, 7, 0]
    drafts, where = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.int64)
    kernels_inputs.gather_draft_sampled(
        drafts,
        where,
        ints(40, 41, 42, 43),
        torch.tensor([4, 5, 6, 7]),
        torch.tensor([1, 2, 3]),
        ints(0, 0, 0),
        ints(0, 1, 2),
        ints(6),
        3,
    )
    assert (drafts.tolist(), where.tolist()) == ([41, -1, -1], [5, 6, 7])


def addresses(tables):
    return torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64)


def test_block_tables_and_slots_of_two_cache_groups():
    """Catches a wrong group, a wrong row stride, or slots for dummy requests."""
    groups = [torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 6, dtype=torch.int32)]
    strides = torch.tensor([4, 6])
    kernels_blocks.apply_write(
        addresses(groups),
        strides,
        ints(2, 0, 2),
        ints(0, 1, 0),
        ints(8, 9, 5, 3),
        ints(2, 3, 4),
        ints(0, 0, 1),
        MULTI_GROUP=True,
    )
    assert groups[0].tolist() == [[0, 5, 0, 0], [0, 0, 0, 0], [8, 9, 0, 0]]
    assert groups[1][2].tolist() == [3, 0, 0, 0, 0, 0]
    single = torch.zeros(2, 5)
    kernels_blocks.apply_write(
        single, 5, ints(1), ints(2), torch.tensor([1.5, 2.5]), ints(2), None, MULTI_GROUP=False
    )
    assert single[1].tolist() == [0.0, 0.0, 1.5, 2.5, 0.0]

    batch = [torch.full_like(t, -1) for t in groups]
    used = torch.tensor([[2, 0, 2], [1, 0, 1]], dtype=torch.int32)
    kernels_blocks.gather_block_tables(
        ints(2, 0), addresses(groups), addresses(batch), strides, used, 3, 2
    )
    assert batch[0][:2, :2].tolist() == [[8, 9], [0, 5]] and batch[1][0, 0] == 3

    slots = torch.full((2, 7), 99)
    kernels_blocks.compute_slot_mappings(
        7,
        ints(2, -1),
        ints(0, 3, 5),
        torch.tensor([3, 4, 5, 0, 1]),
        addresses(groups),
        strides,
        ints(4, 4),
        torch.tensor([True, False]),
        torch.tensor([True, True]),
        slots,
        7,
        0,
    )
    assert slots[0].tolist() == [8 * 4 + 3, 9 * 4, 9 * 4 + 1, -1, -1, -1, -1]
    assert slots[1].tolist() == [-1] * 7
