"""What the post-draft ranking is worth before a draft exists.

The plan knows pre-draft scores; verification picks by post-draft survival, which has seen the
drafted tokens and tells good from bad among tokens that looked alike before. The B best of D
drafted tokens therefore earn more than the B largest pre-draft scores, and the more the larger D is
against B. How much depends on how far post-draft survival spreads around the score, and that can be
read off every step that was run: pairs (score, survival) of the tokens it drafted.

This keeps those pairs as a table of conditional frequencies, forgets slowly, and starts from a Beta
distribution around the score. Survival itself is corrected, bin by bin, by what became of verified
tokens. That is not biased by the choice of what was verified: the choice read survival only, so
within a bin it is independent of the outcome.
"""

from __future__ import annotations

import numpy as np

from forespark.core import FloatArray, IntArray

EDGES = np.array([0.01, 0.02, 0.04, 0.07, *np.arange(0.1, 1.0, 0.05)])  # between bins of [0, 1]
MEMORY = 400.0  # steps after which a step counts 1/e
PRIOR_TOKENS = 40.0  # tokens a row of the prior is worth
TRUST_TOKENS = 100.0  # verified tokens at which a bin's correction is half believed
PRIOR_SPREAD = 2.0  # a + b of the prior's Beta distribution: 2 is uniform around 1/2
_GRID = 512  # points on which the prior's distributions are summed


class SelectionModel:
    """Post-draft survival given a pre-draft score, in bins of both."""

    def __init__(self) -> None:
        self.bins = EDGES.size + 1
        self._counts, self._mass = _prior(self.bins)
        self._prior = self._counts.copy(), self._mass.copy()
        self._expected = np.zeros(self.bins)  # summed survival of verified tokens
        self._accepted = np.zeros(self.bins)
        self._verified = np.zeros(self.bins)
        self._update()

    def observe(self, scores: FloatArray, survival: FloatArray) -> None:
        """One step's drafted tokens: scores and survival [n, K], the latter -inf if not drafted.

        A step without any forgets like the others: what once spoke against drafting is tried again.
        """
        drafted = np.isfinite(survival)
        post = np.clip(survival[drafted], 0.0, 1.0)
        before = np.searchsorted(EDGES, scores[drafted], side="right")
        cell = before * self.bins + np.searchsorted(EDGES, post, side="right")
        size = self.bins * self.bins
        keep = 1.0 - 1.0 / MEMORY
        for kept, prior, seen in (
            (self._counts, self._prior[0], np.bincount(cell, minlength=size)),
            (self._mass, self._prior[1], np.bincount(cell, weights=post, minlength=size)),
        ):
            kept -= prior
            kept *= keep
            kept += prior + seen.reshape(kept.shape)
        self._update()

    def observe_verified(
        self, survival: FloatArray, verified: IntArray, accepted: IntArray
    ) -> None:
        """What became of drafts: survival [n, K], tokens verified [n], of which accepted [n]."""
        position = np.arange(survival.shape[1])
        judged = (position < verified[:, None]) & np.isfinite(survival)
        post = np.clip(survival[judged], 0.0, 1.0)
        kept = (position < accepted[:, None])[judged]
        cell = np.searchsorted(EDGES, post, side="right")
        for total, weights in (
            (self._expected, post),
            (self._accepted, kept.astype(np.float64)),
            (self._verified, np.ones(post.size)),
        ):
            total *= 1.0 - 1.0 / MEMORY
            total += np.bincount(cell, weights=weights, minlength=self.bins)

    def _update(self) -> None:
        totals = self._counts.sum(axis=1, keepdims=True)
        trust = self._verified / (self._verified + TRUST_TOKENS)
        ratio = self._accepted / np.maximum(self._expected, 1e-9)
        value = (self._mass / totals) * (1.0 + trust * (np.minimum(ratio, 2.0) - 1.0))
        # Highest survival first: the order in which tokens are verified.
        self.share = _running(self._counts / totals)
        self.value = _running(value)

    def curves(self, ranked: FloatArray, drafted: IntArray) -> tuple[FloatArray, FloatArray]:
        """(verified, gain) float64 [m, bins + 1]: corners of what verifying earns.

        Row i drafts the `drafted[i]` largest of `ranked` (descending scores). Both start at 0 and
        never decrease along a row; between corners the gain is linear.
        """
        ends = np.searchsorted(-ranked, -EDGES, side="right")[::-1]  # tokens above each edge
        bounds = np.concatenate(([0], ends, [ranked.size]))
        within = np.diff(np.minimum(bounds[None, :], np.asarray(drafted)[:, None]), axis=1)
        # Summed one score bin after another, the best first, as the compiled form does.
        verified, gain = (
            np.cumsum(within[:, :, None] * sums[::-1], axis=1)[:, -1]  # [m, bins + 1]
            for sums in (self.share, self.value)
        )
        return verified, gain

    def gains(self, ranked: FloatArray, drafted: int, budgets: IntArray) -> FloatArray:
        """float64 like `budgets`: what verifying that many of `drafted` tokens earns."""
        verified, gain = self.curves(ranked, np.array([drafted]))
        gained: FloatArray = np.interp(budgets, verified[0], gain[0])
        return gained


def _running(by_survival: FloatArray) -> FloatArray:
    """float64 [bins, bins + 1]: sums over the best 0, 1, ... survival bins of [bins, bins]."""
    sums = np.zeros((by_survival.shape[0], by_survival.shape[1] + 1))
    np.cumsum(by_survival[:, ::-1], axis=1, out=sums[:, 1:])
    return sums


def _prior(bins: int) -> tuple[FloatArray, FloatArray]:
    """Counts and summed survival [bins, bins] of Beta distributions around each bin's middle."""
    bounds = np.concatenate(([0.0], EDGES, [1.0]))
    middle = (bounds[1:] + bounds[:-1]) / 2
    points = (np.arange(_GRID) + 0.5) / _GRID
    a, b = middle * PRIOR_SPREAD, (1 - middle) * PRIOR_SPREAD
    density = points ** (a[:, None] - 1) * (1 - points) ** (b[:, None] - 1)
    density *= PRIOR_TOKENS / density.sum(axis=1, keepdims=True)
    cell = np.searchsorted(EDGES, points, side="right")
    member = np.eye(bins)[cell]  # [grid, bins]
    return density @ member, (density * points) @ member
