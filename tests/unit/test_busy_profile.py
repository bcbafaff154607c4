"""A profile taken beside other work on the GPU is named, not used silently."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


def speculator(device: str, *spreads: float) -> Any:
    return SimpleNamespace(device=SimpleNamespace(type=device), profile_spreads=list(spreads))


def test_a_busy_gpu_is_named() -> None:
    """Catches a table made of disturbed steps, and a free GPU refused for one slow step."""
    from forespark.verifier.profile import busy

    assert "equal steps took times 60% apart" in (busy(speculator("cuda", 0.5, 0.6, 0.9)) or "")
    assert busy(speculator("cuda", 0.01, 0.02, 3.0)) is None
    assert busy(speculator("cuda")) is None
    assert busy(speculator("cpu", 0.9, 0.9)) is None  # its cores are shared by design
