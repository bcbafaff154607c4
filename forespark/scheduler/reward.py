"""Per-length reward (section 4.3): R(d) = sum_{j <= d} S[d, j], the tokens a length-d draft earns.

R(0) = 0. R need not be concave, nor even non-decreasing: a longer draft is another proposal, and
its earlier positions may be accepted more or less often than a shorter draft's.
"""

from __future__ import annotations

import numpy as np
import torch

from forespark.core import FloatArray


def reward(curves: torch.Tensor) -> torch.Tensor:
    """f32 [n, K + 1] expected accepted tokens by length, of S [n, K, K] (d - 1, j - 1).

    Columns j > d are ignored, whatever they hold. Runs on the device of `curves`, without a sync.
    """
    per_length = torch.tril(curves.float()).sum(dim=-1)
    return torch.nn.functional.pad(per_length, (1, 0))


def reward_np(curves: FloatArray) -> FloatArray:
    """float32 [n, K + 1]: the NumPy twin of `reward`."""
    per_length = np.tril(np.asarray(curves, dtype=np.float32)).sum(axis=-1, dtype=np.float32)
    return np.pad(per_length, ((0, 0), (1, 0)))
