"""Last step's scores on the host, and what a request without any gets."""

import numpy as np
import pytest

from forespark.estimators.stale import StaleScores


def published(rows=4, K=3):
    stale = StaleScores(rows, K, prior=0.5)
    scores = np.linspace(0.9, 0.1, rows * K, dtype=np.float32).reshape(rows, K)
    stale.publish(scores)
    return stale, scores


def test_all_new_requests_take_the_geometric_prior():
    """Would catch a first step that plans with zeros and therefore never speculates."""
    stale = StaleScores(4, 3, prior=0.5)
    np.testing.assert_allclose(stale.gather(np.array([2, 0])), [[0.5, 0.25, 0.125]] * 2)


def test_rows_follow_the_order_of_the_batch():
    """Would catch mixing up batch index and request slot."""
    stale, scores = published()
    np.testing.assert_array_equal(stale.gather(np.array([3, 0])), scores[[3, 0]])


def test_a_new_request_takes_the_mean_of_the_batch_not_of_all_slots():
    """Would catch idle slots, or the last owner of the slot, leaking into a newcomer's scores."""
    stale, scores = published()
    stale.mark_new(1)
    got = stale.gather(np.array([0, 1, 3]))
    np.testing.assert_allclose(got[1], scores[[0, 3]].mean(axis=0))
    np.testing.assert_array_equal(got[[0, 2]], scores[[0, 3]])


def test_the_mean_keeps_scores_non_increasing():
    """Would catch a newcomer whose draft would not be a prefix."""
    rng = np.random.default_rng(0)
    stale = StaleScores(65, 15, prior=0.8)
    stale.publish(np.cumprod(rng.random((65, 15), dtype=np.float32), axis=1))
    stale.mark_new(64)
    assert (np.diff(stale.gather(np.arange(65))[64]) <= 0).all()


def test_published_scores_are_a_copy():
    """Would catch the next asynchronous copy overwriting scores that a plan is reading."""
    stale, scores = published()
    before = scores.copy()
    got = stale.gather(np.array([0]))
    scores[:] = -1.0
    got[:] = -1.0
    np.testing.assert_array_equal(stale.gather(np.array([0])), before[[0]])


def test_a_late_copy_does_not_revive_the_last_owner_of_a_slot():
    """Would catch scores of an aborted request being used for the one that took its slot."""
    stale = StaleScores(3, 2, prior=0.5)
    ticket = stale.ticket(np.array([0, 1]))
    stale.mark_new(1)
    stale.publish(np.full((3, 2), 0.9, dtype=np.float32), ticket)
    stale.publish(np.full((3, 2), 0.7, dtype=np.float32), stale.ticket(np.array([0])))
    np.testing.assert_allclose(stale.gather(np.array([0])), [[0.7, 0.7]])
    np.testing.assert_allclose(stale.gather(np.array([1])), [[0.5, 0.25]])


def test_bad_shape_and_prior_are_refused():
    """Would catch a transposed copy that NumPy would broadcast without a word."""
    stale = StaleScores(3, 2, prior=0.5)
    with pytest.raises(ValueError, match="expected"):
        stale.publish(np.zeros((2, 3)))
    for prior in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="prior acceptance"):
            StaleScores(3, 2, prior=prior)
