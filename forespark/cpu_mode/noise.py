"""Counter-based random numbers for the CPU sampler.

A draw depends only on (seed, position, stream, token): no generator state exists, so a request's
text does not depend on which requests share its batch. The numbers differ from the GPU's, the law
does not.

Key of a row: the 64-bit finaliser of splitmix64 over the seed, then over the position and the
stream. Draw of a token: two rounds of a 32-bit xor-shift-multiply hash of the token id, the low
half of the key added before the first round and the high half xor-ed before the second, so that
no two rows are shifted copies of each other.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

TARGET_STREAM = 1  # sampling and resampling from the target
DRAFT_STREAM = 2  # the drafter's own draws: a proposal and its residual must not share noise
ACCEPT_STREAM = 3  # accept/reject thresholds

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOP_FLOAT32 = np.float32(1.0 - 2.0**-24)


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bijective 64-bit finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def row_keys(
    seeds: NDArray[np.int64],  # [m]
    positions: NDArray[np.int64],  # [m]
    stream: int,
) -> NDArray[np.uint64]:  # [m]
    """One 64-bit key per row."""
    salt = np.asarray((stream * 0xD1B54A32D192ED03) % 2**64, dtype=np.uint64)
    keys = _mix64(np.asarray(seeds, dtype=np.int64).view(np.uint64) + _GOLDEN)
    positions = np.asarray(positions, dtype=np.int64).view(np.uint64)
    return _mix64(keys ^ (positions * _GOLDEN + salt))


def row_uniform(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One uniform in (0, 1) per key."""
    return ((keys >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _hash32(
    keys: NDArray[np.uint64],  # [m]
    tokens: NDArray[np.uint32],  # broadcastable to [m, ...]
) -> NDArray[np.uint32]:
    shape = (-1,) + (1,) * (max(tokens.ndim, 2) - 1)
    low = keys.astype(np.uint32).reshape(shape)
    high = (keys >> np.uint64(32)).astype(np.uint32).reshape(shape)
    h = tokens * np.uint32(0x9E3779B1) + low
    scratch = np.empty_like(h)
    for add in (None, high):
        if add is not None:
            np.bitwise_xor(h, add, out=h)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            np.right_shift(h, np.uint32(shift), out=scratch)
            np.bitwise_xor(h, scratch, out=h)
            np.multiply(h, np.uint32(factor), out=h)
        np.right_shift(h, np.uint32(16), out=scratch)
        np.bitwise_xor(h, scratch, out=h)
    return h


def token_uniform(
    keys: NDArray[np.uint64],  # [m]
    tokens: NDArray[np.uint32],  # [V] or [m, V]
    *,
    fp64: bool = False,
) -> NDArray[np.floating]:  # [m, V]
    """Uniforms in (0, 1), finest near 0; 32 bits each, or 53 with `fp64`."""
    low = _hash32(keys, tokens)
    if fp64:
        high = _hash32(_mix64(keys + _GOLDEN), tokens)
        bits = (high.astype(np.uint64) << np.uint64(21)) | (low >> np.uint32(11)).astype(np.uint64)
        return (bits.astype(np.float64) + 0.5) * 2.0**-53
    uniform = low.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-32)
    return np.minimum(uniform, _TOP_FLOAT32, out=uniform)


def add_gumbel_(
    scores: torch.Tensor,  # [m, V], fp32 or fp64, changed in place
    keys: NDArray[np.uint64],  # [m]
    tokens: NDArray[np.uint32] | None = None,  # [V] or [m, V]; default 0..V-1
) -> torch.Tensor:
    """Add standard Gumbel noise, so that the argmax of a row is a sample of its softmax.

    The noise is -log(E) with E = -log(1 - u): the winning tail is u near 0, where u is finest.
    """
    if tokens is None:
        tokens = np.arange(scores.shape[-1], dtype=np.uint32)
    uniform = torch.from_numpy(token_uniform(keys, tokens, fp64=scores.dtype == torch.float64))
    return scores.sub_(uniform.neg_().log1p_().neg_().log_())
