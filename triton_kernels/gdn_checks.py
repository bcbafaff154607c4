"""Argument checks of `gdn_verify` and `gdn_commit`: each refusal names what it got."""

from __future__ import annotations

import torch
from forespark.triton_kernels.checks import check_tensor
from forespark.triton_kernels.gdn_types import (
    MAX_TOKENS,
    QKV_DTYPES,
    GdnFactors,
    GdnStates,
    check_state,
)

FLOATS = (torch.float32, torch.bfloat16)


def check_verify(
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
    gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> None:
    """Raise ValueError unless `gdn_verify` can run on these arguments."""
    name, device = "gdn_verify", mixed_qkv.device
    check_state(f"{name}: state", state)
    _, value_heads, value_size, key_size = state.shape
    tokens, width = mixed_qkv.shape if mixed_qkv.dim() == 2 else (-1, -1)
    key_heads, rest = divmod(width - value_heads * value_size, 2 * key_size)
    if rest or key_heads < 1 or value_heads % key_heads:
        raise ValueError(
            f"{name}: mixed_qkv is {list(mixed_qkv.shape)}; with a state of {list(state.shape)} "
            f"its width must be 2*H*{key_size} + {value_heads * value_size}, H a divisor of "
            f"{value_heads}"
        )
    check_tensor(name, "mixed_qkv", mixed_qkv, QKV_DTYPES, (-1, -1), device, contiguous=False)
    check_tensor(name, "state", state, state.dtype, tuple(state.shape), device, contiguous=False)
    for label, tensor in (("a", a), ("b", b)):
        shape = (tokens, value_heads)
        check_tensor(name, label, tensor, FLOATS, shape, device, contiguous=False)
    check_tensor(name, "a_log", a_log, FLOATS, (value_heads,), device)
    check_tensor(name, "dt_bias", dt_bias, FLOATS, (value_heads,), device)
    requests = cu_seqlens.shape[0] - 1
    check_tensor(name, "cu_seqlens", cu_seqlens, torch.int32, (-1,), device)
    if slots.dtype != torch.int32 or slots.shape != (requests,) or slots.device != device:
        raise ValueError(
            f"{name}: slots is {slots.dtype} {list(slots.shape)} on {slots.device}; it must be "
            f"torch.int32 [{requests}] (one less than cu_seqlens) on {device}"
        )
    check_tensor(name, "out", out, FLOATS, (tokens, value_heads, value_size), device)
    heads = (key_heads, value_heads, key_size, value_size)
    check_factors(name, factors, 1, requests, heads, device, mixed_qkv.dtype)
    if (gate is None) != (norm_weight is None):
        raise ValueError(f"{name}: gate and norm_weight work together; one of them is None")
    if gate is not None and norm_weight is not None:
        check_gate(name, out, gate, norm_weight)


def check_gate(name: str, out: torch.Tensor, gate: torch.Tensor, norm_weight: torch.Tensor) -> None:
    """Raise ValueError unless gate [T, HV, V] (free row stride) and norm_weight [V] fit `out`."""
    shape, device = tuple(out.shape), out.device
    check_tensor(name, "gate", gate, FLOATS, shape, device, contiguous=False)
    check_tensor(name, "norm_weight", norm_weight, FLOATS, shape[-1:], device)
    if shape[0] and not gate[0].is_contiguous():
        raise ValueError(
            f"{name}: gate has strides {list(gate.stride())}; only its row stride is free"
        )


def check_commit(states: GdnStates, factors: GdnFactors, accepted: torch.Tensor) -> None:
    """Raise ValueError unless `gdn_commit` can run on these arguments."""
    name, device = "gdn_commit", states.pointers.device
    _, value_heads, value_size, key_size = states.tensors[0].shape
    heads = (factors.k.shape[2], value_heads, key_size, value_size)
    check_tensor(name, "accepted", accepted, torch.int32, (-1,), device)
    layers = len(states.tensors)
    check_factors(name, factors, layers, accepted.shape[0], heads, device, factors.k.dtype)


def check_factors(
    name: str,
    factors: GdnFactors,
    layers: int,
    requests: int,
    heads: tuple[int, int, int, int],  # H, HV, K, V
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError unless the workspace has these sizes and room for the requests."""
    key_heads, value_heads, key_size, value_size = heads
    rows = factors.slot.shape[-1]
    if rows < requests:
        raise ValueError(
            f"{name}: {requests} requests, but factors has {rows} rows; allocate max_num_seqs rows"
        )
    z_shape = (layers, rows, value_heads, value_size, MAX_TOKENS)
    k_shape = (layers, rows, key_heads, MAX_TOKENS, key_size)
    check_tensor(name, "factors.z", factors.z, torch.float32, z_shape, device)
    check_tensor(name, "factors.k", factors.k, dtype, k_shape, device)
    g_shape = (layers, rows, value_heads, MAX_TOKENS)
    check_tensor(name, "factors.g", factors.g, torch.float32, g_shape, device)
    check_tensor(name, "factors.slot", factors.slot, torch.int32, (layers, rows), device)
    check_tensor(name, "factors.width", factors.width, torch.int32, (layers, rows), device)
