"""What changes in a worker, before its model runner exists.

Runs from the platform's kernel-override hook: after the plugins of the worker process are loaded
and before the worker class is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forespark.cpu_mode.events import HostEvent
from forespark.cpu_mode.nucleus import apply_top_k_top_p
from forespark.patching import Patch


def next_power_of_2(value: int) -> int:
    """Smallest power of two >= value."""
    return 1 << max(int(value) - 1, 0).bit_length()


def normalize_context_k(model: Any, keys: torch.Tensor) -> torch.Tensor:
    """RMS-normalise every draft layer's context keys with that layer's own weight.

    keys  [L, tokens, heads, head_dim], all layers of the drafter stacked
    """
    scaled = keys.float()
    scaled = scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + model._rms_norm_eps)
    return (scaled * model._k_norm_weights.float()[:, None, None, :]).to(keys.dtype)


def _gather_integers_as_bits(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def all_gather(communicator: Any, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if tensor.dtype not in (torch.int64, torch.int32):
            return upstream(communicator, tensor, dim)
        # A gather only moves bits: two floats carry one int64.
        bits = tensor.contiguous().view(torch.float32)
        return upstream(communicator, bits, dim).view(tensor.dtype)

    return all_gather


def _no_unsupported_backend(*_args: Any, **_kwargs: Any) -> None:
    return None


def _same_cudagraph_mode(mode: Any, *, piecewise_capture_available: bool) -> Any:
    del piecewise_capture_available
    return mode


# Step cost guessed for stock adaptive verification: a cheap drafter, a line in the target's tokens.
_PRICED_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_DRAFT_MS = 0.2
_VERIFY_MS = (1.0, 0.15)  # a step, and every token in it


def _with_cost_curves(upstream: Callable[..., None]) -> Callable[..., None]:
    def __init__(manager: Any, *args: Any, **kwargs: Any) -> None:
        upstream(manager, *args, **kwargs)
        from vllm.v1.worker.gpu.spec_decode import adaptive_verification

        # A subclass brings its own costs.
        if type(manager) is adaptive_verification.AdaptiveVerificationManager:
            step, token = _VERIFY_MS
            manager.set_cost_curves(
                [(n, _DRAFT_MS) for n in _PRICED_SIZES],
                [(n, step + token * n) for n in _PRICED_SIZES],
            )

    return __init__


def worker_patches() -> list[Patch]:
    """The patches of a worker process, as typed records."""
    # Replaces torch.cuda names on import and must come before any runner module.
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    adaptive = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
    runner = "vllm.v1.worker.gpu.model_runner"
    return [
        Patch(
            triton,
            "next_power_of_2",
            "the placeholder of an absent Triton lacks a helper the V2 runner calls",
            replacement=next_power_of_2,
            create=True,
        ),
        *(
            Patch(
                owner,
                name,
                "the CPU event placeholder has no elapsed_time, so steps cannot be timed",
                replacement=HostEvent,
            )
            for owner, name in (
                ("torch", "Event"),
                ("torch.cuda", "Event"),
                ("vllm.v1.worker.cpu.shm", "_EventPlaceholder"),
            )
        ),
        Patch(
            adaptive,
            "get_varlen_cudagraph_unsupported_backend",
            "CPU attention is refused for not replaying graphs; eagerly it takes any query length",
            replacement=_no_unsupported_backend,
        ),
        Patch(
            runner,
            "resolve_adaptive_cudagraph_mode",
            "adaptive verification asserts a full-graph mode; a CPU keeps NONE",
            replacement=_same_cudagraph_mode,
        ),
        Patch(
            f"{adaptive}:AdaptiveVerificationManager",
            "__init__",
            "a CPU worker captures no graphs, so step costs are never profiled; use a guess",
            wrap=_with_cost_curves,
        ),
        Patch(
            adaptive,
            "_assign_draft_token_budget_compiled",
            "the budget split is compiled with inductor, which needs a C++ compiler; run eagerly",
            replacement=adaptive_verification._assign_draft_token_budget,
        ),
        *(
            Patch(
                f"vllm.v1.worker.gpu.sample.{module}",
                "apply_top_k_top_p",
                "top-p sorts the whole vocabulary of every row, milliseconds each on a CPU",
                replacement=apply_top_k_top_p,
            )
            for module in ("states", "sampler")
        ),
        Patch(
            "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model",
            "_normalize_context_k",
            "the CPU rms_norm reads only row 0 of a two-dimensional weight: every draft layer "
            "would silently be normalised with layer 0's weight",
            replacement=normalize_context_k,
        ),
        Patch(
            "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
            "all_gather",
            "shared-memory all_gather has no integer kernel, which top-k candidates need under TP",
            wrap=_gather_integers_as_bits,
        ),
    ]


def install() -> None:
    """Apply the worker patches and register the torch kernels; idempotent."""
    from forespark.cpu_mode.kernels import register_torch_kernels

    for patch in worker_patches():
        patch.apply()
    register_torch_kernels()
