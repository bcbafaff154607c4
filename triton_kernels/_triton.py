"""Triton where it is installed, and a stand-in where it is not.

A CPU-only torch comes without Triton, and there every wrapper of this folder runs its reference.
The stand-in lets the modules be imported; launching one of its kernels raises.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

HAVE_TRITON = find_spec("triton") is not None


class _NoTriton:
    """What `jit` returns without Triton: any launch says what is missing."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.name = kernel.__name__

    def __getitem__(self, grid: object) -> Callable[..., Any]:
        raise RuntimeError(f"{self.name}: Triton is not installed, so only CPU tensors work")


if HAVE_TRITON:
    import triton
    import triton.language as tl
else:
    triton = SimpleNamespace(
        jit=lambda kernel=None, **_: _NoTriton(kernel) if kernel else _NoTriton
    )
    tl = SimpleNamespace()

__all__ = ["HAVE_TRITON", "next_power_of_2", "tl", "triton"]


def next_power_of_2(count: int) -> int:
    """Smallest power of two >= max(count, 1): the block sizes that Triton accepts."""
    return 1 << max(count - 1, 0).bit_length()
