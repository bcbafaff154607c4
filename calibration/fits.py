"""Calibration fits (appendix B): post-draft temperatures, pre-draft scale and bias.

The weights of the estimators stay as they are. Every position of the drafts was verified greedily,
so nothing is censored by a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from forespark.calibration.drafts import Recorded
from forespark.calibration.measures import ece, sigmoid
from sklearn.linear_model import LogisticRegression

from forespark.estimators.pre_draft import row_start, triangle_size

TEMPERATURES = np.logspace(-1, 1, 41)  # the grid of appendix B
FEW = 500  # drafts below which an entry leans on its neighbour
PULL = 50.0  # drafts that the neighbour's fit counts as
_POINTS = np.linspace(-6.0, 6.0, 13)  # logits at which the neighbour's fit is stated


class Variant(str, Enum):
    """Which rows of z have a fit of their own (section 4.2)."""

    TRIANGLE = "triangle"  # every length d
    SINGLE_CURVE = "single-curve"  # row K alone, which that policy reads for every d
    DIRECTIONAL = "directional"  # the drafter has one row, of which shorter drafts are prefixes


@dataclass(frozen=True)
class Fit:
    """What the server loads: triangle entries row-major as in z, temperatures by position.

    A directional fit has the K entries of its one row instead of a triangle.
    """

    scale: np.ndarray  # f64 [K(K+1)/2]
    bias: np.ndarray  # f64 [K(K+1)/2]
    temperature: np.ndarray  # f64 [K]
    samples: np.ndarray  # int64 [K(K+1)/2] drafts each entry was fitted on
    leaning: int  # fitted entries with fewer than FEW drafts, shrunk towards their neighbour

    def row(self, draft_len: int) -> slice:
        """Where the entries of one length are."""
        begin = 0 if self.scale.size == self.temperature.size else row_start(draft_len)
        return slice(begin, begin + draft_len)

    @property
    def lengths(self) -> list[int]:
        """Draft lengths with a fit of their own: those with drafts at their first position."""
        most = self.temperature.size
        if self.scale.size == most:
            return [most]
        return [d for d in range(1, most + 1) if self.samples[row_start(d)]]


def lengths_needed(most: int, variant: Variant) -> list[int]:
    """Draft lengths that a fit is made on."""
    return list(range(1, most + 1)) if variant is Variant.TRIANGLE else [most]


def fit(trace: Recorded, variant: Variant = Variant.TRIANGLE) -> Fit:
    """Both fits of a trace. Raises ValueError when a length that it needs was never drafted."""
    most = trace.origin.num_speculative_tokens
    full = trace.at_length(most)
    size = most if variant is Variant.DIRECTIONAL else triangle_size(most)
    scale, bias, samples = np.ones(size), np.zeros(size), np.zeros(size, dtype=np.int64)
    above, leaning = None, 0
    for d in lengths_needed(most, variant):
        part = trace.at_length(d)
        if not part.accepted.size:
            raise ValueError(f"trace: nothing was drafted at length {d}; record a run at it")
        begin = 0 if variant is Variant.DIRECTIONAL else row_start(d)
        for j in range(1, d + 1):
            entry = begin + j - 1
            # Position j counts only in drafts that got there: its logit is conditional.
            reached = part.accepted >= j - 1
            # The neighbour: one position earlier, at j = 1 one length shorter.
            near = entry - 1 if j > 1 else above
            toward = (1.0, 0.0) if near is None else (scale[near], bias[near])
            samples[entry] = int(reached.sum())
            leaning += int(samples[entry] < FEW)
            scale[entry], bias[entry] = fit_scale_bias(
                part.pre_logits[reached, j - 1], part.accepted[reached] >= j, toward
            )
        above = begin
    temperature = fit_temperatures(full.post_logits, full.accepted)
    return Fit(scale, bias, temperature, samples, leaning)


def fit_scale_bias(
    logits: np.ndarray, outcome: np.ndarray, toward: tuple[float, float] = (1.0, 0.0)
) -> tuple[float, float]:
    """a, b of sigma(a z + b) by logistic regression on z [n] and outcomes [n].

    With fewer than FEW outcomes, or with one outcome throughout, PULL made-up ones that follow the
    fit `toward` are added. A scale that comes out negative says that z is misleading here: the
    neighbour's fit is taken.
    """
    weights = np.ones(logits.size)
    if logits.size < FEW or outcome.all() or not outcome.any():
        stated = sigmoid(toward[0] * _POINTS + toward[1])
        share = PULL / _POINTS.size
        logits = np.concatenate((logits, _POINTS, _POINTS))
        weights = np.concatenate((weights, share * stated, share * (1 - stated)))
        outcome = np.concatenate(
            (outcome, np.ones(_POINTS.size, bool), np.zeros(_POINTS.size, bool))
        )
    model = LogisticRegression(C=1e4, max_iter=200)
    model.fit(logits[:, None].astype(np.float64), outcome, sample_weight=weights)
    scale, bias = float(model.coef_[0, 0]), float(model.intercept_[0])
    return (scale, bias) if scale > 0 else toward


def fit_temperatures(
    logits: np.ndarray,  # f32 [n, K] post-draft logits of full drafts
    accepted: np.ndarray,  # int [n] accepted tokens
    order: np.ndarray | None = None,  # positions in the order they are fitted; j = 1..K
) -> np.ndarray:
    """theta f64 [K]: position by position, the ECE of the running product minimised."""
    most = logits.shape[1]
    temperature = np.ones(most)
    for j in np.arange(most) if order is None else order:
        before = sigmoid(logits[:, :j] / temperature[:j]).prod(axis=1)
        curves = [before * sigmoid(logits[:, j] / theta) for theta in TEMPERATURES]
        errors = [ece(curve, accepted > j) for curve in curves]
        temperature[j] = TEMPERATURES[int(np.argmin(errors))]
    return temperature
