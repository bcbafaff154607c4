"""Sizes that CUDA graphs are captured at: which, whether they cover a full batch, and with how few.

A step runs at the smallest captured size that holds it; what it is short of that size is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FINE_FROM = 64  # below, a step costs the same whatever its size


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, multiples of 8 to 64, then eight sizes an octave, up to and including `largest`.

    Padding to the next size wastes less than 1/8 of a step above 64, 6 % on average.
    """
    if largest < 1:
        raise ValueError(f"largest bucket must be >= 1, got {largest}")
    sizes = [1, 2, 4, *range(8, FINE_FROM + 1, 8)]
    start = FINE_FROM
    while start < largest:
        sizes += range(start + start // 8, 2 * start + 1, start // 8)
        start *= 2
    return sorted({size for size in sizes if size < largest} | {largest})


def uncovered(largest: int, max_num_seqs: int, num_speculative_tokens: int) -> str | None:
    """What a largest captured size leaves without a graph, and what works; None if nothing.

    A batch in which every request verifies K tokens has max_num_seqs * (K + 1) of them.
    """
    width = num_speculative_tokens + 1
    needed = max_num_seqs * width
    if largest >= needed:
        return None
    works = f"use a largest size >= {needed}"
    if largest >= width:
        works += f", or max_num_seqs <= {largest // width}"
    return (
        f"{largest} is the largest captured step, but max_num_seqs {max_num_seqs} x "
        f"(num_speculative_tokens {num_speculative_tokens} + 1) = {needed} tokens may run, and "
        f"steps between them would be launched kernel by kernel; {works}"
    )


def thinned(sizes: Sequence[int], most: int) -> list[int]:
    """At most `most` of the ascending `sizes`, spread over them; the largest always stays."""
    if most >= len(sizes):
        return list(sizes)
    if most <= 0:
        return []
    kept = np.linspace(len(sizes) - 1, 0, most).round().astype(int)
    return [sizes[index] for index in sorted(kept)]


def mean_padding(sizes: Sequence[int], smallest: int = 1) -> float:
    """Padding as a share of the rows that count, mean over `smallest`..`sizes[-1]` rows."""
    rows = np.arange(smallest, sizes[-1] + 1)
    padded = np.asarray(sizes)[np.searchsorted(sizes, rows)]
    return float((padded / rows - 1).mean())
