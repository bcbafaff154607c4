"""NumPy views of tensors and addresses, and ragged index arithmetic, for the bookkeeping kernels.

The bookkeeping kernels touch a few dozen integers a step; NumPy calls cost about a microsecond
where torch calls cost several.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray


def flat(tensor: torch.Tensor) -> NDArray:
    """One-dimensional view of a contiguous tensor's storage."""
    return tensor.numpy().reshape(-1)


@lru_cache(maxsize=256)
def int32_at(address: int, rows: int, row_stride: int) -> NDArray[np.int32]:
    """[rows, row_stride] view of int32 memory that a tensor elsewhere keeps alive."""
    buffer = (ctypes.c_int32 * (rows * row_stride)).from_address(address)
    return np.frombuffer(buffer, dtype=np.int32).reshape(rows, row_stride)


def ragged(lengths: NDArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(row, offset within the row) of every element of rows of the given lengths."""
    lengths = np.maximum(lengths, 0)
    rows = np.repeat(np.arange(lengths.shape[0]), lengths)
    ends = np.cumsum(lengths)
    offsets = np.arange(rows.shape[0]) - np.repeat(ends - lengths, lengths)
    return rows, offsets


def unpack_bits(words: NDArray[np.int32], count: int) -> NDArray[np.uint8]:
    """[..., words] of 32 flags each -> [..., count] of 0/1, lowest bit first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=count, bitorder="little")
