"""Verify up to 16 drafted tokens per request on a Gated DeltaNet layer, without a state per token.

One program takes one request, one value head and BLOCK_V rows of its state, and all tokens as one
chunk (HybridSpec, section 3.4). Everything is held transposed, state rows on the first axis and
tokens on the second, so that the state is the left operand of every product as it lies in memory.
The state is only read: what the tokens would write is left in `GdnFactors` for `gdn_commit`.

The token tile is always 16 wide and the launch does not depend on the batch, so a token's result
has the same bits whatever follows it in its request and whatever else is in the batch.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import tl, triton
from forespark.triton_kernels.checks import runs_on_gpu
from forespark.triton_kernels.gdn_checks import check_verify
from forespark.triton_kernels.gdn_math import (
    decay_and_step,
    exact_dot,
    raw_dot,
    unit_upper_inverse,
)
from forespark.triton_kernels.gdn_ref import NORM_EPS, gdn_verify_ref
from forespark.triton_kernels.gdn_types import MAX_TOKENS, GdnFactors

BLOCK_V = 32  # the gated norm needs all rows of a head in one program instead
BLOCK_K = 32  # channels of the state in registers at once; more leave fewer programs on an SM
STAGES = 4  # all loads of a head of 128 in flight


@triton.jit
def _gdn_verify_kernel(
    qkv_ptr,  # [T, 2*H*K + HV*V]
    a_ptr,  # [T, HV]
    b_ptr,  # [T, HV]
    a_log_ptr,  # [HV]
    dt_bias_ptr,  # [HV]
    state_ptr,  # [slots, HV, V, K]
    slots_ptr,  # i32 [n]
    cu_ptr,  # i32 [n + 1]
    out_ptr,  # [T, HV, V]
    z_ptr,  # f32 [N, HV, V, TOKENS]
    k_ptr,  # [N, H, TOKENS, K]
    g_ptr,  # f32 [N, HV, TOKENS]
    slot_kept_ptr,  # i32 [N]
    width_kept_ptr,  # i32 [N]
    gate_ptr,  # [T, HV, V], read if NORM
    norm_ptr,  # [V], read if NORM
    qkv_stride,
    a_stride,
    b_stride,
    state_stride,
    slots_stride,
    gate_stride,
    scale,
    norm_eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    TERMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    start = tl.load(cu_ptr + request)
    width = tl.minimum(tl.load(cu_ptr + request + 1) - start, TOKENS)
    slot = tl.load(slots_ptr + request * slots_stride)
    live = (slot > 0) & (width > 0)
    if (tile == 0) & (head == 0):
        tl.store(slot_kept_ptr + request, tl.maximum(slot, 0))
        tl.store(width_kept_ptr + request, tl.where(live, width, 0))
    if not live:
        return

    token = tl.arange(0, TOKENS)
    valid = token < width
    # Rows past the end repeat the first one, which needs no masked, narrower loads. What becomes
    # of them is not stored, and no token before them reads it: the weights there are exact zeros.
    row = start.to(tl.int64) + tl.where(valid, token, 0)
    key_head = head // (HV // H)

    g, beta = decay_and_step(
        tl.load(a_ptr + row * a_stride + head),
        tl.load(b_ptr + row * b_stride + head),
        tl.load(a_log_ptr + head),
        tl.load(dt_bias_ptr + head),
    )

    # Raw queries and keys are exact operands; their norms come in afterwards as scales.
    channel = tl.arange(0, BLOCK_K)
    value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    qkv_row = qkv_ptr + row * qkv_stride
    state_ptr += slot.to(tl.int64) * state_stride + head * (V * K)
    kept_k_ptr = k_ptr + (request * H + key_head) * (TOKENS * K)
    keeps_k = (tile == 0) & (head % (HV // H) == 0)
    kk = tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    kq = tl.zeros([TOKENS, TOKENS], dtype=tl.float32)
    state_k = tl.zeros([BLOCK_V, TOKENS], dtype=tl.float32)
    state_q = tl.zeros([BLOCK_V, TOKENS], dtype=tl.float32)
    k_norm = tl.zeros([TOKENS], dtype=tl.float32)
    q_norm = tl.zeros([TOKENS], dtype=tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        state = tl.load(state_ptr + value[:, None] * K + first + channel[None, :]).to(tl.float32)
        key_column = key_head * K + first + channel
        q = tl.load(qkv_row[:, None] + key_column[None, :])
        k = tl.load(qkv_row[:, None] + H * K + key_column[None, :])
        if keeps_k:
            at = kept_k_ptr + token[:, None] * K + first + channel[None, :]
            tl.store(at, k, mask=valid[:, None])
        q_norm += tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1)
        k_norm += tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
        qt = tl.trans(q)
        kt = tl.trans(k)
        kk = raw_dot(k, kt, kk, TERMS, UPCAST)
        kq = raw_dot(k, qt, kq, TERMS, UPCAST)
        state_k = exact_dot(state, kt, state_k, TERMS, UPCAST)
        state_q = exact_dot(state, qt, state_q, TERMS, UPCAST)
    k_scale = tl.rsqrt(k_norm + EPS)
    q_scale = tl.rsqrt(q_norm + EPS) * scale

    # Axis 0: the token that writes, axis 1: the one that reads. Decays are summed per pair: a
    # difference of cumulative sums loses digits after a strong decay.
    writer = token[:, None]
    reader = token[None, :]
    since = tl.cumsum(tl.where(reader > writer, g[None, :], 0.0), axis=1)
    decay = tl.where(reader >= writer, tl.exp(since), 0.0) * k_scale[:, None]
    coupling = tl.where(reader > writer, kk * decay * (k_scale * beta)[None, :], 0.0)
    reads = tl.where(reader >= writer, kq * decay * q_scale[None, :], 0.0)
    since_start = tl.exp(tl.cumsum(g, axis=0))

    v_column = 2 * H * K + head * V + value
    v = tl.load(qkv_row[None, :] + v_column[:, None]).to(tl.float32)
    right = (v - state_k * (since_start * k_scale)[None, :]) * beta[None, :]
    z = tl.dot(right, unit_upper_inverse(coupling, TOKENS), input_precision="ieee")
    out = tl.dot(z, reads, state_q * (since_start * q_scale)[None, :], input_precision="ieee")

    if NORM:
        gate_at = gate_ptr + row[None, :] * gate_stride + head * V + value[:, None]
        gate = tl.load(gate_at).to(tl.float32)
        weight = tl.load(norm_ptr + value).to(tl.float32)
        out *= tl.rsqrt(tl.sum(out * out, axis=0) / V + norm_eps)[None, :]
        out *= weight[:, None] * gate / (1.0 + tl.exp(-gate))
    out_row = out_ptr + row * (HV * V) + head * V
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_row[None, :] + value[:, None], out, mask=valid[None, :])
    kept = (request * HV + head) * TOKENS
    z_at = z_ptr + kept * V + value[:, None] * TOKENS + token[None, :]
    tl.store(z_at, z, mask=valid[None, :])
    if tile == 0:
        tl.store(g_ptr + kept + token, g, mask=valid)


def launch_gdn_verify(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    factors: GdnFactors,
    gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    block_v: int = BLOCK_V,
    block_k: int = BLOCK_K,
    stages: int = STAGES,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments that `gdn_verify` has checked. The last four tune it."""
    requests = slots.shape[0]
    if requests == 0:
        return out
    _, value_heads, value_size, key_size = state.shape
    key_heads = factors.k.shape[2]
    block_v = value_size if gate is not None else min(block_v, value_size)
    terms = 0
    if mixed_qkv.dtype == torch.bfloat16:
        terms = 1 if state.dtype == torch.bfloat16 else 3
    _gdn_verify_kernel[(value_size // block_v, value_heads, requests)](
        mixed_qkv,
        a,
        b,
        a_log,
        dt_bias,
        state,
        slots,
        cu_seqlens,
        out,
        factors.z,
        factors.k,
        factors.g,
        factors.slot,
        factors.width,
        out if gate is None else gate,
        out if norm_weight is None else norm_weight,
        mixed_qkv.stride(0),
        a.stride(0),
        b.stride(0),
        state.stride(0),
        slots.stride(0),
        0 if gate is None else gate.stride(0),
        key_size**-0.5,
        norm_eps,
        H=key_heads,
        HV=value_heads,
        K=key_size,
        V=value_size,
        EPS=NORM_EPS,
        TOKENS=MAX_TOKENS,
        BLOCK_V=block_v,
        BLOCK_K=min(block_k, key_size),
        STAGES=stages,
        NORM=gate is not None,
        TERMS=terms,
        UPCAST=mixed_qkv.device.type == "cpu",
        num_warps=num_warps or (8 if block_v > 64 else 4),
    )
    return out


def gdn_verify(
    mixed_qkv: torch.Tensor,  # bf16 or f32 [T, 2*H*K + HV*V], rows q, k, v after the convolution
    a: torch.Tensor,  # float [T, HV]
    b: torch.Tensor,  # float [T, HV]
    a_log: torch.Tensor,  # f32 [HV]
    dt_bias: torch.Tensor,  # float [HV]
    state: torch.Tensor,  # f32 or bf16 [slots, HV, V, K], only the slot stride is free
    slots: torch.Tensor,  # i32 [n], any stride; <= 0: padding, the request is skipped
    cu_seqlens: torch.Tensor,  # i32 [n + 1], rows of request r: cu[r] <= row < cu[r + 1]
    out: torch.Tensor,  # float [T, HV, V]
    factors: GdnFactors,  # one layer, N >= n rows
    gate: torch.Tensor | None = None,  # float [T, HV, V]: also norm and gate the output
    norm_weight: torch.Tensor | None = None,  # float [V], with `gate`
    norm_eps: float = 1e-6,
) -> torch.Tensor:
    """Write the layer's output of every token to `out`, return it, and fill `factors`.

    Requests have 0 to 16 tokens (later ones are ignored); rows of `out` outside of all requests and
    of padding are not written. mixed_qkv, a and b may have row strides. The state is not written.
    With `gate`: RMSNorm(output) * norm_weight * silu(gate) goes to `out`. A CUDA graph can capture
    the call, which is one launch; CPU tensors run `gdn_verify_ref`. Raises ValueError on any
    other argument.
    """
    inputs = (mixed_qkv, a, b, a_log, dt_bias, state, slots, cu_seqlens, out, factors)
    check_verify(*inputs, gate, norm_weight)
    verify = launch_gdn_verify if runs_on_gpu("gdn_verify", mixed_qkv) else gdn_verify_ref
    return verify(*inputs, gate, norm_weight, norm_eps)
