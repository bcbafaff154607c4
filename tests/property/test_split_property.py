"""The host split against a sort written the slow way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forespark.scheduler.split import rank_split


@st.composite
def splits(draw):
    """Rows of few distinct values, so that ties across rows are the rule, with -inf tails."""
    n, K = draw(st.integers(0, 7)), draw(st.integers(0, 6))
    values = st.sampled_from([float("-inf"), 0.0, 0.25, 0.5, 0.5, 0.75, 1.0])
    rows = draw(st.lists(st.lists(values, min_size=K, max_size=K), min_size=n, max_size=n))
    scores = -np.sort(-np.array(rows, dtype=np.float32).reshape(n, K), axis=1)
    limits = np.array(draw(st.lists(st.integers(0, K + 2), min_size=n, max_size=n)), dtype=int)
    return scores, limits, draw(st.integers(0, n * K + 3)), draw(st.integers(0, 3))


def slow_split(scores, limits, budget, floor):
    """Sort (owed last, lower score last, row, position) and count the winners of each row."""
    n, K = scores.shape
    entries = [
        (position >= floor, -float(scores[row, position]), row, position)
        for row in range(n)
        for position in range(min(K, int(limits[row])))
    ]
    lengths = [0] * n
    for _, _, row, _ in sorted(entries)[:budget]:
        lengths[row] += 1
    return lengths, len(entries)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(splits())
def test_split_equals_a_full_sort(case):
    """Would catch a tie broken differently, a lost token, or a floor served late."""
    scores, limits, budget, floor = case
    lengths = rank_split(scores, limits, budget, floor)
    expected, eligible = slow_split(scores, limits, budget, floor)
    assert lengths.tolist() == expected
    assert lengths.sum() == min(budget, eligible)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(splits())
def test_a_larger_budget_only_lengthens_drafts(case):
    """Would catch a split that takes tokens away from a request when there are more to give."""
    scores, limits, budget, floor = case
    less = rank_split(scores, limits, budget, floor)
    more = rank_split(scores, limits, budget + 1, floor)
    assert (more >= less).all()
