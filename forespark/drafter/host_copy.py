"""What the device measured, brought to the host one step later without waiting for it.

Copies have a fixed age: the host reads the copy launched one step before, never "the newest that
happens to be done", so every rank of a tensor-parallel group decides from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed


@dataclass
class HostCopy:
    """Tensors of one step on the host, with what the host remembered about that step."""

    arrays: dict[str, np.ndarray]
    context: Any


@dataclass
class _Flight:
    buffers: dict[str, torch.Tensor]
    event: torch.cuda.Event | None
    rows: dict[str, int] = field(default_factory=dict)
    context: Any = None
    busy: bool = False

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        self.rows = {name: tensor.shape[0] for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self.buffers[name][: tensor.shape[0]].copy_(tensor, non_blocking=True)


class HostCopies:
    """Two sets of host buffers filled in turn, on a GPU from a stream of their own."""

    def __init__(
        self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        pinned = self._stream is not None
        self._flights = [
            _Flight(
                {
                    name: torch.zeros(shape, dtype=dtype, pin_memory=pinned)
                    for name, (shape, dtype) in shapes.items()
                },
                torch.cuda.Event(blocking=True) if pinned else None,
            )
            for _ in range(2)
        ]
        self._next = 0

    def collect(self) -> HostCopy | None:
        """The copy launched last, once; None before the first. Waits for that copy alone."""
        flight = self._flights[self._next ^ 1]
        if not flight.busy:
            return None
        if flight.event is not None:
            with gpu_sync_allowed():
                flight.event.synchronize()
        flight.busy = False
        arrays = {name: flight.buffers[name][:rows].numpy() for name, rows in flight.rows.items()}
        return HostCopy(arrays, flight.context)

    def launch(self, tensors: dict[str, torch.Tensor], context: Any) -> None:
        """Start copying `tensors` into the leading rows of the buffers of the same names."""
        flight = self._flights[self._next]
        if self._stream is None:
            flight.fill(tensors)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                flight.fill(tensors)
                flight.event.record(self._stream)
            for tensor in tensors.values():
                tensor.record_stream(self._stream)
        flight.context, flight.busy = context, True
        self._next ^= 1
