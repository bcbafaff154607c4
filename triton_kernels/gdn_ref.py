"""Specification of Gated DeltaNet verification and commit in plain torch; CPU tensors run it.

`sequential` is the recurrence itself: decay, delta, write, read. `chunk` gives the same outputs for
up to 16 tokens at once and the factors from which `rebuild` makes the state after any prefix
(HybridSpec, appendix C.1). Leading dimensions (...) are requests and value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from forespark.triton_kernels.gdn_types import MAX_TOKENS, GdnFactors

NORM_EPS = 1e-6  # inside the square root of the l2 norm of queries and keys


class Heads(NamedTuple):
    """One round of n requests, spread over value heads and padded to 16 tokens.

    A padding token has k = v = g = beta = 0: it neither decays, writes nor reads.
    """

    q: torch.Tensor  # [n, HV, 16, K], normalised and scaled
    k: torch.Tensor  # [n, HV, 16, K], normalised
    v: torch.Tensor  # [n, HV, 16, V]
    g: torch.Tensor  # [n, HV, 16], log decay
    beta: torch.Tensor  # [n, HV, 16]
    raw_k: torch.Tensor  # [n, H, 16, K]


def gates(
    a: torch.Tensor,  # [..., HV]
    b: torch.Tensor,  # [..., HV]
    a_log: torch.Tensor,  # [HV]
    dt_bias: torch.Tensor,  # [HV]
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) and step size beta = sigmoid(b)."""
    softplus = torch.nn.functional.softplus(a.to(dtype) + dt_bias.to(dtype), threshold=20.0)
    return -a_log.to(dtype).exp() * softplus, b.to(dtype).sigmoid()


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """Rows of the last dimension over sqrt(sum of squares + 1e-6)."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def sequential(
    state: torch.Tensor,  # [..., V, K]
    q: torch.Tensor,  # [..., w, K], normalised and scaled
    k: torch.Tensor,  # [..., w, K], normalised
    v: torch.Tensor,  # [..., w, V]
    g: torch.Tensor,  # [..., w]
    beta: torch.Tensor,  # [..., w]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [..., w, V] and the states after 0, 1, ... w tokens."""
    states, outputs = [state], []
    for token in range(q.shape[-2]):
        state = state * g[..., token, None, None].exp()
        error = v[..., token, :] - (state @ k[..., token, :, None])[..., 0]
        write = beta[..., token, None] * error
        state = state + write[..., :, None] * k[..., token, None, :]
        outputs.append((state @ q[..., token, :, None])[..., 0])
        states.append(state)
    return torch.stack(outputs, -2) if outputs else torch.zeros_like(v), states


def chunk(
    state: torch.Tensor,  # [..., V, K]
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [..., w, V] and writes z [..., w, V] of `sequential`, by one triangular solve."""
    decay = pair_decay(g)
    since_start = g.cumsum(-1).exp()[..., None]
    coupling = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    right = beta[..., None] * (v - since_start * (k @ state.mT))
    z = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
    return since_start * (q @ state.mT) + (decay * (q @ k.mT)).tril() @ z, z


def pair_decay(g: torch.Tensor) -> torch.Tensor:
    """[..., w, w]: exp(g_(j+1) + ... + g_i) at (i, j) for j <= i, 1 above the diagonal.

    Summed per pair: a difference of cumulative sums loses digits after a strong decay.
    """
    width = g.shape[-1]
    later = torch.ones(width, width, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(later, g[..., :, None], 0.0).cumsum(-2).exp()


def rebuild(
    state: torch.Tensor,  # [..., V, K]
    z: torch.Tensor,  # [..., w, V]
    k: torch.Tensor,  # [..., w, K], normalised
    g: torch.Tensor,  # [..., w]
    accepted: int,
) -> torch.Tensor:
    """The state after `accepted` tokens, 0..w; 0 returns `state` itself."""
    if accepted == 0:
        return state
    g, z, k = g[..., :accepted], z[..., :accepted, :], k[..., :accepted, :]
    weight = pair_decay(g)[..., -1, :, None]
    return g.sum(-1).exp()[..., None, None] * state + (z * weight).mT @ k


def gated_norm(
    x: torch.Tensor,  # [..., V]
    gate: torch.Tensor,  # [..., V]
    weight: torch.Tensor,  # [V]
    eps: float,
) -> torch.Tensor:
    """RMSNorm(x) * weight * silu(gate)."""
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * weight * torch.nn.functional.silu(gate)


def split_heads(
    mixed_qkv: torch.Tensor,  # [T, 2*H*K + HV*V]
    a: torch.Tensor,  # [T, HV]
    b: torch.Tensor,  # [T, HV]
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    starts: torch.Tensor,  # integer [n], first row of each request
    widths: torch.Tensor,  # integer [n], 0..16
    key_size: int,
    value_size: int,
    dtype: torch.dtype,
) -> Heads:
    """Gather each request's tokens; value head h reads key head h // (HV / H)."""
    value_heads = a_log.shape[0]
    key_width = (mixed_qkv.shape[1] - value_heads * value_size) // 2
    token = torch.arange(MAX_TOKENS, device=mixed_qkv.device)
    valid = token < widths[:, None]
    rows = torch.where(valid, starts[:, None] + token, 0)
    fill = valid[..., None]
    sizes = [key_width, key_width, value_heads * value_size]
    q, k, v = torch.where(fill, mixed_qkv[rows], 0).split(sizes, -1)
    q, raw_k = (x.unflatten(-1, (-1, key_size)).transpose(1, 2) for x in (q, k))
    repeats = value_heads // raw_k.shape[1]
    g, beta = gates(a[rows], b[rows], a_log, dt_bias, dtype)
    return Heads(
        q=(l2norm(q.to(dtype)) * key_size**-0.5).repeat_interleave(repeats, 1),
        k=l2norm(raw_k.to(dtype)).repeat_interleave(repeats, 1),
        v=v.unflatten(-1, (-1, value_size)).transpose(1, 2).to(dtype),
        g=torch.where(fill, g, 0).mT,
        beta=torch.where(fill, beta, 0).mT,
        raw_k=raw_k,
    )


def gdn_verify_ref(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,  # [slots, HV, V, K]
    slots: torch.Tensor,  # integer [n], <= 0: padding
    cu_seqlens: torch.Tensor,  # integer [n + 1]
    out: torch.Tensor,  # [T, HV, V]
    factors: GdnFactors,  # one layer, N >= n
    gate: torch.Tensor | None = None,  # [T, HV, V]
    norm_weight: torch.Tensor | None = None,  # [V]
    norm_eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`gdn_verify` in `dtype`; also fills `factors` (rows of padding: width and slot only)."""
    starts, slots = cu_seqlens[:-1].long(), slots.long()
    live = slots > 0
    widths = torch.where(live, (cu_seqlens[1:].long() - starts).clamp(0, MAX_TOKENS), 0)
    rows = len(slots)
    factors.slot[0, :rows] = slots.clamp(min=0).int()
    factors.width[0, :rows] = widths.int()
    live = widths > 0
    if not live.any():
        return out
    starts, widths = starts[live], widths[live]
    value_size, key_size = state.shape[2:]
    heads = split_heads(
        mixed_qkv, a, b, a_log, dt_bias, starts, widths, key_size, value_size, dtype
    )
    outputs, z = chunk(state[slots[live]].to(dtype), *heads[:5])
    token = torch.arange(MAX_TOKENS, device=out.device)
    valid = token < widths[:, None]
    at = (starts[:, None] + token)[valid]
    outputs = outputs.transpose(1, 2)[valid]
    if gate is not None and norm_weight is not None:
        outputs = gated_norm(outputs, gate[at].to(dtype), norm_weight.to(dtype), norm_eps)
    out[at] = outputs.to(out.dtype)
    at = live.nonzero()[:, 0]
    factors.z[0, at] = z.mT.to(factors.z.dtype)
    factors.k[0, at] = heads.raw_k.to(factors.k.dtype)
    factors.g[0, at] = heads.g.to(factors.g.dtype)
    return out


def gdn_commit_ref(
    states: Sequence[torch.Tensor],  # L times [slots, HV, V, K], written in place
    factors: GdnFactors,  # L layers, N >= n
    accepted: torch.Tensor,  # integer [n]
    dtype: torch.dtype = torch.float64,
) -> None:
    """`gdn_commit` in `dtype`, request by request."""
    for layer, state in enumerate(states):
        for row, count in enumerate(accepted.tolist()):
            slot = int(factors.slot[layer, row])
            count = min(count, int(factors.width[layer, row]))
            if slot <= 0 or count <= 0:
                continue
            z, k, g = (x[layer, row].to(dtype) for x in (factors.z, factors.k, factors.g))
            k = l2norm(k).repeat_interleave(z.shape[0] // k.shape[0], 0)
            state[slot] = rebuild(state[slot].to(dtype), z.mT, k, g, count).to(state.dtype)
