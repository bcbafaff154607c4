"""Throughput at matched interactivity: how two methods compare for users who wait equally long.

A method is a curve of output tokens/s (y) over tokens/s per user (x), one point a load. Between two
measured loads y is interpolated linearly in log x. A ratio is taken only where both curves were
measured, and only where each method runs at no less than half its own peak: far below it, nobody
would run the machine that way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HALF_PEAK = 0.5


@dataclass(frozen=True)
class Curve:
    """One method's measured loads, in ascending order of interactivity."""

    interactivity: np.ndarray  # f64 [m] tokens/s per user, strictly ascending
    throughput: np.ndarray  # f64 [m] output tokens/s

    @classmethod
    def of(cls, points: list[tuple[float, float]]) -> Curve:
        """From (tokens/s per user, tokens/s); ValueError when there is nothing to compare."""
        kept = sorted({x: y for x, y in points if x > 0 and y > 0}.items())
        if not kept:
            raise ValueError("curve: no load produced any token; nothing can be compared")
        x, y = np.array(kept, dtype=np.float64).T
        return cls(x, y)

    def at(self, interactivity: np.ndarray) -> np.ndarray:
        """Throughput f64 [k]; NaN outside the measured range."""
        inside = (interactivity >= self.interactivity[0]) & (
            interactivity <= self.interactivity[-1]
        )
        y = np.interp(np.log(interactivity), np.log(self.interactivity), self.throughput)
        return np.where(inside, y, np.nan)

    def usable(self, interactivity: np.ndarray) -> np.ndarray:
        """bool [k]: where the method runs at half its peak or more."""
        with np.errstate(invalid="ignore"):
            return self.at(interactivity) >= HALF_PEAK * self.throughput.max()


def matched_ratio(ours: Curve, base: Curve) -> tuple[np.ndarray, np.ndarray]:
    """(interactivity [k], ours / base [k]) at every measured load of either method that counts.

    Empty when the two were never measured at a common interactivity.
    """
    x = np.unique(np.concatenate([ours.interactivity, base.interactivity]))
    keep = ours.usable(x) & base.usable(x)
    x = x[keep]
    return x, ours.at(x) / base.at(x)


def best_of(curves: list[Curve]) -> Curve:
    """The strongest baseline: at every interactivity the highest of the curves measured there."""
    x = np.unique(np.concatenate([curve.interactivity for curve in curves]))
    values = np.array([curve.at(x) for curve in curves])
    return Curve(x, np.nanmax(values, axis=0))
