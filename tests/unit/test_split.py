"""The host split: who gets how many tokens of a budget."""

import numpy as np
import pytest

from forespark.scheduler.split import rank_split


def lens(scores, limits, budget, floor=0):
    out = rank_split(np.array(scores, dtype=np.float32), np.array(limits), budget, floor)
    assert out.dtype == np.int32
    return out.tolist()


def test_the_largest_scores_win():
    """Would catch splitting evenly, or by row order, instead of by value."""
    assert lens([[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]], [3, 3], 3) == [2, 1]


def test_ties_go_to_the_lower_row_then_the_earlier_position():
    """Would catch ranks that disagree: equal scores must be split in one way everywhere."""
    assert lens([[0.5, 0.5], [0.5, 0.5]], [2, 2], 3) == [2, 1]
    assert lens([[0.9, 0.5], [0.5, 0.5], [0.5, 0.1]], [2, 2, 2], 3) == [2, 1, 0]


def test_the_sum_is_the_budget_or_everything_eligible():
    """Would catch a split that under-fills a captured graph or exceeds what may be drafted."""
    scores = [[0.9, 0.8, 0.1], [0.5, 0.4, 0.3]]
    assert lens(scores, [3, 3], 0) == [0, 0]
    assert lens(scores, [3, 1], 99) == [3, 1]
    assert lens(scores, [3, 3], -4) == [0, 0]


def test_positions_beyond_the_limit_never_win():
    """Would catch a high score leaking in from a token that must not be drafted."""
    assert lens([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]], [1, 3], 3) == [1, 2]


def test_report_21_limits_near_the_end_of_a_request():
    """Would catch drafting past max_tokens: limits 0, 1 and 15 hold whatever the scores say."""
    scores = np.full((3, 15), 0.9)
    assert rank_split(scores, np.array([0, 1, 15]), 16).tolist() == [0, 1, 15]
    assert rank_split(scores, np.array([0, 1, 15]), 10).tolist() == [0, 1, 9]


def test_report_20_an_opted_out_request_gets_nothing_and_disturbs_nobody():
    """Would catch an opt-out that shifts its neighbours' rows or still gets a token."""
    scores = np.array([[0.9, 0.8], [0.99, 0.98], [0.7, 0.6]])
    assert rank_split(scores, np.array([2, 0, 2]), 3).tolist() == [2, 0, 1]


def test_report_18_easy_requests_get_long_drafts_and_hard_ones_short():
    """Would catch one length for the whole batch."""
    steps = np.arange(1, 16)
    easy, hard = 0.95**steps, 0.4**steps
    scores = np.stack([easy, hard, easy, hard])
    split = rank_split(scores, np.full(4, 15), 32)
    assert split[[0, 2]].mean() > 10 > 3 >= split[[1, 3]].mean()


def test_minus_infinity_is_eligible_and_ranked_last():
    """Would catch an under-filled budget when drafted positions have no estimate."""
    scores = [[0.5, -np.inf, -np.inf], [0.2, 0.1, -np.inf]]
    assert lens(scores, [3, 3], 3) == [1, 2]
    assert lens(scores, [3, 3], 5) == [3, 2]


def test_floors_are_served_before_everything_else():
    """Would catch a starved request: each gets min(floor, limit) before any better score."""
    scores = [[0.9, 0.8, 0.7], [0.1, 0.05, 0.01], [0.2, 0.1, 0.1]]
    assert lens(scores, [3, 3, 1], 6, floor=2) == [3, 2, 1]
    assert lens(scores, [3, 3, 0], 4, floor=1) == [3, 1, 0]


def test_a_budget_below_the_floors_is_spent_on_floors_by_score():
    """Would catch a short budget that goes to positions outside the floors."""
    assert lens([[0.9, 0.8], [0.1, 0.1], [0.2, 0.1]], [2, 2, 2], 2, floor=1) == [1, 0, 1]


def test_nan_and_wrong_shapes_are_refused():
    """Would catch NaN scores that compare false and silently lose their rank."""
    with pytest.raises(ValueError, match=r"\[0, 1\] is NaN"):
        rank_split(np.array([[0.5, np.nan]]), np.array([2]), 1)
    with pytest.raises(ValueError, match="limits"):
        rank_split(np.zeros((2, 3)), np.array([3]), 1)
    assert rank_split(np.array([[0.5, np.nan]]), np.array([1]), 1).tolist() == [1]


def test_an_empty_batch_is_legal():
    """Would catch a crash in a step without decoding requests."""
    assert rank_split(np.zeros((0, 15)), np.zeros(0, np.int64), 5).tolist() == []
    assert rank_split(np.zeros((2, 0)), np.array([3, 3]), 5).tolist() == [0, 0]
