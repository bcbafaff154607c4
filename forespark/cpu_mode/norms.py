"""RMS norms of a CPU decode step through vLLM's own C++ kernels.

vLLM's intermediate ops (`vllm.ir`) run their plain torch definition on a CPU: ten small tensor
operations a norm, sixty norms a step in a thirty-layer model. The C++ kernels exist in the CPU
build but are offered to GPUs only. Used without compilation; inductor prefers the plain
definition, which it can fuse.
"""

from __future__ import annotations

from typing import Any

import torch

PROVIDER = "forespark_cpu"


def same_dtype(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """What the C++ rms_norm can take: a weight of the input's dtype over the whole row."""
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def same_dtype_residual(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    """What the C++ fused_add_rms_norm can take: as `same_dtype`, on contiguous rows."""
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype == x_residual.dtype
        and x.is_contiguous()
        and x_residual.is_contiguous()
    )


def rms_norm(
    x: torch.Tensor,  # [..., hidden]
    weight: torch.Tensor | None,  # [hidden]
    epsilon: float,
    variance_size: int | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
    return out


def fused_add_rms_norm(
    x: torch.Tensor,  # [..., hidden], becomes the normalised sum
    x_residual: torch.Tensor,  # [..., hidden], becomes the sum
    weight: torch.Tensor | None,  # [hidden]
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residual, keep the sum, return its norm; both in place."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def register_norms() -> None:
    """Offer both kernels to `vllm.ir` under our provider name; idempotent."""
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    available = hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")
    ir.ops.rms_norm.register_impl(PROVIDER, supported=available, supports_args=same_dtype)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER, supported=available, supports_args=same_dtype_residual, inplace=True
    )(fused_add_rms_norm)


def norm_priority(vllm_config: Any, upstream: Any) -> Any:
    """The upstream priorities, with our norms first when nothing compiles the model."""
    from vllm.config.compilation import CompilationMode

    if vllm_config.compilation_config.mode == CompilationMode.NONE:
        register_norms()
        upstream.rms_norm = [PROVIDER, *upstream.rms_norm]
        upstream.fused_add_rms_norm = [PROVIDER, *upstream.fused_add_rms_norm]
    return upstream
