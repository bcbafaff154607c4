"""What changes in every process: configuration checks that assume a GPU.

Nothing here imports model or worker code; the plugin runs it in the CLI, the API server, the engine
core, the workers and the model inspection subprocess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forespark.cpu_mode import norms
from forespark.hybrid.active import runs_in_torch
from forespark.patching import Patch


def check_adaptive_verification(config: Any) -> None:
    """Refuse what adaptive verification cannot do on a CPU either; it runs without CUDA graphs."""
    spec = config.speculative_config
    if not spec or not spec.enable_adaptive_verification:
        return
    if config.lora_config is not None:
        raise ValueError(
            "enable_adaptive_verification: True with LoRA: the LoRA mapping is built from "
            "untrimmed token boundaries; turn LoRA off, or verify full blocks "
            "(enable_adaptive_verification=false)"
        )
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ValueError(
            f"enable_adaptive_verification: True with pipeline_parallel_size {stages}: only the "
            "last stage knows the trimmed batch; use 1 stage or tensor parallelism"
        )


def needs_unported_kernels(config: Any) -> str | None:
    """The feature of this configuration whose V2 kernels have no CPU implementation, if any."""
    model = config.model_config
    if model is None:
        return None
    if model.runner_type != "generate":
        return f"runner_type {model.runner_type}"
    if (model.is_hybrid or model.is_attention_free) and not runs_in_torch(config):
        return "a hybrid or attention-free model"
    if model.is_multimodal_model or model.is_encoder_decoder:
        return "a multimodal or encoder-decoder model"
    if model.enable_prompt_embeds:
        return "prompt embeddings"
    return None


def _use_v2_model_runner(upstream: property) -> property:
    def use_v2_model_runner(config: Any) -> bool:
        from vllm import envs

        asked = envs.VLLM_USE_V2_MODEL_RUNNER
        if asked is None and needs_unported_kernels(config) is not None:
            return False
        assert upstream.fget is not None
        return upstream.fget(config)

    return property(use_v2_model_runner, doc="V2 wherever its kernels have a CPU implementation.")


def _register_overrides(upstream: classmethod) -> classmethod:
    original: Callable[[type], None] = upstream.__func__

    def register_triton_kernel_overrides(cls: type) -> None:
        _let_scans_pass_llvmlite()
        original(cls)
        from forespark.cpu_mode.worker_patches import install

        install()

    return classmethod(register_triton_kernel_overrides)


def _let_scans_pass_llvmlite() -> None:
    """vLLM asks every object of every loaded module for its `__dict__`.

    llvmlite's library handle, there since numba plans the steps, answers any name with a function.
    """
    from llvmlite.binding import ffi

    handle = type(ffi.lib)
    named = handle.__getattr__
    if hasattr(named, "_forespark"):
        return

    def __getattr__(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return named(self, name)

    __getattr__._forespark = True  # type: ignore[attr-defined]
    handle.__getattr__ = __getattr__


def _import_ir_kernels(upstream: classmethod) -> classmethod:
    def import_ir_kernels(cls: type) -> None:
        upstream.__func__(cls)
        norms.register_norms()

    return classmethod(import_ir_kernels)


def _ir_op_priority(upstream: classmethod) -> classmethod:
    def get_default_ir_op_priority(cls: type, vllm_config: Any) -> Any:
        return norms.norm_priority(vllm_config, upstream.__func__(cls, vllm_config))

    return classmethod(get_default_ir_op_priority)


def host_patches() -> list[Patch]:
    """The patches of every process, as typed records."""
    return [
        Patch(
            "vllm.config.vllm",
            "HAS_TRITON",
            "the V2 model runner is refused without a Triton backend; torch kernels stand in",
            replacement=True,
        ),
        Patch(
            "vllm.config.vllm:VllmConfig",
            "use_v2_model_runner",
            "the V2 runner would also be picked for models whose kernels are not ported",
            wrap=_use_v2_model_runner,
        ),
        Patch(
            "vllm.config.vllm:VllmConfig",
            "_validate_adaptive_verification",
            "adaptive verification demands full CUDA graphs, which a CPU never has",
            replacement=check_adaptive_verification,
        ),
        Patch(
            "vllm.platforms.cpu:CpuPlatform",
            "register_triton_kernel_overrides",
            "only the V1 runner's kernels have CPU implementations; add those of the V2 runner",
            wrap=_register_overrides,
        ),
        Patch(
            "vllm.platforms.cpu:CpuPlatform",
            "simple_compile_backend",
            "small helpers are compiled with inductor, which needs a C++ compiler on the host",
            replacement="eager",
        ),
        Patch(
            "vllm.platforms.cpu:CpuPlatform",
            "import_ir_kernels",
            "the CPU build's C++ norms are not registered for a CPU",
            wrap=_import_ir_kernels,
        ),
        Patch(
            "vllm.platforms.cpu:CpuPlatform",
            "get_default_ir_op_priority",
            "norms run as ten small torch operations each when nothing compiles the model",
            wrap=_ir_op_priority,
        ),
    ]
