"""Argument checks shared by the kernel wrappers. Each refusal names what it got."""

from __future__ import annotations

import torch


def check_tensor(
    kernel: str,
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int, ...],  # -1 accepts any size
    device: torch.device,
    contiguous: bool = True,
) -> None:
    """Raise ValueError unless the tensor has this dtype, shape, device and a dense layout.

    `contiguous=False` still asks for a dense last dimension: the kernels take row strides only.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    problem = None
    if tensor.device != device:
        problem = f"it must be on {device}"
    elif tensor.dtype not in dtypes:
        problem = f"its dtype must be {' or '.join(str(one) for one in dtypes)}"
    elif tensor.dim() != len(shape) or any(
        want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)
    ):
        problem = f"its shape must be {list(shape)} (-1: any)"
    elif contiguous and not tensor.is_contiguous():
        problem = "it must be contiguous"
    elif not contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        problem = "its last dimension must be dense"
    if problem:
        raise ValueError(
            f"{kernel}: {name} is {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} on {tensor.device}; {problem}"
        )


def runs_on_gpu(kernel: str, tensor: torch.Tensor) -> bool:
    """True for a GPU tensor (run the kernel), False for a CPU tensor (run the reference)."""
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{kernel}: device {tensor.device}; CUDA and CPU tensors work")
    return tensor.device.type == "cuda"
