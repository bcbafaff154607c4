"""vLLM's attributes that change for Gated DeltaNet targets, and when."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from forespark.hybrid.active import drafts_compactly, gdn_layers
from forespark.hybrid.first_token import run_as_drafts
from forespark.hybrid.refusals import LAYER, check_layer, check_target
from forespark.patching import Patch


def _check_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _validate_batch_sharded_sampling(self: Any) -> None:
        original(self)
        if drafts_compactly(self):
            check_target(self)

    return _validate_batch_sharded_sampling


def _install_in_worker(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if gdn_layers(vllm_config):
            install()
        original(self, vllm_config, *args, **kwargs)

    return __init__


def _with_commits(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        if drafts_compactly(vllm_config):
            from vllm.v1.worker.gpu.model_states.recoverssm import RecoverSSMState

            self.recoverssm = RecoverSSMState()

    return __init__


def _with_padded_prompts(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def prepare_attn(self: Any, *args: Any, **kwargs: Any) -> Any:
        if drafts_compactly(self.vllm_config):
            given = signature.bind(self, *args, **kwargs).arguments
            if not given.get("for_capture", False):
                run_as_drafts(
                    given["input_batch"],
                    given["block_tables"],
                    given["kv_cache_config"].kv_cache_groups,
                    self.vllm_config.compilation_config.static_forward_context,
                )
        return original(self, *args, **kwargs)

    return prepare_attn


def host_patches() -> list[Patch]:
    """Applied by the plugin in every process."""
    return [
        Patch(
            "vllm.config.vllm:VllmConfig",
            "_validate_batch_sharded_sampling",
            "the last check of a configuration; add those of Gated DeltaNet targets",
            wrap=_check_config,
        ),
        Patch(
            "vllm.v1.worker.worker_base:WorkerBase",
            "__init__",
            "called after a worker process has loaded its plugins, before it makes any layer: "
            "replace the layer",
            wrap=_install_in_worker,
        ),
    ]


def worker_patches() -> list[Patch]:
    """Applied in a worker of a Gated DeltaNet target."""
    from vllm.platforms import current_platform

    patches = [
        Patch(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
            "__init__",
            "only Kimi's layers commit after sampling; let these do so too",
            wrap=_with_commits,
        ),
        Patch(
            "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
            "prepare_attn",
            "a prompt of one token padded with placeholders leaves them in its state; draft it",
            wrap=_with_padded_prompts,
        ),
    ]
    if current_platform.is_cpu():
        from forespark.hybrid.cpu_op import torch_for_ours

        patches.append(
            Patch(
                "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",
                "cpu_gdn_attention_core",
                "the CPU operator asserts bfloat16 and a state per drafted token",
                wrap=torch_for_ours,
            )
        )
    return patches


def install() -> None:
    """Replace the layer class in this process; calling it again does nothing."""
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    from forespark.hybrid.layer import CompactGdnLayer

    for patch in worker_patches():
        patch.apply()
    check_layer(op_registry_oot, CompactGdnLayer)
    if LAYER not in op_registry_oot:
        PluggableLayer.register_oot(CompactGdnLayer, name=LAYER)
