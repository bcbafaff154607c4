"""Throughput at matched interactivity."""

from __future__ import annotations

import numpy as np
import pytest
from forespark.benchmarks.matched import Curve, best_of, matched_ratio


def test_a_curve_interpolates_in_log_interactivity() -> None:
    curve = Curve.of([(10.0, 100.0), (1000.0, 50.0)])
    assert curve.at(np.array([100.0]))[0] == pytest.approx(75.0)
    assert np.isnan(curve.at(np.array([9.0, 1001.0]))).all()


def test_ratios_only_where_both_run_at_half_their_peak() -> None:
    ours = Curve.of([(10.0, 200.0), (20.0, 180.0), (80.0, 20.0)])
    base = Curve.of([(10.0, 100.0), (20.0, 90.0), (80.0, 80.0)])
    x, ratio = matched_ratio(ours, base)
    assert x.tolist() == [10.0, 20.0]
    assert ratio.tolist() == pytest.approx([2.0, 2.0])


def test_curves_that_never_meet_have_no_ratio() -> None:
    x, ratio = matched_ratio(Curve.of([(1.0, 5.0)]), Curve.of([(2.0, 5.0)]))
    assert x.size == ratio.size == 0


def test_the_strongest_baseline_is_the_upper_envelope() -> None:
    """Catches a baseline that is strong on average instead of everywhere."""
    flat = Curve.of([(1.0, 10.0), (100.0, 10.0)])
    steep = Curve.of([(1.0, 30.0), (100.0, 1.0)])
    best = best_of([flat, steep])
    assert best.throughput.tolist() == pytest.approx([30.0, 10.0])


def test_a_method_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="no load produced any token"):
        Curve.of([(0.0, 0.0)])
