"""A Gated DeltaNet layer's convolution and recurrence in plain torch: what a CPU runs.

A token that is not drafted is a draft of which everything is accepted at once, so one specification
(`triton_kernels/gdn_ref.py`) serves prefills, single tokens and drafts.
"""

from __future__ import annotations

from typing import Any

import torch

from forespark.triton_kernels.gdn_ref import gdn_commit_ref, gdn_verify_ref
from forespark.triton_kernels.gdn_types import MAX_TOKENS, GdnFactors


def roll_window(
    window: torch.Tensor,  # [positions, channels], written in place
    x: torch.Tensor,  # [w, channels], the request's tokens
    weight: torch.Tensor,  # [channels, taps]
    kept: int,
) -> torch.Tensor:
    """silu of the causal convolution [w, channels].

    The window ends up holding the last taps - 2 tokens before x, then x: when `kept` tokens of x
    turn out to be accepted, the next round starts at position kept - 1.
    """
    taps = weight.shape[1]
    before = window[kept - 1 : kept - 2 + taps]
    line = torch.cat([before, x.to(window.dtype)])
    out = (line.unfold(0, taps, 1) * weight.to(line.dtype)).sum(-1)
    window[: taps - 2 + len(x)] = line[1:]
    return torch.nn.functional.silu(out).to(x.dtype)


def plain_window(
    window: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, has_state: bool
) -> torch.Tensor:
    """The same for tokens that all stay: the window holds the last taps - 1 of them."""
    taps = weight.shape[1]
    before = window[: taps - 1] if has_state else torch.zeros_like(window[: taps - 1])
    line = torch.cat([before, x.to(window.dtype)])
    out = (line.unfold(0, taps, 1) * weight.to(line.dtype)).sum(-1)
    window[: taps - 1] = line[len(line) - taps + 1 :]
    return torch.nn.functional.silu(out).to(x.dtype)


def _plain_rows(
    layer: Any,
    x: torch.Tensor,  # [T, channels], tokens of the requests one after the other
    b: torch.Tensor,  # [T, HV]
    a: torch.Tensor,
    weight: torch.Tensor,
    starts: list[int],  # n + 1
    slots: list[int],  # n
    has_state: list[bool],  # n
) -> torch.Tensor:
    """Outputs [T, HV, V] of prefills and single tokens; states and windows move on."""
    windows, states = layer.kv_cache
    _, value_heads, value_size, key_size = states.shape
    key_heads = layer.num_k_heads // layer.tp_size
    out = torch.zeros(len(x), value_heads, value_size, dtype=x.dtype)
    sizes = (key_heads, value_heads, key_size, value_size)
    factors = GdnFactors.allocate(1, 1, *sizes, dtype=torch.float64)
    for row, slot in enumerate(slots):
        begin, end = starts[row], starts[row + 1]
        if begin == end or slot <= 0:
            continue
        if not has_state[row]:
            states[slot] = 0
        mixed = plain_window(windows[slot], x[begin:end], weight, has_state[row])
        for first in range(begin, end, MAX_TOKENS):
            last = min(first + MAX_TOKENS, end)
            part = slice(first, last)
            count = torch.tensor([0, last - first], dtype=torch.int32)
            gdn_verify_ref(
                mixed[first - begin : last - begin], a[part], b[part], layer.A_log, layer.dt_bias,
                states, torch.tensor([slot]), count, out[part], factors,
            )  # fmt: skip
            gdn_commit_ref([states], factors, count[1:])
    return out


def _draft_rows(
    layer: Any, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, m: Any
) -> torch.Tensor:
    """Outputs [T, HV, V] of drafting requests; states wait for the commit."""
    windows, states = layer.kv_cache
    requests = m.num_spec_decodes
    slots, starts = m.spec_state_indices_tensor[:requests, 0], m.spec_query_start_loc
    mixed, bounds = torch.zeros_like(x), starts[: requests + 1].tolist()
    kept = m.num_accepted_tokens[:requests].tolist()
    for row, slot in enumerate(slots.tolist()):
        tokens = slice(bounds[row], bounds[row + 1])
        if slot > 0 and tokens.start < tokens.stop:
            mixed[tokens] = roll_window(windows[slot], x[tokens], weight, kept[row])
    out = torch.zeros(len(x), *states.shape[1:3], dtype=x.dtype)
    gdn_verify_ref(
        mixed, a, b, layer.A_log, layer.dt_bias, states, slots, starts[: requests + 1], out,
        layer.factors,
    )  # fmt: skip
    return out


def gdn_core(
    layer: Any,
    x: torch.Tensor,  # [T, channels] before the convolution
    b: torch.Tensor,  # [T, HV]
    a: torch.Tensor,  # [T, HV]
    out: torch.Tensor,  # [T, HV, V]
    m: Any,  # GDNAttentionMetadata
) -> None:
    """The layer between its projections, for a batch as vLLM's metadata describes it."""
    from vllm.model_executor.layers.mamba.ops.cpu.gdn_attention import _unpacked_conv_weight

    weight = _unpacked_conv_weight(layer)
    drafted = others = slice(0, m.num_actual_tokens)
    if m.spec_sequence_masks is not None:
        if m.num_prefills or m.num_decodes:
            drafted, others = m.spec_token_indx.long(), m.non_spec_token_indx.long()
        out[drafted] = _draft_rows(layer, x[drafted], b[drafted], a[drafted], weight, m)
    if m.num_prefills or m.num_decodes:
        starts = m.non_spec_query_start_loc.tolist()
        slots = m.non_spec_state_indices_tensor.tolist()[: len(starts) - 1]
        has_state = [True] * len(slots)
        if m.has_initial_state is not None:
            has_state = m.has_initial_state.tolist()
        rows = (x[others], b[others], a[others], weight, starts, slots, has_state)
        out[others] = _plain_rows(layer, *rows)
