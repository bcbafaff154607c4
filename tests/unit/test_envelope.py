"""Rewards and survival scores: torch form against the plain hull, and their guarantees."""

import numpy as np
import pytest
import torch

from forespark.estimators.pre_draft import single_curve, survival, triangle_size
from forespark.scheduler.envelope import (
    check_finite,
    envelope,
    envelope_scores,
    envelope_scores_np,
)
from forespark.scheduler.reward import reward, reward_np


def random_rewards(num_reqs, K, seed=0):
    torch.manual_seed(seed)
    return reward(survival(torch.randn(num_reqs, triangle_size(K)) * 2, K))


def test_reward_sums_each_lengths_own_curve():
    """Would catch a transposed triangle: the paper's length-3 draft 0.9, 0.7, 0.3 earns 1.9."""
    curves = torch.tensor([[[0.5, 9.0, 9.0], [0.8, 0.4, 9.0], [0.9, 0.7, 0.3]]])
    expected = [[0.0, 0.5, 1.2, 1.9]]
    torch.testing.assert_close(reward(curves), torch.tensor(expected))
    np.testing.assert_allclose(reward_np(curves.numpy()), expected, rtol=1e-6)


def test_reward_ignores_what_lies_beyond_the_length():
    """Would catch NaN from an unwritten corner of the triangle leaking into every reward."""
    curves = torch.full((1, 3, 3), float("nan")).triu(1) + torch.ones(1, 3, 3).tril()
    curves[0][torch.ones(3, 3).tril() > 0] = 1.0
    assert reward(curves).tolist() == [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("num_reqs", [0, 1, 7, 65])
@pytest.mark.parametrize("K", [1, 2, 5, 15])
def test_vectorised_scores_equal_the_plain_hull(num_reqs, K):
    """Would catch a wrong hull in the batched form, at sizes where windows are empty."""
    rewards = random_rewards(num_reqs, K)
    scores = envelope_scores(rewards)
    assert scores.shape == (num_reqs, K)
    # Slopes come from float32 rewards below 16, so one ulp of a reward is about 1e-6.
    np.testing.assert_allclose(scores, envelope_scores_np(rewards.numpy()), atol=5e-6)


def test_scores_never_increase_or_turn_negative_after_rounding():
    """Would catch a rounding wobble that breaks the prefix property of the global ranking."""
    torch.manual_seed(1)
    walk = torch.cumsum(torch.rand(2000, 15) * 1e-3, dim=1) + torch.rand(2000, 15) * 1e-6
    rewards = torch.nn.functional.pad(walk, (1, 0))
    for scores in (envelope_scores(rewards).numpy(), envelope_scores_np(rewards.numpy())):
        assert (np.diff(scores, axis=1) <= 0).all()
        assert (scores >= 0).all()


def test_concave_rewards_are_left_unchanged():
    """Would catch an envelope that smooths a curve which is already concave."""
    curve = torch.tensor([[0.0, 0.9, 1.6, 1.9, 1.95]])
    torch.testing.assert_close(envelope(curve), curve)


def test_a_late_gain_is_spread_over_the_tokens_before_it():
    """Would catch a greedy rule that stops at a worthless second token before a good third."""
    scores = envelope_scores(torch.tensor([[0.0, 0.6, 0.6, 1.6]]))
    torch.testing.assert_close(scores, torch.tensor([[0.6, 0.5, 0.5]]))


def test_scores_past_the_peak_are_zero():
    """Would catch negative scores where a longer draft earns less than a shorter one."""
    rewards = torch.tensor([[0.0, 1.0, 1.8, 1.2, 0.9]])
    torch.testing.assert_close(envelope_scores(rewards), torch.tensor([[1.0, 0.8, 0.0, 0.0]]))
    torch.testing.assert_close(envelope(rewards), torch.tensor([[0.0, 1.0, 1.8, 1.8, 1.8]]))
    np.testing.assert_allclose(envelope_scores_np(rewards.numpy()), [[1.0, 0.8, 0.0, 0.0]], 1e-6)


def test_envelope_is_never_below_the_reward():
    """Would catch an envelope that undervalues a length and so forbids choosing it."""
    rewards = random_rewards(200, 15, seed=3)
    assert (envelope(rewards) >= rewards - 1e-5).all()


def test_single_curve_rewards_are_concave():
    """Would catch a single-curve mode that still needs (and distorts) the envelope."""
    torch.manual_seed(2)
    K = 15
    rewards = reward(single_curve(survival(torch.randn(20, triangle_size(K)), K)))
    torch.testing.assert_close(envelope_scores(rewards), rewards.diff(dim=1), atol=5e-6, rtol=0)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_one_nan_spoils_its_whole_row_and_no_other(at):
    """Would catch a NaN that a min or max swallows, so that garbage is ranked as a score."""
    rewards = torch.tensor([[0.0, 1.0, 1.8, 2.0, 2.1]]).repeat(2, 1)
    rewards[0, at] = float("nan")
    for scores in (envelope_scores(rewards).numpy(), envelope_scores_np(rewards.numpy())):
        assert np.isnan(scores[0]).all()
        assert np.isfinite(scores[1]).all()


def test_check_finite_names_the_layer_and_the_place():
    """Would catch an error that leaves the operator to guess which weights are broken."""
    scores = torch.zeros(2, 3)
    check_finite(scores, "pre_draft")
    scores[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"pre_draft: 1 of 6 .* \(1, 2\)"):
        check_finite(scores, "pre_draft")
    with pytest.raises(ValueError, match="post_draft"):
        check_finite(np.array([[np.inf]]), "post_draft")
