"""`pack`: kernel and reference against a Python loop written from the formulas.

Everything is an integer (or a copied float), so every comparison is exact, on whole persistent
buffers: what must not be written still holds the sentinel.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from forespark.triton_kernels.pack import launch_pack, pack
from forespark.triton_kernels.pack_ref import pack_ref
from forespark.triton_kernels.pack_types import EngineBuffers, PackBuffers, PackInputs, PackLayout

SENTINEL = -77
LAYOUT = PackLayout(
    mask_token_id=999,
    block_size=4,
    num_speculative_tokens=5,
    max_num_reqs=20,
    max_num_tokens=160,
    max_model_len=64,
)


def make_inputs(generator, num_reqs, layout, max_context=9):
    """A target batch with rejected rows, prefilling requests, null blocks and long positions."""

    def integers(low, high, size, dtype=torch.int32):
        return torch.randint(low, high, size, generator=generator, dtype=dtype)

    slots = layout.max_num_reqs
    context = integers(1, max_context + 1, (num_reqs,))
    start_loc = torch.cat([torch.zeros(1), context.cumsum(0)]).int()
    rejected = (torch.rand(num_reqs, generator=generator) * context).int()
    first = integers(0, layout.max_model_len - max_context + 1, (num_reqs,), torch.int64)
    positions = [first[i] + torch.arange(int(context[i])) for i in range(num_reqs)]
    max_blocks = -(-layout.max_model_len // layout.block_size)
    return PackInputs(
        positions=torch.cat([*positions, torch.full((3,), 1, dtype=torch.int64)]),
        query_start_loc=start_loc,
        idx_mapping=torch.randperm(slots, generator=generator)[:num_reqs].int(),
        num_sampled=integers(0, 3, (num_reqs,)),
        num_rejected=rejected,
        last_sampled=integers(0, 900, (slots,), torch.int64),
        next_prefill_tokens=integers(0, 900, (slots,)),
        temperature=torch.rand(slots, generator=generator),
        seeds=integers(0, 2**40, (slots,), torch.int64),
        block_table=integers(0, 50, (max(num_reqs, 1), max_blocks + 2))[:, :max_blocks],
    )


def poisoned_outputs(layout, device="cpu"):
    out = PackBuffers.allocate(
        layout.max_num_reqs, layout.max_num_tokens, layout.num_speculative_tokens, device
    )
    sizes = {
        "input_ids": (layout.max_num_tokens, torch.int32),
        "positions": (layout.max_num_tokens, torch.int64),
        "query_start_loc": (layout.max_num_reqs + 1, torch.int32),
        "seq_lens": (layout.max_num_reqs, torch.int32),
        "slot_mapping": (layout.max_num_tokens, torch.int64),
    }
    engine = EngineBuffers(
        **{name: torch.empty(n, dtype=kind, device=device) for name, (n, kind) in sizes.items()}
    )
    for tensor in buffers_of(engine, out).values():
        tensor.fill_(SENTINEL)
    return engine, out


def buffers_of(engine, out):
    return {
        field.name: getattr(record, field.name)
        for record in (engine, out)
        for field in fields(record)
    }


def plain_pack(inputs, draft_lens, layout):
    """Every output as a list, request by request and row by row."""
    engine, out = poisoned_outputs(layout)
    want = {name: tensor.tolist() for name, tensor in buffers_of(engine, out).items()}

    def slot_at(req, pos):
        block = int(inputs.block_table[req, pos // layout.block_size])
        return block * layout.block_size + pos % layout.block_size if block else -1

    row = sample = 0
    for req, draft_len in enumerate(draft_lens):
        slot = int(inputs.idx_mapping[req])
        begin, end = inputs.query_start_loc[req : req + 2].tolist()
        valid_end = end - int(inputs.num_rejected[req])
        for at in range(begin, end):
            pos = int(inputs.positions[at]) if at < valid_end else 0
            want["context_positions"][at] = pos
            want["context_slot_mapping"][at] = slot_at(req, pos) if at < valid_end else -1
        anchor_pos = int(inputs.positions[valid_end - 1]) + 1
        sampled = int(inputs.num_sampled[req]) > 0
        anchor = (inputs.last_sampled if sampled else inputs.next_prefill_tokens)[slot]
        want["query_start_loc"][req], want["sample_start"][req] = row, sample
        want["seq_lens"][req] = min(anchor_pos + draft_len + 1, layout.max_model_len)
        want["temperature"][slot] = float(inputs.temperature[slot])
        want["seeds"][slot] = int(inputs.seeds[slot])
        for offset in range(draft_len + 1):
            pos = anchor_pos + offset
            fits = pos < layout.max_model_len
            want["input_ids"][row] = layout.mask_token_id if offset else int(anchor)
            want["positions"][row] = min(pos, layout.max_model_len - 1)
            want["slot_mapping"][row] = slot_at(req, pos) if fits else -1
            want["row_offset"][row] = offset
            if offset:
                want["sample_row"][sample], want["sample_slot"][sample] = row, slot
                want["sample_step"][sample], want["sample_pos"][sample] = offset - 1, pos
                sample += 1
            row += 1
    for name, start, fill in (
        ("query_start_loc", len(draft_lens), row),
        ("sample_start", len(draft_lens), sample),
        ("seq_lens", len(draft_lens), 0),
        ("slot_mapping", row, -1),
        ("row_offset", row, 0),
        ("sample_row", sample, 0),
        ("sample_slot", sample, -1),
        ("sample_step", sample, 0),
        ("sample_pos", sample, 0),
    ):
        want[name][start:] = [fill] * (len(want[name]) - start)
    return want


def move(record, device):
    moved = {field.name: getattr(record, field.name).to(device) for field in fields(record)}
    return type(record)(**moved)


def run_kernel(device, inputs, draft_lens, layout, max_query_len=9):
    engine, out = poisoned_outputs(layout, device)
    lens = torch.tensor(draft_lens, dtype=torch.int32, device=device)
    launch_pack(move(inputs, device), lens, engine, out, layout, max_query_len)
    return {name: tensor.tolist() for name, tensor in buffers_of(engine, out).items()}


def run_reference(inputs, draft_lens, layout):
    engine, out = poisoned_outputs(layout)
    pack_ref(inputs, torch.tensor(draft_lens, dtype=torch.int32), engine, out, layout)
    return {name: tensor.tolist() for name, tensor in buffers_of(engine, out).items()}


def draw_lens(generator, num_reqs, steps):
    return torch.randint(0, steps + 1, (num_reqs,), generator=generator).tolist()


@pytest.mark.parametrize("num_reqs", [0, 1, 5, 6, 17, 20])
def test_kernel_and_reference_match_the_formulas(device, num_reqs):
    """Catches a wrong scan, a stale tail or a row written outside its request."""
    generator = torch.Generator().manual_seed(num_reqs)
    inputs = make_inputs(generator, num_reqs, LAYOUT)
    lens = draw_lens(generator, num_reqs, 5)
    want = plain_pack(inputs, lens, LAYOUT)
    assert run_reference(inputs, lens, LAYOUT) == want
    assert run_kernel(device, inputs, lens, LAYOUT) == want


@pytest.mark.parametrize("num_reqs", [1, 7])
def test_full_blocks_keep_the_rectangular_layout(device, num_reqs):
    """Catches any difference from the full-block drafter when every request drafts K tokens."""
    generator = torch.Generator().manual_seed(30)
    inputs, steps = make_inputs(generator, num_reqs, LAYOUT), 5
    for got in (
        run_kernel(device, inputs, [steps] * num_reqs, LAYOUT),
        run_reference(inputs, [steps] * num_reqs, LAYOUT),
    ):
        rows = num_reqs * (steps + 1)
        starts = [min(req, num_reqs) * (steps + 1) for req in range(21)]
        assert got["query_start_loc"] == starts
        assert got["row_offset"][:rows] == list(range(steps + 1)) * num_reqs
        flat = [req * (steps + 1) + 1 + step for req in range(num_reqs) for step in range(steps)]
        assert got["sample_row"][: num_reqs * steps] == flat
        slots = inputs.idx_mapping.repeat_interleave(steps).tolist()
        assert got["sample_slot"] == slots + [-1] * (100 - num_reqs * steps)
        assert got["sample_step"][: num_reqs * steps] == list(range(steps)) * num_reqs


@pytest.mark.parametrize("lens", [[0, 0, 0], [5, 0, 0], [0, 0, 5], [0, 3, 0], [1, 1, 1]])
def test_requests_without_a_draft(device, lens):
    """Catches an anchor that is dropped or sampled when its request drafts nothing."""
    inputs = make_inputs(torch.Generator().manual_seed(1), 3, LAYOUT)
    want = plain_pack(inputs, lens, LAYOUT)
    assert run_reference(inputs, lens, LAYOUT) == want
    assert run_kernel(device, inputs, lens, LAYOUT) == want


def test_drafts_past_the_model_length_write_no_kv(device):
    """Catches clamping the block column, which overwrites the last block's live draft KV."""
    inputs = make_inputs(torch.Generator().manual_seed(2), 2, LAYOUT)
    last = torch.arange(inputs.positions.shape[0]) % 2 + LAYOUT.max_model_len - 2
    inputs = replace(inputs, positions=last, block_table=inputs.block_table.clamp(min=1))
    for got in (run_kernel(device, inputs, [5, 5], LAYOUT), run_reference(inputs, [5, 5], LAYOUT)):
        assert got == plain_pack(inputs, [5, 5], LAYOUT)
        assert got["slot_mapping"][1:6] == [-1] * 5 and max(got["seq_lens"]) == 64


def test_long_prefill_spans_several_programs(device):
    """Catches a context or a draft cut where a span crosses from one program into the next."""
    layout = replace(LAYOUT, max_model_len=600, max_num_tokens=700)
    generator = torch.Generator().manual_seed(3)
    inputs = make_inputs(generator, 2, layout, max_context=300)
    for rejected in (0, 1):
        long = replace(
            inputs,
            positions=torch.arange(520) % 260,
            query_start_loc=torch.tensor([0, 254, 514], dtype=torch.int32),
            num_rejected=torch.full((2,), rejected, dtype=torch.int32),
        )
        want = plain_pack(long, [5, 4], layout)
        assert run_kernel(device, long, [5, 4], layout, max_query_len=260) == want
        assert run_reference(long, [5, 4], layout) == want


def test_random_batches(device):
    """Catches rare meetings of rejection, prefill, null blocks and empty drafts."""
    generator = torch.Generator().manual_seed(4)
    for _ in range(60):
        num_reqs = int(torch.randint(1, 9, (1,), generator=generator))
        inputs = make_inputs(generator, num_reqs, LAYOUT)
        lens = draw_lens(generator, num_reqs, 5)
        want = plain_pack(inputs, lens, LAYOUT)
        assert run_reference(inputs, lens, LAYOUT) == want
        assert run_kernel(device, inputs, lens, LAYOUT) == want


def test_draft_lengths_out_of_range_are_clipped(device):
    """Catches a corrupt length that makes every later request write over its neighbour."""
    inputs = make_inputs(torch.Generator().manual_seed(6), 3, LAYOUT)
    want = plain_pack(inputs, [0, 5, 2], LAYOUT)
    assert run_reference(inputs, [-4, 99, 2], LAYOUT) == want
    assert run_kernel(device, inputs, [-4, 99, 2], LAYOUT) == want


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches buffers of another engine, and the [1, slots] prefill tokens passed unflattened."""
    inputs = make_inputs(torch.Generator().manual_seed(5), 3, LAYOUT)
    engine, out = poisoned_outputs(LAYOUT)
    lens = torch.tensor([1, 0, 5], dtype=torch.int32)
    pack(inputs, lens, engine, out, LAYOUT, max_query_len=9)
    got = {name: tensor.tolist() for name, tensor in buffers_of(engine, out).items()}
    assert got == plain_pack(inputs, lens.tolist(), LAYOUT)
    with pytest.raises(ValueError, match=r"pack: next_prefill_tokens is .*\[1, 20\]"):
        replace(inputs, next_prefill_tokens=inputs.next_prefill_tokens[None])
    with pytest.raises(ValueError, match=r"\[160, 20, 160, 100\].*asks for \[160, 20, 160, 80"):
        pack(inputs, lens, engine, out, replace(LAYOUT, num_speculative_tokens=4), 9)
    with pytest.raises(ValueError, match=r"pack: idx_mapping has 3 rows; 4 requests need 4"):
        short = replace(inputs, query_start_loc=torch.zeros(5, dtype=torch.int32))
        pack(short, torch.ones(4, dtype=torch.int32), engine, out, LAYOUT, 9)


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 61, 512, 2048])
def test_serving_sizes(device, num_reqs):
    """Catches a scan or a pad program that goes wrong only at real batch sizes."""
    layout = PackLayout(999, 16, 15, 2048, 2048 * 16, 4096)
    generator = torch.Generator().manual_seed(num_reqs)
    for max_context in (16, 700) if num_reqs <= 61 else (16,):
        inputs = make_inputs(generator, num_reqs, layout, max_context)
        inputs = replace(inputs, block_table=inputs.block_table.clone())
        for _ in range(5):
            lens = draw_lens(generator, num_reqs, 15)
            want = run_reference(inputs, lens, layout)
            assert run_kernel(device, inputs, lens, layout, max_context) == want


@pytest.mark.gpu
def test_replay_reads_the_new_lengths(device):
    """Catches a host decision about lengths that a CUDA graph would freeze."""
    generator = torch.Generator().manual_seed(9)
    inputs = make_inputs(generator, 17, LAYOUT)
    engine, out = poisoned_outputs(LAYOUT, device)
    lens = torch.zeros(17, dtype=torch.int32, device=device)
    args = (move(inputs, device), lens, engine, out, LAYOUT, 9)
    pack(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack(*args)
    for _ in range(5):
        drawn = draw_lens(generator, 17, 5)
        for tensor in buffers_of(engine, out).values():
            tensor.fill_(SENTINEL)
        lens.copy_(torch.tensor(drawn))
        graph.replay()
        got = {name: tensor.tolist() for name, tensor in buffers_of(engine, out).items()}
        assert got == plain_pack(inputs, drawn, LAYOUT)
