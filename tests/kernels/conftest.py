"""Kernel tests: the interpreter on machines without a GPU, the real kernel where there is one.

Triton decides at decoration time whether a kernel is interpreted, so without CUDA this file sets
TRITON_INTERPRET while it imports the kernels and while a test runs them, and nowhere else. It also
finds the kernels in a plain checkout: on a GPU machine `python -m pytest tests/kernels` runs the
real kernels and needs no install.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ("rank", "envelope", "grouped_conv", "pack", "gdn_verify", "gdn_commit")
SENTINEL = -77  # in integer outputs before a kernel runs: no output may hold it by right


def _import_kernels(interpret: bool) -> None:
    before = os.environ.get("TRITON_INTERPRET")
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in KERNELS:
            importlib.import_module(f"forespark.triton_kernels.{name}")
    finally:
        if interpret:
            os.environ.pop("TRITON_INTERPRET")
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before


if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if find_spec("forespark.triton_kernels") is None:
    import forespark

    forespark.__path__.append(str(ROOT))
_import_kernels(interpret=not torch.cuda.is_available())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") and ROOT / "tests" / "kernels" in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run; fails when they are neither interpreted nor on a GPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed, so no kernel can be interpreted")
    from forespark.triton_kernels.rank import _rank_kernel

    if type(_rank_kernel).__name__ != "InterpretedFunction":
        pytest.fail("Triton was imported before tests/kernels: run this folder on its own")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


@pytest.fixture
def poisoned(device: torch.device) -> Callable[..., torch.Tensor]:
    """Builds outputs full of NaN (floats) or SENTINEL (integers), to see what is not written."""

    def build(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        fill = float("nan") if dtype.is_floating_point else SENTINEL
        return torch.full((shape,) if isinstance(shape, int) else shape, fill, dtype=dtype).to(
            device
        )

    return build
