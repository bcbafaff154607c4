"""vLLM's CPU operator of a Gated DeltaNet layer: it refuses float32 and wants a state a token."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


@functools.cache
def torch_for_ours(original: Callable[..., None]) -> Callable[..., None]:
    """The operator that hands layers of `active.runs_in_torch` to their own core."""

    # vLLM derives the operator's schema from these annotations.
    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        context = get_forward_context()
        layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if not getattr(layer, "runs_in_torch", False):
            original(mixed_qkv, b, a, core_attn_out, layer_name)
        elif isinstance(context.attn_metadata, dict):
            metadata = context.attn_metadata[layer.prefix]
            layer.torch_core(mixed_qkv, b, a, core_attn_out, metadata)

    return cpu_gdn_attention_core
