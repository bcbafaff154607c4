"""A broken checkpoint named by the weight: when it loads, and when its numbers reach the host.

Serving never waits for a check. A NaN ranks last on the device, so lengths stay in range for the
one step until its copy arrives; then the server stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from forespark.core import FloatArray

Named = Iterable[tuple[str, torch.Tensor]]
_LAYERS = {"scores": "the pre-draft estimator", "survival": "the post-draft estimator"}
_ADVICE = "the checkpoint is broken: save or download it again"


def check_weights(weights: Named, where: str) -> None:
    """Raise ValueError, one line, when a weight of the drafter `where` is NaN or infinite."""
    broken = broken_weight(weights)
    if broken is not None:
        raise ValueError(f"model: {where}: {broken}; {_ADVICE}")


def broken_weight(weights: Named) -> str | None:
    """What is wrong with the first weight that holds NaN or infinity; waits for the device once."""
    wide = [(name, w) for name, w in weights if w.is_floating_point() and w.itemsize > 1]
    if not wide:
        return None
    # A sum of finite numbers may overflow, an extreme may not; NaN passes through both extremes.
    extremes = torch.stack(
        [torch.stack(w.detach().flatten().aminmax()).float() for _, w in wide if w.numel()]
    ).cpu()
    names = [name for name, w in wide if w.numel()]
    for name, pair in zip(names, extremes.isfinite().all(dim=1).tolist(), strict=True):
        if not pair:
            values = next(w for other, w in wide if other == name)
            bad = int((~values.isfinite()).sum())
            return f"weight {name} has {bad} of {values.numel()} values that are NaN or infinite"
    return None


def check_estimates(arrays: Mapping[str, FloatArray], weights: Named) -> None:
    """Raise ValueError when last step's `scores` or `survival` [max_num_reqs, K] hold NaN or +inf.

    -inf is what a position that was never drafted holds. `weights` are searched for the cause only
    then.
    """
    for name, layer in _LAYERS.items():
        if arrays[name].size and not arrays[name].max() < np.inf:  # a maximum keeps NaN
            raise ValueError(_explained(arrays[name], layer, weights))


def _explained(values: FloatArray, layer: str, weights: Named) -> str:
    bad = np.argwhere(~(values < np.inf))
    slot, position = (int(index) for index in bad[0])
    cause = broken_weight(weights)
    cause = "every weight is finite, so it computes beyond its range" if cause is None else cause
    return (
        f"{layer}: {len(bad)} of {values.size} numbers are NaN or infinite, the first "
        f"{values[slot, position]} for draft token {position + 1} of request slot {slot}: {cause}; "
        f"{_ADVICE}, or serve with policy full"
    )
