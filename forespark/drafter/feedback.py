"""The way back from the device to the host: scores for the planner, results for the observer."""

from __future__ import annotations

from typing import Any

import torch

from forespark.drafter.host_copy import HostCopies, HostCopy
from forespark.drafter.planner import DraftRecord

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def step_shapes(reqs: int, steps: int, several_ranks: bool) -> Shapes:
    """What a planned step sends: at most `reqs` requests, drafts of at most `steps` tokens."""
    by_slot, by_request = ((reqs, steps), torch.float32), ((reqs,), torch.int32)
    shapes: Shapes = {"scores": by_slot, "survival": by_slot}
    shapes |= dict.fromkeys(("draft_lens", "num_sampled", "num_rejected"), by_request)
    if several_ranks:
        shapes["since_ms"] = ((1,), torch.float32)  # rank 0's time since the draft before
    return shapes


class Feedback:
    """Sends one step's tensors to the host and hands each step's results to the observer once.

    On a GPU they arrive one step later. On a CPU they are there at once and observed at once; what
    the planner reads keeps the same age on both.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.observer: Any = None  # forespark.verifier.observe.Observer, on rank 0 only
        self._copies = HostCopies(shapes, device)
        self._at_once = device.type == "cpu"

    def send(self, record: DraftRecord, tensors: dict[str, torch.Tensor]) -> None:
        """Start the copies of the step that `record` planned."""
        self._copies.launch(tensors, record)
        if self._at_once and self.observer is not None:
            self.observer.observe(record, {name: t.numpy() for name, t in tensors.items()})

    def receive(self) -> HostCopy | None:
        """What was sent last, unless it was received already."""
        arrived = self._copies.collect()
        if arrived is not None and not self._at_once and self.observer is not None:
            self.observer.observe(arrived.context, arrived.arrays)
        return arrived
