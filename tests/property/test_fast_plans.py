"""The compiled searches against their NumPy form: equal decisions, not nearly equal ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forespark.core import LatencyTable, StepInputs, VerifyInputs
from forespark.scheduler import fast, joint, selective
from forespark.scheduler.selection import SelectionModel

SETTINGS = settings(max_examples=300, deadline=None, derandomize=True)


def table(rng, sizes):
    """Steep or flat, captured fully, partly or not at all."""
    rises = rng.choice([0.0, 1.0], sizes.size) * rng.uniform(0, 1, sizes.size)
    limit = int(rng.choice([0, 8, 100, sizes[-1]]))
    return LatencyTable(sizes, rng.uniform(0.2, 9) + np.cumsum(rises), limit)


def score_rows(rng, n, steps):
    """Random, tied, all equal, or with the -inf of positions that were never drafted."""
    kind = rng.choice(["random", "ties", "equal", "holes"])
    accept = rng.choice([0.0, 0.1, 0.5, 1.0], (n, steps))
    if kind in ("random", "holes"):
        accept = rng.beta(rng.uniform(0.5, 6), rng.uniform(0.5, 3), (n, steps))
    scores = np.cumprod(accept, axis=1).astype(rng.choice([np.float32, np.float64]))
    if kind == "equal":
        scores[:] = rng.choice([0.0, 0.01, 0.5, 1.0])
    if kind == "holes":
        scores[rng.random((n, steps)) < 0.2] = -np.inf
    return scores


def batch(seed):
    """(step, verification, tables, model) of one random size, with limits outside 0..K too."""
    rng = np.random.default_rng(seed)
    n, steps = int(rng.integers(1, rng.choice([3, 12, 200]))), int(rng.integers(1, 17))
    limits = rng.integers(-1, steps + 2, n).astype(rng.choice([np.int32, np.int64]))
    scores = score_rows(rng, n, steps)
    sizes = np.unique(rng.integers(1, 600, rng.integers(1, 60)))
    non_draft, fixed = n + int(rng.integers(0, 60)), float(rng.choice([0.0, 0.37]))
    emit, floor = int(rng.integers(1, n + 1)), int(rng.random() < 0.05)
    drafted = int(rng.integers(0, int(limits.clip(0, steps).sum()) + 1))
    model = SelectionModel()
    for _ in range(int(rng.integers(0, 3))):
        model.observe(np.maximum(scores, 0.0), np.cumprod(rng.beta(2, 1, (n, steps)), axis=1))
    return (
        StepInputs(scores, limits, emit, non_draft, floor, fixed),
        VerifyInputs(
            scores, limits, emit, non_draft, drafted, n, int(rng.integers(0, drafted + 3)), floor,
            fixed,
        ),
        (table(rng, sizes), table(rng, sizes)),
        model,
    )  # fmt: skip


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_plans_are_those_of_the_numpy_form(seed):
    """Would catch a sum in another order, a tie broken differently, a candidate skipped."""
    step, _, tables, model = batch(seed)
    assert fast.plan_joint(step, *tables, 0.05) == joint.plan_joint(step, *tables, 0.05)
    assert fast.plan_selective(step, *tables, 0.0, model) == selective.plan_selective(
        step, *tables, 0.0, model
    )


@SETTINGS
@given(st.integers(0, 2**32 - 1))
def test_replans_are_those_of_the_numpy_form(seed):
    """Would catch a cap or a fixed draft that the compiled loops treat differently."""
    _, again, tables, model = batch(seed)
    assert fast.replan_verify(again, *tables) == joint.replan_verify(again, *tables)
    assert fast.replan_selective(again, *tables, model) == selective.replan_selective(
        again, *tables, model
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_no_number_is_refused(bad):
    """Would catch a compiled loop that plans with the NaN of a broken checkpoint."""
    flat = LatencyTable(np.array([1, 64]), np.array([1.0, 2.0]), 64)
    scores = np.full((3, 4), 0.5, dtype=np.float32)
    scores[1, 2] = bad
    limits, model = np.full(3, 4), SelectionModel()
    step, again = StepInputs(scores, limits, 3, 3), VerifyInputs(scores, limits, 3, 3, 6, 3, 6)
    for refused in (
        lambda: fast.plan_joint(step, flat, flat, 0.0),
        lambda: fast.plan_selective(step, flat, flat, 0.0, model),
        lambda: fast.replan_verify(again, flat, flat),
        lambda: fast.replan_selective(again, flat, flat, model),
    ):
        with pytest.raises(ValueError, match="NaN or \\+inf"):
            refused()
    scores[1, 2] = 0.5
    scores[1, 3] = bad  # past the limit: nobody reads it
    limits[1] = 3
    assert fast.plan_joint(step, flat, flat, 0.0) == joint.plan_joint(step, flat, flat, 0.0)
