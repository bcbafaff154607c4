"""Measures of probability estimates: Brier, ECE, AUROC, and two-parameter calibration fits."""

from __future__ import annotations

import numpy as np

ECE_BINS = 15  # equal-width, as in appendix B
_TEMPERATURES = np.logspace(-1, 1, 41)  # grid of appendix B


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Logistic function without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * np.asarray(logits, dtype=np.float64)))


def brier(probability: np.ndarray, outcome: np.ndarray) -> float:
    """Mean squared difference of probabilities [n] and outcomes [n]."""
    return float(np.mean((probability - outcome) ** 2))


def reliability(
    probability: np.ndarray, outcome: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per bin: count [15], mean probability [15], mean outcome [15] (nan where empty)."""
    index = np.minimum((probability * ECE_BINS).astype(int), ECE_BINS - 1)
    count = np.bincount(index, minlength=ECE_BINS)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(index, probability, ECE_BINS) / count
        hit = np.bincount(index, outcome, ECE_BINS) / count
    return count, mean, hit


def ece(probability: np.ndarray, outcome: np.ndarray) -> float:
    """Expected calibration error over equal-width bins."""
    count, mean, hit = reliability(probability, outcome)
    filled = count > 0
    return float(np.sum(count[filled] * np.abs(mean - hit)[filled]) / count.sum())


def auroc(score: np.ndarray, outcome: np.ndarray) -> float | None:
    """Chance that a positive outscores a negative, ties counted half; None without both."""
    outcome = np.asarray(outcome, dtype=bool)
    positives, negatives = int(outcome.sum()), int((~outcome).sum())
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (counts.cumsum() - (counts - 1) / 2)[inverse]
    return float((rank[outcome].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def fit_scale_bias(logits: np.ndarray, outcome: np.ndarray) -> tuple[float, float]:
    """a, b of sigma(a z + b) by logistic regression (Newton, a slight pull towards a = 1)."""
    if outcome.size == 0 or outcome.all() or not outcome.any():
        return 1.0, 0.0
    design = np.stack((logits, np.ones_like(logits)), axis=1).astype(np.float64)
    prior, weight = np.array([1.0, 0.0]), np.diag([1.0, 1e-3])
    theta = prior.copy()
    for _ in range(30):
        probability = sigmoid(design @ theta)
        gradient = design.T @ (probability - outcome) + weight @ (theta - prior)
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design + weight
        step = np.linalg.solve(curvature, gradient)
        theta -= step
        if np.abs(step).max() < 1e-8:
            break
    return float(theta[0]), float(theta[1])


def fit_temperatures(logits: np.ndarray, survived: np.ndarray) -> np.ndarray:
    """theta [K] of appendix B: one position at a time, ECE of the running product minimised.

    `logits` f32 [n, K]; `survived` bool [n, K]: at least j tokens were accepted.
    """
    running = np.ones(logits.shape[0])
    result = np.ones(logits.shape[1])
    for j in range(logits.shape[1]):
        curves = [running * sigmoid(logits[:, j] / theta) for theta in _TEMPERATURES]
        errors = [ece(curve, survived[:, j]) for curve in curves]
        best = int(np.argmin(errors))
        result[j], running = _TEMPERATURES[best], curves[best]
    return result
