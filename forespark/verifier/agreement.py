"""Ranks that plan alike need the same settings, prices, estimators and number libraries.

Each rank hashes what its plans depend on; before the first step all of them look at all hashes, so
a difference ends every rank with the same line.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import all_gather_object

from forespark import __version__
from forespark.config import ForeSparkConfig
from forespark.core import LatencyTable

Parts = Mapping[str, str]  # name of a part -> its hash


def parts_of(
    config: ForeSparkConfig,
    draft: LatencyTable | None,
    verify: LatencyTable | None,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, str]:
    """Hashes of everything a plan depends on that is not sent from rank 0 each step.

    `weights` are the estimators' tensors, their calibration included.
    """
    return {
        "the settings": _hash(json.dumps(config.settings(), sort_keys=True, default=str)),
        "the draft latency table": _hash(_table(draft)),
        "the verify latency table": _hash(_table(verify)),
        "the estimators": _hash(*(f"{name}:{_bytes_hash(w)}" for name, w in weights.items())),
        "the versions of forespark, NumPy and numba": _hash(_versions()),
    }


def disagreement(ranks: Sequence[Parts]) -> str | None:
    """One line that names the parts in which ranks differ from rank 0; None when none does."""
    first = ranks[0]
    names = list(dict.fromkeys(name for parts in ranks for name in parts))
    found = []
    for name in names:
        others = [
            str(rank) for rank, parts in enumerate(ranks) if parts.get(name) != first.get(name)
        ]
        if others:
            found.append(f"{name} (rank {', '.join(others)})")
    if not found:
        return None
    return (
        f"tensor_parallel_size: {len(ranks)} ranks must plan alike, and these differ from rank 0: "
        f"{'; '.join(found)}; give every rank the same files, settings and packages"
    )


def check_agreement(group: Any, parts: Parts) -> None:
    """Raise the same ValueError on every rank of vLLM's `group` unless all hold the same parts."""
    if group.world_size == 1:
        return
    ranks: list[Any] = [None] * group.world_size
    all_gather_object(ranks, dict(parts), group=group.cpu_group)
    line = disagreement(ranks)
    if line is not None:
        raise ValueError(line)


def _table(table: LatencyTable | None) -> str:
    if table is None:
        return "none"
    return json.dumps([table.sizes.tolist(), table.ms.tolist(), table.captured_limit])


def _versions() -> str:
    import numba

    return f"{__version__} {np.__version__} {numba.__version__} {platform.machine()}"


def _bytes_hash(weight: torch.Tensor) -> str:
    raw = weight.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
