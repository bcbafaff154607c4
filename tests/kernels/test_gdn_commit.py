"""`gdn_commit`: the kernel against the float64 reference, over layers, groups and many rounds.

Tolerance: 1e-6 of the norm of a state (float32 sums of at most 17 terms); a bfloat16 state adds its
own rounding, at most 2^-8 of each value (the interpreter truncates: 2^-7). States that must not
change are compared bitwise.
"""

from __future__ import annotations

import pytest
import torch
from forespark.triton_kernels import gdn_ref
from forespark.triton_kernels.gdn_commit import gdn_commit, launch_gdn_commit
from forespark.triton_kernels.gdn_types import GdnFactors, GdnStates
from forespark.triton_kernels.gdn_verify import launch_gdn_verify
from test_gdn_ref import REGIMES, SLOTS, make_case, make_factors, output_like
from test_gdn_verify import FULL, NAN, error, to_device

BAR = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def make_layers(generator, device, widths, layers=2, **options):
    """States, factors and float64 copies of both; every layer has its own slots and slot stride."""
    cases = [make_case(generator, widths, **options) for _ in range(layers)]
    factors = make_factors(cases[0], layers, device=device)
    tensors, exact = [], make_factors(cases[0], layers)
    for index, case in enumerate(cases):
        _, *inner = case["state"].shape
        size = inner[0] * inner[1] * inner[2]
        room = torch.empty(SLOTS, size + 16 * (index + 1), dtype=case["state"].dtype, device=device)
        tensors.append(room[:, :size].unflatten(1, inner).copy_(case["state"]))
        moved = to_device(case, device)
        out = output_like(case).to(device)
        launch_gdn_verify(**moved, out=out, factors=factors.layer(index))
        gdn_ref.gdn_verify_ref(**case, out=output_like(case), factors=exact.layer(index))
    return GdnStates.of(tensors), factors, [case["state"] for case in cases], exact


def check_commit(states, factors, before, exact, accepted):
    """Run both commits; every slot that no request moves keeps its bits."""
    launch_gdn_commit(states, factors, accepted.to(states.pointers.device))
    want = [state.double() for state in before]
    gdn_ref.gdn_commit_ref(want, exact, accepted)
    for layer, state in enumerate(before):
        got = states.tensors[layer].cpu()
        counts = torch.minimum(accepted, exact.width[layer, : len(accepted)])
        slots = exact.slot[layer, : len(accepted)]
        moved = {int(slot) for slot, count in zip(slots, counts, strict=True) if count > 0}
        for slot in range(SLOTS):
            if slot in moved:
                assert error(got[slot], want[layer][slot]) <= BAR[state.dtype]
            else:
                assert torch.equal(got[slot], state[slot])


@pytest.mark.parametrize("state_dtype", BAR)
@pytest.mark.parametrize("regime", REGIMES)
def test_kernel_matches_reference(device, regime, state_dtype):
    """Catches a state reached through another layer's address, stride or block id, or lost digits.

    Two layers, and among the requests one empty, one with nothing accepted, one with everything.
    """
    generator = torch.Generator().manual_seed(21)
    options = {"regime": regime, "state_dtype": state_dtype}
    layers = make_layers(generator, device, [4, 0, 16, 1, 15], **options)
    check_commit(*layers, torch.tensor([0, 1, 16, 1, 8], dtype=torch.int32))


@pytest.mark.parametrize(
    "heads, sizes", [((1, 1), (128, 128)), ((2, 4), (64, 32)), ((1, 1), (16, 16))]
)
def test_shapes(device, heads, sizes):
    """Catches K and V mixed up and a value head that takes another key head's keys."""
    generator = torch.Generator().manual_seed(22)
    layers = make_layers(generator, device, [16, 3], 1, heads=heads, sizes=sizes)
    check_commit(*layers, torch.tensor([9, 3], dtype=torch.int32))


def test_every_accepted_length(device):
    """Catches one token too many or too few, at any m from none to all and past the kept width."""
    generator = torch.Generator().manual_seed(23)
    for count in (-1, *range(8)):
        layers = make_layers(generator, device, [6], 1, heads=(1, 1))
        check_commit(*layers, torch.tensor([count], dtype=torch.int32))


def test_float32_keys(device):
    """Catches keys rounded to bfloat16 on the way into the state."""
    generator = torch.Generator().manual_seed(24)
    layers = make_layers(generator, device, [9], 1, qkv_dtype=torch.float32)
    check_commit(*layers, torch.tensor([7], dtype=torch.int32))


def test_neighbours_cannot_reach_a_state(device):
    """Catches NaN that crosses over from another request's state, gates or stale factors.

    The request in the middle comes out with the same bits as when it is committed alone.
    """
    results = []
    for poison in (0.0, NAN):
        generator = torch.Generator().manual_seed(25)
        case = make_case(generator, [3, 5, 2])
        slot = int(case["slots"][1])
        for name in ("mixed_qkv", "a", "b"):
            case[name][:3] += poison
            case[name][8:] += poison
        kept = case["state"][slot].clone()
        case["state"] += poison
        case["state"][slot] = kept
        moved, factors = to_device(case, device), make_factors(case, device=device)
        launch_gdn_verify(**moved, out=output_like(case).to(device), factors=factors)
        accepted = torch.tensor([3, 4, 1], dtype=torch.int32, device=device)
        launch_gdn_commit(GdnStates.of([moved["state"]]), factors, accepted)
        results.append(moved["state"][slot].cpu())
    assert bool(results[0].isfinite().all()) and torch.equal(*results)


def drift(device, rounds, **options):
    """State error after closed-loop rounds of random w and m: ours, and the float32 recurrence."""
    generator = torch.Generator().manual_seed(26)
    first = make_case(generator, [16], **options)
    moved = to_device(first, device)
    slot = int(first["slots"][0])
    exact, plain = first["state"][slot].double(), first["state"][slot].clone()
    factors, out = make_factors(first, device=device), output_like(first).to(device)
    table = GdnStates.of([moved["state"]])
    fixed = ("a_log", "dt_bias", "slots", "state")
    _, value_heads, value_size, key_size = first["state"].shape
    for _ in range(rounds):
        width = int(torch.randint(1, 17, (1,), generator=generator))
        count = int(torch.randint(0, width + 1, (1,), generator=generator))
        case = {**make_case(generator, [16], **options), **{n: first[n] for n in fixed}}
        case["cu_seqlens"] = torch.tensor([0, width], dtype=torch.int32)
        inputs = {n: case[n].to(device) for n in ("mixed_qkv", "a", "b", "cu_seqlens")}
        launch_gdn_verify(**{**moved, **inputs}, out=out, factors=factors)
        launch_gdn_commit(table, factors, torch.tensor([count], dtype=torch.int32, device=device))
        names = ("mixed_qkv", "a", "b", "a_log", "dt_bias")
        for dtype in (torch.float64, torch.float32):
            starts, widths = torch.tensor([0]), torch.tensor([count])
            heads = gdn_ref.split_heads(
                *(case[n] for n in names), starts, widths, key_size, value_size, dtype
            )
            state = exact if dtype == torch.float64 else plain
            state = gdn_ref.sequential(state, *(x[0] for x in heads[:5]))[1][-1]
            if dtype == torch.float64:
                exact = state
            else:
                plain = state
    return error(moved["state"][slot], exact), error(plain, exact)


@pytest.mark.parametrize("regime", ["random", "duplicate"])
def test_errors_do_not_build_up(device, regime):
    """Catches a bias per round (a rounded z, k or decay), which no single round would show."""
    ours, plain = drift(device, 40, heads=(1, 1), regime=regime)
    assert ours <= 2e-6 and ours <= 3 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("regime", ["random", "duplicate"])
def test_two_thousand_rounds(device, regime):
    """Catches a bias that takes as long as a long answer to show."""
    ours, plain = drift(device, 2000, heads=(1, 2), sizes=(128, 128), regime=regime)
    assert ours <= 1e-5 and ours <= 2 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", BAR)
def test_full_size(device, state_dtype):
    """Catches races between layers and requests, and what only tensor cores do to the sums."""
    generator = torch.Generator().manual_seed(27)
    layers = make_layers(
        generator, device, [16, 7, 0, 1, 12, 16, 2], 4, state_dtype=state_dtype, **FULL
    )
    check_commit(*layers, torch.tensor([16, 3, 0, 1, 0, 9, 2], dtype=torch.int32))


@pytest.mark.gpu
def test_slots_beyond_32_bits(device):
    """Catches an element offset that overflows in a cache of more than 2^31 elements."""
    case = make_case(torch.Generator().manual_seed(31), [8], heads=(1, 1))
    near, stride = case["state"][int(case["slots"][0])], 2**30 + 2**20
    case["slots"].fill_(2)
    room = torch.zeros(2 * stride + near.numel(), device=device)
    far = room.as_strided((3, *near.shape), (stride, *near.stride()))
    far[2] = near.to(device)
    case["state"] = torch.stack([near] * 3)
    moved = {**to_device(case, device), "state": far}
    factors = make_factors(case, device=device)
    launch_gdn_verify(**moved, out=output_like(case).to(device), factors=factors)
    accepted = torch.tensor([5], dtype=torch.int32, device=device)
    launch_gdn_commit(GdnStates.of([far]), factors, accepted)
    exact, want = make_factors(case), [case["state"].double()]
    gdn_ref.gdn_verify_ref(**case, out=output_like(case), factors=exact)
    gdn_ref.gdn_commit_ref(want, exact, accepted.cpu())
    assert error(far[2], want[0][2]) <= BAR[torch.float32]


@pytest.mark.gpu
def test_replay_reads_new_counts(device):
    """Catches counts that a CUDA graph freezes; a replay with none accepted must change nothing."""
    generator = torch.Generator().manual_seed(28)
    states, factors, before, exact = make_layers(generator, device, [16, 5], **FULL)
    accepted = torch.zeros(2, dtype=torch.int32, device=device)
    gdn_commit(states, factors, accepted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn_commit(states, factors, accepted)
    graph.replay()
    for got, want in zip(states.tensors, before, strict=True):
        assert torch.equal(got.cpu(), want)
    accepted.copy_(torch.tensor([11, 5]))
    graph.replay()
    want = [state.double() for state in before]
    gdn_ref.gdn_commit_ref(want, exact, accepted.cpu())
    for layer, got in enumerate(states.tensors):
        for slot in exact.slot[layer, :2].tolist():
            assert error(got[slot], want[layer][slot]) <= BAR[torch.float32]


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches a refusal that does not say which argument is wrong and what it was."""
    case = make_case(torch.Generator().manual_seed(29), [2, 3])
    factors = make_factors(case)
    gdn_ref.gdn_verify_ref(**case, out=output_like(case), factors=factors)
    before, states = case["state"].clone(), GdnStates.of([case["state"]])
    gdn_commit(states, factors, torch.tensor([0, 2], dtype=torch.int32))
    changed = {slot for slot in range(SLOTS) if not torch.equal(before[slot], case["state"][slot])}
    assert changed == {int(case["slots"][1])}
    with pytest.raises(ValueError, match=r"accepted is torch\.int64 \[2\].*torch\.int32"):
        gdn_commit(states, factors, torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"factors\.z is .*\[1, 3, .*must be \[2, 3, "):
        gdn_commit(GdnStates.of([before, before]), factors, torch.zeros(2).int())
    with pytest.raises(ValueError, match=r"4 requests, but factors has 3 rows"):
        gdn_commit(states, factors, torch.zeros(4).int())
    with pytest.raises(ValueError, match=r"GdnStates: no state tensors"):
        GdnStates.of([])
    with pytest.raises(ValueError, match=r"layer 1 is torch\.bfloat16 .*layer 0 is torch\.float32"):
        GdnStates.of([before, before.bfloat16()])
    with pytest.raises(ValueError, match=r"layer 0 is .*aligned to 16"):
        GdnStates.of([torch.zeros(2, 2 * 32 * 32 + 1)[:, 1:].unflatten(1, (2, 32, 32))])


def test_workspace_starts_without_tokens(device):
    """Catches a first commit that would act on memory nobody has written."""
    case = make_case(torch.Generator().manual_seed(30), [2])
    state = to_device(case, device)["state"]
    factors = make_factors(case, device=device)
    assert isinstance(factors, GdnFactors)
    launch_gdn_commit(GdnStates.of([state]), factors, torch.full((2,), 3).int().to(device))
    assert torch.equal(state.cpu(), case["state"])
