"""Latency tables and plans: the records every decision is priced with."""

import numpy as np
import pytest

from forespark.core import Candidate, LatencyTable, Plan


def table(sizes, ms, captured_limit=None):
    return LatencyTable(np.array(sizes), np.array(ms), captured_limit or sizes[-1])


def test_a_count_costs_what_its_bucket_costs():
    """Would catch interpolation inside captured sizes, where a graph pads to the next size."""
    prices = table([8, 16, 32], [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(prices.at(np.array([1, 8, 9, 16, 17, 32])), [1, 1, 2, 2, 3, 3])


def test_zero_tokens_cost_nothing():
    """Would catch charging a drafter launch to a step that drafts nothing."""
    assert table([8], [1.0]).at(0) == 0.0


def test_report_10_unmeasured_count_costs_the_next_bucket():
    """Would catch a sparse profile that prices 65 tokens like the measured 64."""
    prices = table([64, 512], [5.0, 20.0])
    assert prices.at(65) == 20.0


def test_report_10_single_measured_size_never_looks_free_beyond_it():
    """Would catch flat extrapolation from a profile that holds one size only."""
    prices = table([64], [5.0])
    assert prices.at(64) == 5.0
    assert prices.at(65) > 5.0
    assert prices.at(128) == pytest.approx(10.0)


def test_report_10_flat_tail_is_not_extended():
    """Would catch a zero last slope that makes every larger step free."""
    prices = table([32, 64], [5.0, 5.0])
    assert prices.at(1024) == pytest.approx(80.0)


def test_above_the_captured_limit_the_price_is_interpolated():
    """Would catch padding a step that runs without a graph, or a dip where the regimes meet."""
    prices = table([8, 16, 100, 200], [1.0, 2.0, 10.0, 20.0], captured_limit=16)
    assert prices.at(150) == pytest.approx(15.0)
    assert prices.at(17) == pytest.approx(10.0)
    assert prices.at(300) == pytest.approx(30.0)
    assert (np.diff(prices.at(np.arange(400))) >= 0).all()


def test_dense_prices_equal_single_ones_and_grow():
    """Would catch a cached price list that is too short, stale or writable by a caller."""
    prices = table([8, 16, 100], [1.0, 2.0, 10.0], captured_limit=16)
    short = prices.dense(10)
    longer = prices.dense(5000)
    assert longer.size > 5000
    np.testing.assert_array_equal(longer, prices.at(np.arange(longer.size)))
    np.testing.assert_array_equal(short[:11], longer[:11])
    with pytest.raises(ValueError, match="read-only"):
        longer[0] = 1.0


@pytest.mark.parametrize(
    ("sizes", "ms", "message"),
    [
        ([], [], "at least one"),
        ([1, 2], [1.0], "one latency"),
        ([1, 2], [1.0, float("nan")], "finite"),
        ([1, 2], [0.0, 1.0], "> 0 ms"),
        ([2, 1], [1.0, 2.0], "ascending"),
        ([0, 1], [1.0, 2.0], ">= 1 token"),
        ([1, 2], [2.0, 1.0], "must not decrease"),
    ],
)
def test_a_broken_table_is_refused(sizes, ms, message):
    """Would catch a bad profile that reaches the planner and quietly skews every decision."""
    with pytest.raises(ValueError, match=message):
        LatencyTable(np.array(sizes), np.array(ms), 8)


def test_report_8_flat_table_is_recognised():
    """Would catch a profile in which nothing looks expensive passing for a real one."""
    assert table([8, 16], [3.0, 3.0]).is_flat
    assert not table([8, 16], [3.0, 3.1]).is_flat


def test_a_plan_never_verifies_more_than_it_drafts():
    """Would catch a budget that the GPU split could not fill."""
    with pytest.raises(ValueError, match="verify_budget 3"):
        Plan(2, 3)
    with pytest.raises(ValueError, match="-1"):
        Plan(2, -1)


def test_an_empty_step_has_no_goodput():
    """Would catch a division by zero in a step that runs nothing."""
    assert Candidate(Plan(0, 0), 0.0, 0.0).goodput == 0.0
