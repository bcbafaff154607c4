"""Measures of probability estimates: Brier score, ECE, AUROC."""

from __future__ import annotations

import numpy as np

ECE_BINS = 15  # equal-width, as in appendix B


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


def ece_floor(probability: np.ndarray) -> float:
    """ECE that true probabilities [n] show on n independent outcomes by chance alone, about."""
    index = np.minimum((probability * ECE_BINS).astype(int), ECE_BINS - 1)
    variance = np.bincount(index, probability * (1 - probability), ECE_BINS)
    # A bin's sum of outcomes is about normal around that of its probabilities.
    return float(np.sqrt(2 / np.pi * variance).sum() / probability.size)


def auroc(score: np.ndarray, outcome: np.ndarray) -> float | None:
    """Chance that a positive outscores a negative, ties counted half; None without both."""
    outcome = np.asarray(outcome, dtype=bool)
    positives, negatives = int(outcome.sum()), int((~outcome).sum())
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (counts.cumsum() - (counts - 1) / 2)[inverse]
    return float((rank[outcome].sum() - positives * (positives + 1) / 2) / (positives * negatives))
