"""Sizes of captured graphs: they cover everything and pad little."""

from __future__ import annotations

import bisect

import pytest

from forespark.scheduler.buckets import bucket_sizes, mean_padding, thinned, uncovered

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


def test_a_full_batch_must_be_covered() -> None:
    """Catches a list that ends below max_num_seqs * (K + 1), and advice that does not work."""
    assert uncovered(4096, 256, K) is None
    line = uncovered(4095, 256, K)
    assert line is not None and "256 x (num_speculative_tokens 15 + 1) = 4096" in line
    assert "use a largest size >= 4096, or max_num_seqs <= 255" in line
    assert uncovered(4095, 255, K) is None
    assert "max_num_seqs <=" not in (uncovered(8, 1, K) or "")  # not even one request fits


@pytest.mark.parametrize("most", [1, 2, 3, 9, 39, 40, 99])
def test_thinned_lists_keep_the_largest_and_their_order(most: int) -> None:
    """Catches a thinner list that no longer holds a full batch, or holds a size twice."""
    sizes = bucket_sizes(1024)
    kept = thinned(sizes, most)
    assert len(kept) == min(most, len(sizes)) == len(set(kept))
    assert kept == sorted(kept) and kept[-1] == 1024 and set(kept) <= set(sizes)
    if most > 1:
        assert kept[0] == 1


def test_the_cost_of_fewer_buckets() -> None:
    """Catches a cost that is no padding: by hand on four sizes, and growing as buckets go."""
    assert mean_padding([1, 2, 4]) == pytest.approx((0 + 0 + 1 / 3 + 0) / 4)
    assert mean_padding([4], smallest=2) == pytest.approx((1 + 1 / 3 + 0) / 3)
    sizes = bucket_sizes(4096)
    costs = [mean_padding(thinned(sizes, most)) for most in (len(sizes), 30, 10, 3)]
    assert costs == sorted(costs) and costs[0] < 0.07 and costs[-1] > 0.5
    assert thinned(sizes, 0) == []
