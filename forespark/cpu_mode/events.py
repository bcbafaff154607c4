"""A host clock behind the CUDA event interface.

On a CPU every operation is finished when its call returns, so recording is reading the clock and
waiting is nothing. vLLM's own stand-in lacks `elapsed_time` and `query`.
"""

from __future__ import annotations

import time
from typing import Any


class HostEvent:
    """Drop-in for `torch.cuda.Event` where work runs on the calling thread."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, *_args: Any) -> None:
        """Remember now."""
        self._recorded_s = time.perf_counter()

    def wait(self, *_args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Work is always finished."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("elapsed_time needs both events recorded")
        return (end._recorded_s - self._recorded_s) * 1e3
