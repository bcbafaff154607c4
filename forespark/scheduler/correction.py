"""What serving has shown about the estimators: one factor a position, on top of their calibration.

A calibration is of the prompts it was made on; other prompts are accepted more or less often than
it says. Post-draft survival S~ is compared with outcomes: for position j,

    r_j = accepted at j / expected at j,    expected: S~_j / S~_{j-1},

summed over the tokens that were verified with everything before them accepted. Such a token was
judged on its own, so nothing is censored; and it was chosen for verification by S~ alone, so given
S~ the choice says nothing about its outcome. Corrected survival is S~_j r_1 ... r_j.

Scores of before the draft cannot be learned that way: verification prefers tokens that turned out
well, which their scores did not know. They are compared with corrected S~ instead, over all tokens
that were drafted: s_j = corrected S~_j / score_j, summed alike.

Both forget exponentially and lean on 1 while little was seen. Factors come from earlier steps only
and are the same for every request. The host plans with them; how the device ranks the tokens at
hand stays as it is.
"""

from __future__ import annotations

import numpy as np

from forespark.core import FloatArray, IntArray

MEMORY = 100.0  # steps after which a step counts 1/e
LEAN = 50.0  # expected tokens at which a factor is half believed
MOST = 16.0  # a factor lies between 1 / MOST and MOST


class SurvivalCorrection:
    """Factors by position for drafts of at most `num_speculative_tokens`."""

    def __init__(self, num_speculative_tokens: int) -> None:
        # Sums by position: what happened, and what had been expected.
        self._post = np.zeros((2, num_speculative_tokens))
        self._pre = np.zeros((2, num_speculative_tokens))

    @property
    def survival_factors(self) -> FloatArray:
        """float64 [K]: r_1 ... r_j."""
        factors: FloatArray = _ratio(self._post).cumprod()
        return factors

    @property
    def score_factors(self) -> FloatArray:
        """float64 [K]: s_j, leaning on s_{j-1}: what holds at a position mostly holds behind it."""
        factors, before = np.empty(self._pre.shape[1]), 1.0
        for at, (happened, expected) in enumerate(self._pre.T.tolist()):
            before = min(max((happened + LEAN * before) / (expected + LEAN), 1.0 / MOST), MOST)
            factors[at] = before
        return factors

    def observe_verified(
        self,
        survival: FloatArray,  # [n, K] S~ as the estimator gave it, -inf where nothing was drafted
        verified: IntArray,  # [n] tokens judged
        accepted: IntArray,  # [n] of those
    ) -> None:
        """What became of one step's drafts. A step without any forgets like the others."""
        position = np.arange(survival.shape[1])
        drafted = np.isfinite(survival)
        reached = (position < verified[:, None]) & (position <= accepted[:, None]) & drafted
        kept = reached & (position < accepted[:, None])
        here = np.where(drafted, np.clip(survival, 0.0, 1.0), 0.0)
        before = np.concatenate((np.ones((len(here), 1)), here[:, :-1]), axis=1)
        expected = np.minimum(here / np.maximum(before, 1e-12), 1.0)
        _add(self._post, kept.sum(axis=0), np.where(reached, expected, 0.0).sum(axis=0))

    def observe_drafted(self, scores: FloatArray, survival: FloatArray) -> None:
        """One step's drafts: scores and S~ [n, K], the latter -inf where nothing was drafted."""
        drafted = np.isfinite(survival)
        found = np.where(drafted, self.survival(survival), 0.0)
        _add(self._pre, found.sum(axis=0), np.where(drafted, scores, 0.0).sum(axis=0))

    def survival(self, survival: FloatArray) -> FloatArray:
        """Corrected S~ [n, K]: at most 1, never rising along a row, -inf where it was."""
        return _corrected(survival, self.survival_factors)

    def scores(self, scores: FloatArray) -> FloatArray:
        """Corrected scores [n, K]: at most 1, never rising along a row."""
        return _corrected(scores, self.score_factors)


def _add(sums: FloatArray, happened: FloatArray, expected: FloatArray) -> None:
    sums *= 1.0 - 1.0 / MEMORY
    sums += (happened, expected)


def _ratio(sums: FloatArray) -> FloatArray:
    """float64 [K] within 1/MOST..MOST: what happened over what was expected, leaning on 1."""
    happened, expected = sums
    ratio: FloatArray = np.clip((happened + LEAN) / (expected + LEAN), 1.0 / MOST, MOST)
    return ratio


def _corrected(values: FloatArray, factors: FloatArray) -> FloatArray:
    moved = np.minimum(values * factors, 1.0)
    falling: FloatArray = np.minimum.accumulate(moved, axis=1).astype(values.dtype)
    return falling
