"""Sizes of captured graphs: they cover everything and pad little."""

from __future__ import annotations

import bisect

import pytest

from forespark.scheduler.buckets import bucket_sizes

K = 15


@pytest.mark.parametrize("largest", [1, 5, 64, 100, 4096, 8192])
def test_every_count_has_a_bucket(largest: int) -> None:
    """Catches a largest draft that no captured graph can hold, and sizes out of order."""
    sizes = bucket_sizes(largest)
    assert sizes[0] == 1 and sizes[-1] == largest
    assert all(a < b for a, b in zip(sizes, sizes[1:], strict=False))


@pytest.mark.parametrize("load", [8, 16, 32, 64, 128, 256, 512])
def test_padding_wastes_at_most_a_tenth(load: int) -> None:
    """Catches coarse buckets: mean padding over every mean draft length 1..K at this load."""
    sizes = bucket_sizes(512 * (K + 1))
    wasted = []
    for drafted in range(load, load * K + 1):
        rows = load + drafted
        wasted.append(sizes[bisect.bisect_left(sizes, rows)] / rows - 1)
    assert sum(wasted) / len(wasted) <= 0.10


def test_nothing_to_capture_is_refused() -> None:
    """Catches an empty bucket list that fails only when the first draft is replayed."""
    with pytest.raises(ValueError, match="largest bucket must be >= 1, got 0"):
        bucket_sizes(0)
