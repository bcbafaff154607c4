"""The factors of all Gated DeltaNet layers, kept from verification to commit of one step.

Rows are the drafting requests of the step in batch order: nothing outlives the step, so the cache
pages stay as they are and admission, preemption and abort need no bookkeeping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forespark.triton_kernels.gdn_commit import gdn_commit
from forespark.triton_kernels.gdn_types import GdnFactors, GdnStates


class GdnWorkspace:
    """Factors and layers of one engine; layers join in the order in which they are built."""

    def __init__(self, factors: GdnFactors) -> None:
        self.factors = factors
        self.layers: list[Any] = []  # with `prefix` and `kv_cache` (window, state)
        self._states: GdnStates | None = None

    def join(self, layer: Any) -> int:
        """The layer's index."""
        self.layers.append(layer)
        if len(self.layers) > self.factors.slot.shape[0]:
            raise ValueError(
                f"{layer.prefix}: the target's layer_types name {self.factors.slot.shape[0]} "
                "linear_attention layers, this is one more; correct its config.json"
            )
        return len(self.layers) - 1

    @property
    def first(self) -> str:
        """Name of the layer whose cache group commits for all of them."""
        return str(self.layers[0].prefix)

    def states(self) -> GdnStates:
        """The table of all states, built again when the cache was allocated again."""
        tensors = [layer.kv_cache[1] for layer in self.layers]
        known = self._states
        if known is None or not _same(known.tensors, tensors):
            known = self._states = GdnStates.of(tensors)
        return known

    def commit(self, accepted: torch.Tensor) -> None:  # integer [n], tokens of each row to keep
        """Move all states to where they stand after the accepted tokens."""
        gdn_commit(self.states(), self.factors, accepted.to(torch.int32).contiguous())


def _same(known: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    pairs = zip(known, tensors, strict=True)
    return all(one.data_ptr() == two.data_ptr() for one, two in pairs)


def workspace_of(context: dict[str, Any]) -> GdnWorkspace | None:
    """The workspace of an engine, found through its layers (`static_forward_context`)."""
    found = (getattr(layer, "workspace", None) for layer in context.values())
    return next((one for one in found if isinstance(one, GdnWorkspace)), None)
