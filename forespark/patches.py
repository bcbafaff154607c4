"""ForeSpark's patches of vLLM 0.32.0 beyond the engine arguments, each naming what it changes.

They are inert unless `additional_config["forespark"]` is set: an installed plugin changes nothing
for other models.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forespark.triton_kernels
from forespark.engine_args import active_config
from forespark.patching import Patch

logger = logging.getLogger("vllm.forespark")
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_CHUNK_BYTES = 2**32


def _config_of(vllm_config: Any) -> Any:
    return active_config(vllm_config.additional_config)


def _init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        config = _config_of(vllm_config)
        if config is None:
            return original(vllm_config, device, req_states)
        from forespark.verifier.setup import make_speculator

        return make_speculator(vllm_config, device, config)

    return init_speculator


def _initialize_kv_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        config = _config_of(self.vllm_config)
        if config is not None:
            from forespark.verifier.setup import attach_manager

            attach_manager(self, config)
        return result

    return initialize_kv_cache


def _uniform_fallback(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_manager(**kwargs: Any) -> Any:
        try:
            return original(**kwargs)
        except ValueError as error:
            config = _config_of(kwargs["vllm_config"])
            if config is None:
                raise
            from forespark.verifier.lengths import Split, planned_on_host, split_for

            groups, settings = kwargs["attn_groups"], config.scheduler
            if split_for(settings.split, groups) is Split.HOST:
                logger.info(
                    "scheduler.split: the host decides lengths, and trimmed steps run without full "
                    "CUDA graphs (%s)",
                    error,
                )
            else:
                recurrent = any(backend.is_ssm() for backend in planned_on_host(groups))
                works = "no other split" if recurrent else "scheduler.split: host"
                logger.warning(
                    "scheduler.policy: %s needs attention that takes unequal lengths from the "
                    "device; every request now drafts and verifies K tokens, as with "
                    "scheduler.policy: full; %s trims them here (%s)",
                    settings.policy, works, error,
                )  # fmt: skip
            return None

    return create_manager


def _name_the_key(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            config = _config_of(self.vllm_config)
            if config is None or "adaptive verification" not in str(error):
                raise
            reasons = " ".join(str(error).split("Reason", 1)[-1].split())
            raise ValueError(
                f"scheduler.policy: {config.scheduler.policy} verifies drafts of unequal lengths, "
                "which the attention backend of this target does not take from the device; use "
                "scheduler.split auto or host, scheduler.policy full, or another "
                f"attention_backend (vLLM's reasons: {reasons})"
            ) from None

    return load_model


def _either_split(original: Callable[..., Any]) -> Callable[..., Any]:
    from forespark.verifier.lengths import select_either

    return select_either(original)


def _add_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        if _config_of(self.vllm_config) is not None:
            from forespark.verifier.setup import after_admission

            after_admission(self, scheduler_output)
        return result

    return add_requests


def _sample(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, num_sampled, num_rejected = original(self, *args, **kwargs)
        ranks = getattr(self.speculator, "ranks", None)
        if ranks is not None:
            ranks.follow(output.sampled_token_ids, num_sampled, num_rejected)
        return output, num_sampled, num_rejected

    return sample


def _compile_or_warm_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any) -> Any:
        result = original(self)
        config = _config_of(self.vllm_config)
        if config is not None:
            from forespark.verifier.setup import finish_start

            finish_start(self.model_runner, config)
        return result

    return compile_or_warm_up_model


def _without_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate(self: Any) -> None:
        graphs = self.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if _config_of(self) is None or graphs:
            original(self)

    return validate


def _any_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def resolve(mode: Any, **kwargs: Any) -> Any:
        return original(mode, **kwargs) if mode.has_full_cudagraphs() else mode

    return resolve


def _only_with_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def unsupported_backend(attn_groups: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            return None
        return original(attn_groups, vllm_config, *args, **kwargs)

    return unsupported_backend


def _score_named_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    from forespark.verifier.named_tokens import score_named_tokens

    return score_named_tokens(original)


def _init_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _config_of(self.vllm_config) is not None:
            for patch in worker_patches():
                patch.apply()
        return original(self, *args, **kwargs)

    return init_device


def worker_patches() -> list[Patch]:
    """Applied in a worker that serves ForeSpark, before its model runner is imported."""
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    worker = "vllm.v1.worker.cpu_worker:CPUWorker" if cpu else "vllm.v1.worker.gpu_worker:Worker"
    patches = [
        Patch(
            _RUNNER,
            "init_speculator",
            "the speculator is chosen by method name; dflash becomes ForeSpark's when asked for",
            wrap=_init_speculator,
        ),
        Patch(
            f"{_RUNNER}:GPUModelRunner",
            "initialize_kv_cache",
            "the adaptive-verification manager is built here; replace it by the distributor",
            wrap=_initialize_kv_cache,
        ),
        Patch(
            f"{_RUNNER}:GPUModelRunner",
            "load_model",
            "a refused attention backend is reported by internal names; name the key to change",
            wrap=_name_the_key,
        ),
        Patch(
            "vllm.v1.attention.selector",
            "_cached_get_attn_backend",
            "trimming excludes backends that plan on the host; the host split gives them lengths",
            wrap=_either_split,
        ),
        Patch(
            _RUNNER,
            "maybe_create_adaptive_verification_manager",
            "a backend that needs host lengths or equal ones stops the server; serve what it takes",
            wrap=_uniform_fallback,
        ),
        Patch(
            f"{_RUNNER}:GPUModelRunner",
            "add_requests",
            "sampling parameters do not reach the manager; a request may opt out of drafts",
            wrap=_add_requests,
        ),
        Patch(
            f"{_RUNNER}:GPUModelRunner",
            "sample",
            "ranks are assumed to sample alike bit by bit; rank 0's tokens count on all of them",
            wrap=_sample,
        ),
        Patch(
            worker,
            "compile_or_warm_up_model",
            "costs are profiled only with graphs and without the LM head; measure them when warm",
            wrap=_compile_or_warm_up,
        ),
        Patch(
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
            "MAX_CHUNK_BYTES",
            "1 GiB of logits caps B at 1,254 tokens for 512 requests of a 150k vocabulary",
            replacement=_CHUNK_BYTES,
        ),
        Patch(
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler",
            "_verify_in_chunks",
            "logprob_token_ids is ignored beside drafts and ends in a 500; score those tokens",
            wrap=_score_named_tokens,
        ),
    ]
    if cpu:
        return patches  # CPU mode lifts the two graph checks for every method
    return [
        *patches,
        Patch(
            _RUNNER,
            "resolve_adaptive_cudagraph_mode",
            "adaptive verification asserts full CUDA graphs; eagerly any query length works",
            wrap=_any_mode,
        ),
        Patch(
            "vllm.v1.worker.gpu.spec_decode.adaptive_verification",
            "get_varlen_cudagraph_unsupported_backend",
            "a backend is refused for its graphs even when none are captured",
            wrap=_only_with_graphs,
        ),
    ]


def _not_our_kernels(original: Callable[[str], bool]) -> Callable[[str], bool]:
    ours = Path(forespark.triton_kernels.__file__).resolve().parent

    @functools.wraps(original)
    def has_module(name: str) -> bool:
        if name == "triton_kernels":
            spec = find_spec(name)
            places = [] if spec is None else list(spec.submodule_search_locations or [])
            if any(Path(place).resolve() == ours for place in places):
                return False
        return original(name)

    return has_module


def host_patches() -> list[Patch]:
    """Applied by the plugin in every process."""
    from vllm.platforms import current_platform

    patches = [
        Patch(
            "vllm.utils.import_utils",
            "_has_module",
            "started from this project's folder, vLLM takes its kernels for Triton's own package",
            wrap=_not_our_kernels,
        ),
        Patch(
            "vllm.v1.worker.worker_base:WorkerWrapperBase",
            "init_device",
            "the model runner is imported here: the last moment to patch its imports",
            wrap=_init_device,
        ),
    ]
    if current_platform.is_cpu():
        return patches
    return [
        *patches,
        Patch(
            "vllm.config.vllm:VllmConfig",
            "_validate_adaptive_verification",
            "adaptive verification is refused without full CUDA graphs; eagerly it works",
            wrap=_without_graphs,
        ),
    ]
