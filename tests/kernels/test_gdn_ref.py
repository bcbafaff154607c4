"""The Gated DeltaNet reference, and the random cases that the kernel tests share.

Everything here is float64: chunk and sequential form differ by rounding only, some 1e-15 of values
near 1, and the bound leaves a factor of 100 for the solve of nearly dependent keys.
"""

from __future__ import annotations

import math

import pytest
import torch
from forespark.triton_kernels import gdn_ref
from forespark.triton_kernels.gdn_types import MAX_TOKENS, GdnFactors

REGIMES = ("random", "duplicate", "alternating", "forgetful", "burst")
SLOTS = 9


def make_case(generator, widths, heads=(1, 2), sizes=(32, 32), regime="random", **dtypes):
    """Arguments of `gdn_verify` up to `cu_seqlens`, in the strided layouts of the engine.

    duplicate: keys 5 % apart, long memory; alternating: k, -k, k, no decay and full steps;
    forgetful: no memory at all; burst: one token forgets everything, the others nothing.
    """
    (key_heads, value_heads), (key_size, value_size) = heads, sizes
    qkv_dtype = dtypes.get("qkv_dtype", torch.bfloat16)
    state_dtype = dtypes.get("state_dtype", torch.float32)
    tokens = sum(widths) + 2  # a captured graph has rows of no request at its end

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    key_width = key_heads * key_size
    mixed = normal(tokens, 2 * key_width + value_heads * value_size + 16)
    ba = normal(tokens, 2 * value_heads)
    if regime in ("duplicate", "alternating"):
        noise = 0.05 if regime == "duplicate" else 0.0
        keys = normal(1, key_width) + noise * normal(tokens, key_width)
        if regime == "alternating":
            keys *= torch.tensor([1.0, -1.0]).repeat(tokens)[:tokens, None]
        mixed[:, key_width : 2 * key_width] = keys
    step, decay = {
        "random": (0.0, 0.0),
        "duplicate": (4.0, -8.0),
        "alternating": (20.0, -30.0),
        "forgetful": (0.0, 8.0),
        "burst": (0.0, -8.0),
    }[regime]
    ba[:, :value_heads] += step
    ba[:, value_heads:] += decay
    if regime == "burst":
        ba[2::7, value_heads:] = 40.0
    ba = ba.to(qkv_dtype)
    state = normal(SLOTS, value_heads * value_size * key_size + 32).to(state_dtype)
    table = torch.zeros(len(widths), 4, dtype=torch.int32)
    table[:, 0] = torch.randperm(SLOTS - 1, generator=generator)[: len(widths)] + 1
    return {
        "mixed_qkv": mixed.to(qkv_dtype)[:, :-16],
        "a": ba[:, value_heads:],
        "b": ba[:, :value_heads],
        "a_log": 2.5 * torch.rand(value_heads, generator=generator),
        "dt_bias": normal(value_heads),
        "state": state[:, :-32].unflatten(1, (value_heads, value_size, key_size)),
        "slots": table[:, 0],
        "cu_seqlens": torch.tensor([0, *widths]).cumsum(0).to(torch.int32),
    }


def make_factors(case, layers=1, rows=None, device="cpu", poison=True):
    """A workspace for the case, full of NaN, with one spare row."""
    _, value_heads, value_size, key_size = case["state"].shape
    key_heads = (case["mixed_qkv"].shape[1] - value_heads * value_size) // (2 * key_size)
    factors = GdnFactors.allocate(
        layers,
        rows or len(case["slots"]) + 1,
        key_heads,
        value_heads,
        key_size,
        value_size,
        case["mixed_qkv"].dtype,
        device,
    )
    if poison:
        for field in (factors.z, factors.k, factors.g):
            field.fill_(float("nan"))
    return factors


def output_like(case):
    """f32 [T, HV, V] full of NaN."""
    shape = (case["mixed_qkv"].shape[0], *case["state"].shape[1:3])
    return torch.full(shape, float("nan"))


def random_heads(generator, width, regime):
    """q, k, v, g, beta [2, width, ...] float64 of two requests with one head."""
    case = make_case(generator, [width, width], heads=(1, 1), sizes=(16, 16), regime=regime)
    starts, widths = case["cu_seqlens"][:-1], torch.tensor([width, width])
    names = ("mixed_qkv", "a", "b", "a_log", "dt_bias")
    inputs = (case[name] for name in names)
    heads = gdn_ref.split_heads(*inputs, starts, widths, 16, 16, torch.float64)
    return case["state"][:2, 0].double(), [x[:, 0, :width] for x in heads[:5]]


@pytest.mark.parametrize("regime", REGIMES)
def test_chunk_form_is_the_recurrence(regime):
    """Catches a wrong decay, sign or diagonal in the chunk form or the commit, for any w and m."""
    generator = torch.Generator().manual_seed(1)
    for width in range(1, MAX_TOKENS + 1):
        state, (q, k, v, g, beta) = random_heads(generator, width, regime)
        want, states = gdn_ref.sequential(state, q, k, v, g, beta)
        out, z = gdn_ref.chunk(state, q, k, v, g, beta)
        torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
        for accepted in range(width + 1):
            got = gdn_ref.rebuild(state, z, k, g, accepted)
            torch.testing.assert_close(got, states[accepted], atol=1e-12, rtol=0)


def plain_head(case, request, head):
    """Outputs and states of one request and value head, from the formulas, token by token."""
    _, value_heads, value_size, key_size = case["state"].shape
    key_heads = (case["mixed_qkv"].shape[1] - value_heads * value_size) // (2 * key_size)
    k_from = (key_heads + head * key_heads // value_heads) * key_size
    q_from = k_from - key_heads * key_size
    v_from = 2 * key_heads * key_size + head * value_size
    state = case["state"][int(case["slots"][request]), head].double()
    begin, end = case["cu_seqlens"][request : request + 2].tolist()
    outputs, states = [], [state]
    for row in range(begin, end):
        x = case["mixed_qkv"][row].double()
        q, k = x[q_from : q_from + key_size], x[k_from : k_from + key_size]
        v = x[v_from : v_from + value_size]
        q = q / math.sqrt(q.dot(q) + 1e-6) * key_size**-0.5
        k = k / math.sqrt(k.dot(k) + 1e-6)
        arrival = float(case["a"][row, head]) + float(case["dt_bias"][head])
        softplus = arrival if arrival > 20 else math.log1p(math.exp(arrival))
        alpha = math.exp(-math.exp(float(case["a_log"][head])) * softplus)
        beta = 1 / (1 + math.exp(-float(case["b"][row, head])))
        state = alpha * state
        state = state + beta * torch.outer(v - state.mv(k), k)
        outputs.append(state.mv(q))
        states.append(state)
    return outputs, states


@pytest.mark.parametrize("heads, sizes", [((2, 4), (32, 64)), ((1, 3), (64, 32))])
def test_reference_reads_the_engine_layout(heads, sizes):
    """Catches q, k, v or heads taken from the wrong columns, a and b swapped, V and K swapped."""
    generator = torch.Generator().manual_seed(2)
    case = make_case(generator, [3, 0, 16, 1], heads, sizes)
    factors, out = make_factors(case), output_like(case)
    before = case["state"].clone()
    gdn_ref.gdn_verify_ref(**case, out=out, factors=factors)
    assert torch.equal(case["state"], before)
    after = case["state"].clone()
    accepted = torch.tensor([2, 1, 16, 0], dtype=torch.int32)
    gdn_ref.gdn_commit_ref([after], factors, accepted)
    for request, count in enumerate((2, 0, 16, 0)):
        begin, end = case["cu_seqlens"][request : request + 2].tolist()
        slot = int(case["slots"][request])
        for head in range(heads[1]):
            outputs, states = plain_head(case, request, head)
            for row, want in zip(range(begin, end), outputs, strict=True):
                torch.testing.assert_close(out[row, head].double(), want, atol=1e-6, rtol=0)
            torch.testing.assert_close(after[slot, head].double(), states[count], atol=1e-6, rtol=0)
    assert bool(out[-2:].isnan().all())


def test_factors_of_a_request_are_small():
    """Catches a workspace that grows towards the state per token it is there to avoid."""
    factors = GdnFactors.allocate(30, 2, 16, 32, 128, 128, device="meta")
    assert factors.bytes_per_row() == 30 * (32 * 16 * 128 * 4 + 16 * 16 * 128 * 2 + 32 * 16 * 4 + 8)
    assert factors.bytes_per_row() < 10e6
