"""What Gated DeltaNet targets cannot be served with yet: one line each, before weights are read."""

from __future__ import annotations

import os
from typing import Any

import torch

from forespark.triton_kernels.gdn_types import HEAD_SIZES, MAX_TOKENS, STATE_DTYPES

LAYER = "QwenGatedDeltaNetAttention"
LAYOUT_VARIABLE = "VLLM_SSM_CONV_STATE_LAYOUT"


def _refuse(key: str, value: object, why: str, works: str) -> ValueError:
    return ValueError(
        f"{key}: {value} is not supported with drafts on a Gated DeltaNet target: {why}; {works}"
    )


def check_target(vllm_config: Any) -> None:
    """Raise ValueError for the first setting that compact drafts do not work with."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    config, drafts = vllm_config.model_config.hf_text_config, vllm_config.num_speculative_tokens
    if cache.mamba_cache_mode != "none":
        raise _refuse(
            "mamba_cache_mode", cache.mamba_cache_mode,
            "a state at a block boundary inside a draft is never written",
            "use none (enable_prefix_caching false)",
        )  # fmt: skip
    if parallel.pipeline_parallel_size > 1:
        raise _refuse(
            "pipeline_parallel_size", parallel.pipeline_parallel_size,
            "only the last stage knows what was accepted",
            "use 1 and tensor_parallel_size for more GPUs",
        )  # fmt: skip
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        raise _refuse(
            "kv_transfer_config", transfer.kv_connector,
            "a connector may read a state before the accepted tokens are in it", "leave it out",
        )  # fmt: skip
    for key in ("linear_key_head_dim", "linear_value_head_dim"):
        if getattr(config, key) not in HEAD_SIZES:
            raise _refuse(
                key, getattr(config, key), "the kernels have tiles for other head sizes",
                f"sizes {', '.join(map(str, HEAD_SIZES))} work",
            )  # fmt: skip
    if drafts >= MAX_TOKENS:
        raise _refuse(
            "num_speculative_tokens", drafts, f"one chunk holds {MAX_TOKENS} tokens, one of them "
            "the anchor", f"use {MAX_TOKENS - 1} or fewer",
        )  # fmt: skip
    layout = os.environ.get(LAYOUT_VARIABLE, "SD")
    if layout != "SD":
        raise _refuse(
            LAYOUT_VARIABLE, layout, "its rolling window is only tested channel-last",
            "unset it or use SD",
        )  # fmt: skip
    if getattr(cache, "use_replayssm", False):
        raise _refuse("use_replayssm", True, "it keeps drafts its own way", "leave it out")


def check_state_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless the kernels take recurrent states of this dtype."""
    if dtype not in STATE_DTYPES:
        raise _refuse(
            "mamba_ssm_cache_dtype", dtype, "the kernels rebuild float32 and bfloat16 states",
            "use float32 or bfloat16",
        )  # fmt: skip


def check_layer(registered: dict[str, type], ours: type) -> None:
    """Raise ValueError when another plugin has replaced the layer."""
    other = registered.get(LAYER)
    if other is not None and other is not ours:
        raise _refuse(
            LAYER, f"{other.__module__}.{other.__qualname__}", "another plugin replaced the layer",
            "disable it (VLLM_PLUGINS=forespark)",
        )  # fmt: skip
