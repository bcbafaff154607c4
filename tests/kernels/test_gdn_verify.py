"""`gdn_verify`: the kernel against the float64 reference, and what must not touch what.

Tolerance, relative to the norm of a request's values: every product is exact or float32 and sums
have at most 128 terms, which leaves a few 1e-7; 2e-6 is the acceptance bar. Comparisons of one
launch with another are bitwise.
"""

from __future__ import annotations

import pytest
import torch
from forespark.triton_kernels.gdn_ref import gdn_verify_ref
from forespark.triton_kernels.gdn_types import GdnFactors
from forespark.triton_kernels.gdn_verify import gdn_verify, launch_gdn_verify
from test_gdn_ref import REGIMES, make_case, make_factors, output_like

NAN = float("nan")
BAR = 2e-6
WIDTHS = [4, 0, 16, 1, 15]


def error(got, want):
    """Relative Frobenius error; inf where a value that should be finite is not."""
    got, want = got.double().cpu(), want.double().cpu()
    size = (got - want).norm() / want.norm().clamp(min=1e-30)
    return float(size) if size.isfinite() else float("inf")


def to_device(case, device):
    """The case on the device with the same strides (a plain copy would close the gaps)."""

    def move(tensor):
        strides = tensor.stride()
        room = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
        return room.copy_(tensor)

    return {name: move(tensor) for name, tensor in case.items()}


def run(device, case, factors=None, out=None, **options):
    """Output and factors of the kernel, on the CPU."""
    factors = make_factors(case, device=device) if factors is None else factors
    out = (output_like(case) if out is None else out).to(device)
    launch_gdn_verify(**to_device(case, device), out=out, factors=factors, **options)
    fields = (factors.z, factors.k, factors.g, factors.slot, factors.width)
    return out.cpu(), GdnFactors(*(field.cpu() for field in fields))


def check_against_reference(case, out, factors, bar=BAR, **options):
    """Outputs, factors and untouched rows of every request."""
    want_out, want = output_like(case).double(), make_factors(case)
    gdn_verify_ref(**case, out=want_out, factors=want, **options)
    count = len(case["slots"])
    assert torch.equal(factors.slot[0, :count], want.slot[0, :count])
    assert torch.equal(factors.width[0, :count], want.width[0, :count])
    for request, width in enumerate(want.width[0, :count].tolist()):
        begin = int(case["cu_seqlens"][request])
        assert error(out[begin : begin + width], want_out[begin : begin + width]) <= bar
        assert error(factors.z[0, request, ..., :width], want.z[0, request, ..., :width]) <= BAR
        decay = want.g[0, request, :, :width].clamp(min=-200)  # exp of less is 0 all the same
        assert error(factors.g[0, request, :, :width], decay) <= BAR
        kept = factors.k[0, request, :, :width]
        assert torch.equal(kept, want.k[0, request, :, :width])
    assert torch.equal(out.isnan(), want_out.isnan())


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regime", REGIMES)
def test_kernel_matches_reference(device, regime, state_dtype):
    """Catches lost digits on repeated keys and long or broken memory, and any wrong index."""
    generator = torch.Generator().manual_seed(3)
    case = make_case(generator, WIDTHS, regime=regime, state_dtype=state_dtype)
    check_against_reference(case, *run(device, case))


@pytest.mark.parametrize(
    "heads, sizes, qkv_dtype",
    [
        ((1, 1), (128, 128), torch.bfloat16),
        ((2, 4), (64, 32), torch.bfloat16),
        ((1, 3), (32, 64), torch.float32),
        ((1, 2), (16, 16), torch.bfloat16),
    ],
)
def test_shapes_and_dtypes(device, heads, sizes, qkv_dtype):
    """Catches K and V mixed up, a head ratio other than 2, and float32 keys rounded on the way."""
    generator = torch.Generator().manual_seed(4)
    case = make_case(generator, [16, 3], heads, sizes, qkv_dtype=qkv_dtype)
    check_against_reference(case, *run(device, case))


@pytest.mark.parametrize("block_v, block_k", [(16, 16), (64, 64)])
def test_tiles_change_nothing(device, block_v, block_k):
    """Catches a tile or a slice of channels that is skipped or counted twice."""
    case = make_case(torch.Generator().manual_seed(5), [7], (1, 1), (64, 64))
    out, factors = run(device, case, block_v=block_v, block_k=block_k)
    check_against_reference(case, out, factors)


def make_gate(generator, case, device):
    """Options of the gated norm for the reference and for the device, with strided gates."""
    rows, heads, size = output_like(case).shape
    gates = torch.randn(rows, heads * size + 8, generator=generator).to(torch.bfloat16)
    weight = torch.rand(size, generator=generator).to(torch.bfloat16) + 0.5
    options = {"gate": gates, "norm_weight": weight, "norm_eps": 1e-2}
    moved = dict(options, gate=gates.to(device), norm_weight=weight.to(device))
    for one in (options, moved):
        one["gate"] = one["gate"][:, :-8].unflatten(1, (heads, size))
    return options, moved


def test_gated_norm(device):
    """Catches a norm over the wrong axis, or a gate read without its row stride or sigmoid."""
    generator = torch.Generator().manual_seed(6)
    case = make_case(generator, WIDTHS, sizes=(32, 64))
    options, moved = make_gate(generator, case, device)
    check_against_reference(case, *run(device, case, **moved), **options)


def test_a_request_sees_neither_neighbours_nor_its_own_tail(device):
    """Catches a launch or a tile that depends on the batch, and masked values that leak.

    The same 15 tokens: alone; cut short; as one of five with everything else NaN, from the other
    requests' inputs, gates and states to the rows past the end.
    """
    generator = torch.Generator().manual_seed(7)
    case = make_case(generator, [5, 15, 16], regime="duplicate")
    slot, rows = int(case["slots"][1]), slice(5, 20)
    for name in ("mixed_qkv", "a", "b"):
        kept = case[name][rows].clone()
        case[name].fill_(NAN)
        case[name][rows] = kept
    kept = case["state"][slot].clone()
    case["state"].fill_(NAN)
    case["state"][slot] = kept
    out, factors = run(device, case)
    assert bool(out[rows].isfinite().all())
    for width in (15, 14, 9, 1):
        alone = dict(case, slots=case["slots"][1:2])
        alone["cu_seqlens"] = torch.tensor([5, 5 + width], dtype=torch.int32)
        alone_out, alone_factors = run(device, alone)
        assert torch.equal(alone_out[5 : 5 + width], out[5 : 5 + width])
        for field in ("z", "g"):
            got, want = getattr(alone_factors, field)[0, 0], getattr(factors, field)[0, 1]
            assert torch.equal(got[..., :width], want[..., :width])


def test_bad_gates_stay_in_their_request(device):
    """Catches an infinite decay that turns into NaN, and a NaN that is swallowed or spreads."""
    generator = torch.Generator().manual_seed(8)
    case = make_case(generator, [3, 4, 2])
    case["a"][4, 0] = float("inf")
    clean, factors = run(device, case)
    check_against_reference(case, clean, factors)
    case["b"][1, 0] = NAN
    out, _ = run(device, case)
    assert bool(out[1:3, 0].isnan().all())
    assert torch.equal(out[3:9], clean[3:9]) and torch.equal(out[:3, 1], clean[:3, 1])


def test_padding_is_inert(device):
    """Catches a padding row of a captured graph that reads slot 0 or leaves factors to commit."""
    case = make_case(torch.Generator().manual_seed(9), [4, 4, 2])
    case["slots"][0], case["slots"][2] = 0, -1
    case["state"][0] = NAN
    out, factors = run(device, case)
    assert bool(out[:4].isnan().all() and out[8:].isnan().all() and out[4:8].isfinite().all())
    assert factors.width[0].tolist() == [0, 4, 0, 0]
    assert factors.slot[0].tolist() == [0, int(case["slots"][1]), 0, 0]
    assert bool(factors.z[0, [0, 2]].isnan().all() and factors.g[0, [0, 2]].isnan().all())


def test_tokens_past_sixteen_are_ignored(device):
    """Catches a longer request that writes over the factors of the next row."""
    case = make_case(torch.Generator().manual_seed(10), [19, 2])
    out, factors = run(device, case)
    assert factors.width[0].tolist() == [16, 2, 0]
    assert bool(out[16:19].isnan().all())
    check_against_reference(case, out, factors)


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches a refusal that does not say which argument is wrong and what it was."""
    case = make_case(torch.Generator().manual_seed(11), [2, 3])
    factors, out = make_factors(case), output_like(case)
    assert gdn_verify(**case, out=out, factors=factors) is out
    assert bool(out[:5].isfinite().all()) and factors.width[0].tolist() == [2, 3, 0]
    wrong = {
        r"state is torch\.float64 .*float32 or torch\.bfloat16": ("state", case["state"].double()),
        r"state is .*24.*V and K in \(16, 32, 64, 128\)": ("state", case["state"][..., :24]),
        r"a slot must be contiguous": ("state", case["state"].transpose(2, 3)),
        r"mixed_qkv is \[7, 127\]; .*2\*H\*32 \+ 64": ("mixed_qkv", case["mixed_qkv"][:, 1:]),
        r"mixed_qkv is torch\.float16 .*bfloat16": ("mixed_qkv", case["mixed_qkv"].half()),
        r"slots is torch\.int64 \[2\].*torch\.int32 \[2\]": ("slots", case["slots"].long()),
        r"2 requests, but factors has 1 rows": ("factors", make_factors(case, rows=1)),
        r"gate and norm_weight work together": ("gate", out),
    }
    for message, (name, value) in wrong.items():
        with pytest.raises(ValueError, match=message):
            gdn_verify(**{**case, "out": out, "factors": factors, name: value})


FULL = {"heads": (16, 32), "sizes": (128, 128)}


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("regime", REGIMES)
def test_full_size(device, regime, state_dtype):
    """Catches what only tensor cores and concurrent programs do: tiles, races, rounding."""
    generator = torch.Generator().manual_seed(12)
    case = make_case(generator, [16, 7, 0, 1, 12, 16, 2], regime=regime, **FULL)
    case["state"] = case["state"].to(state_dtype)
    check_against_reference(case, *run(device, case))


@pytest.mark.gpu
def test_bfloat16_output_at_full_size(device):
    """Catches an output rounded before the norm too: one rounding is 1.6e-3, two are 2.3e-3."""
    generator = torch.Generator().manual_seed(15)
    case = make_case(generator, [16, 7, 0, 1, 12, 16, 2], **FULL)
    options, moved = make_gate(generator, case, device)
    out = output_like(case).to(torch.bfloat16)
    check_against_reference(case, *run(device, case, out=out, **moved), bar=2e-3, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [(32, 32, 4), (64, 32, 4), (64, 64, 4), (128, 32, 8)])
def test_rows_are_bitwise_independent_at_full_size(device, tiles):
    """Catches sums whose order depends on the tokens after them or on the rest of the batch."""
    block_v, block_k, num_warps = tiles
    options = {"block_v": block_v, "block_k": block_k, "num_warps": num_warps}
    generator = torch.Generator().manual_seed(13)
    case = make_case(generator, [16] * 8, regime="duplicate", **FULL)
    want, _ = run(device, case, **options)
    for _ in range(40):
        widths = torch.randint(0, 17, (8,), generator=generator).tolist()
        rows = torch.cat([torch.arange(16 * r, 16 * r + w) for r, w in enumerate(widths)])
        part = dict(case, cu_seqlens=torch.tensor([0, *widths]).cumsum(0).to(torch.int32))
        for name in ("mixed_qkv", "a", "b"):
            part[name] = torch.cat([case[name][rows], case[name][-2:]])
        out, _ = run(device, part, **options)
        assert torch.equal(out[:-2], want[rows])


@pytest.mark.gpu
def test_replay_reads_new_lengths(device):
    """Catches lengths or slots that a CUDA graph freezes."""
    case = make_case(torch.Generator().manual_seed(14), [16, 16, 16], **FULL)
    moved, out = to_device(case, device), output_like(case).to(device)
    factors = make_factors(case, device=device)
    gdn_verify(**moved, out=out, factors=factors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gdn_verify(**moved, out=out, factors=factors)
    case["cu_seqlens"] = torch.tensor([0, 3, 3, 14], dtype=torch.int32)
    case["slots"] = case["slots"].flip(0)
    moved["cu_seqlens"].copy_(case["cu_seqlens"])
    moved["slots"].copy_(case["slots"])
    out.fill_(NAN)
    graph.replay()
    fields = (factors.z, factors.k, factors.g, factors.slot, factors.width)
    check_against_reference(case, out.cpu(), GdnFactors(*(field.cpu() for field in fields)))
