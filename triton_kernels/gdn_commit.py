"""Rebuild the state of every Gated DeltaNet layer after the accepted tokens, in one launch.

S_m = exp(g_1 + ... + g_m) S_0 + sum_i exp(g_(i+1) + ... + g_m) z_i k_i^T from the factors that
`gdn_verify` kept (HybridSpec, appendix C.1). Layers lie in different tensors and, in different
cache groups, under different block ids: a table of addresses and the kept slots lead to each state.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import tl, triton
from forespark.triton_kernels.checks import runs_on_gpu
from forespark.triton_kernels.gdn_checks import check_commit
from forespark.triton_kernels.gdn_math import exact_dot
from forespark.triton_kernels.gdn_ref import NORM_EPS, gdn_commit_ref
from forespark.triton_kernels.gdn_types import MAX_TOKENS, GdnFactors, GdnStates

BLOCK_V = 32
NUM_WARPS = 4


@triton.jit
def _gdn_commit_kernel(
    pointers_ptr,  # i64 [L]
    strides_ptr,  # i64 [L]
    accepted_ptr,  # i32 [n]
    z_ptr,  # f32 [L, N, HV, V, TOKENS]
    k_ptr,  # [L, N, H, TOKENS, K]
    g_ptr,  # f32 [L, N, HV, TOKENS]
    slot_ptr,  # i32 [L, N]
    width_ptr,  # i32 [L, N]
    rows,  # N
    like_ptr,  # a pointer of the states' dtype, never read
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TERMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0) % (V // BLOCK_V)
    head = tl.program_id(0) // (V // BLOCK_V)
    request = tl.program_id(1)
    layer = tl.program_id(2)
    kept = layer.to(tl.int64) * rows + request
    slot = tl.load(slot_ptr + kept)
    count = tl.minimum(tl.load(accepted_ptr + request), tl.load(width_ptr + kept))
    if (slot <= 0) | (count <= 0):
        return

    base = tl.load(pointers_ptr + layer).to(like_ptr.dtype)
    # The hints follow the cast: before it the compiler forgets them and stores 4 bytes at a time.
    base = tl.multiple_of(base, 16)
    offset = tl.multiple_of(slot.to(tl.int64) * tl.load(strides_ptr + layer), 16)
    value = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, K)
    state_at = base + offset + head * (V * K) + value[:, None] * K + channel[None, :]
    state = tl.load(state_at).to(tl.float32)

    token = tl.arange(0, TOKENS)
    valid = token < count
    k_at = k_ptr + (kept * H + head // (HV // H)) * (TOKENS * K)
    k = tl.load(k_at + token[:, None] * K + channel[None, :], mask=valid[:, None], other=0.0)
    z_at = z_ptr + (kept * HV + head) * (V * TOKENS)
    z_mask = valid[None, :] & (value[:, None] < V)
    z = tl.load(z_at + value[:, None] * TOKENS + token[None, :], mask=z_mask, other=0.0)
    g = tl.load(g_ptr + (kept * HV + head) * TOKENS + token, mask=valid, other=0.0)

    k_norm = tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1)
    later = token[None, :] > token[:, None]
    since = tl.sum(tl.where(later, g[None, :], 0.0), axis=1)
    weight = tl.exp(since) * tl.rsqrt(k_norm + EPS)
    # Tensor cores truncate where they add to an accumulator: summed apart, the state is not biased.
    update = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    update = exact_dot(z * weight[None, :], k, update, TERMS, UPCAST)
    state = state * tl.exp(tl.sum(g, axis=0)) + update
    tl.store(state_at, state.to(like_ptr.dtype.element_ty))


def launch_gdn_commit(
    states: GdnStates,
    factors: GdnFactors,
    accepted: torch.Tensor,
    block_v: int = BLOCK_V,
    num_warps: int = NUM_WARPS,
) -> None:
    """Launch the kernel on arguments that `gdn_commit` has checked. The last two tune it."""
    layers, requests = len(states.tensors), accepted.shape[0]
    if requests == 0:
        return
    like = states.tensors[0]
    _, value_heads, value_size, key_size = like.shape
    block_v = min(block_v, value_size)
    _gdn_commit_kernel[(value_size // block_v * value_heads, requests, layers)](
        states.pointers,
        states.slot_strides,
        accepted,
        factors.z,
        factors.k,
        factors.g,
        factors.slot,
        factors.width,
        factors.slot.shape[1],
        like,
        H=factors.k.shape[2],
        HV=value_heads,
        K=key_size,
        V=value_size,
        EPS=NORM_EPS,
        TOKENS=MAX_TOKENS,
        BLOCK_V=block_v,
        TERMS=3 if factors.k.dtype == torch.bfloat16 else 0,
        UPCAST=like.device.type == "cpu",
        num_warps=num_warps,
    )


def gdn_commit(
    states: GdnStates,
    factors: GdnFactors,  # all L layers, as the last `gdn_verify` of each layer filled them
    accepted: torch.Tensor,  # i32 [n], tokens of each row to keep; clipped to 0..width
) -> None:
    """Move the state of every layer to where it stands after the accepted tokens of each row.

    Rows n and up of `factors`, padding rows and rows with nothing accepted leave their state as it
    is. Two live rows must not share a slot. A CUDA graph can capture the launch, which reads the
    counts on the device; CPU tensors run `gdn_commit_ref`. Raises ValueError on any other argument.
    """
    check_commit(states, factors, accepted)
    if runs_on_gpu("gdn_commit", accepted):
        launch_gdn_commit(states, factors, accepted)
    else:
        gdn_commit_ref(states.tensors, factors, accepted)
