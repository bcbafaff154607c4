"""The oracle on recorded drafts, and the simulator held against measured ratios."""

from __future__ import annotations

import numpy as np
import pytest
from forespark.benchmarks.oracle import oracle_share, simulate_oracle
from forespark.benchmarks.records import About, Group, Run
from forespark.benchmarks.simulate import Answers, policy_named, simulate
from forespark.benchmarks.validate import validate
from forespark.calibration.traces import DraftTrace

from forespark.core import LatencyTable

K = 4
SIZES = np.array([1, 2, 4, 8, 16, 32, 64, 128])
TABLES = (
    LatencyTable(SIZES, 1.5 + SIZES * 0.01, 128),
    LatencyTable(SIZES, 8.0 + SIZES * 0.05, 128),
)


def trace() -> DraftTrace:
    random = np.random.default_rng(0)
    m, triangle = 6 * 40, K * (K + 1) // 2
    won = (random.random((m, K)) < 0.6).cumprod(axis=1).sum(axis=1)
    accepted = np.minimum(won[:, None], np.arange(K + 1)).astype(np.int8)
    logits = np.full((m, triangle), 0.4, dtype=np.float32)
    documents = np.repeat(np.arange(6), 40).astype(np.int32)
    return DraftTrace(documents, np.tile(np.arange(40), 6).astype(np.int32), accepted, logits,
                      logits)  # fmt: skip


ANSWERS = Answers(trace())


def test_the_oracle_verifies_only_what_is_accepted_and_is_a_bound() -> None:
    """Catches an oracle that verifies in vain, or one that a policy beats."""
    found = simulate_oracle(ANSWERS, *TABLES, 8, steps=150)
    assert found.emitted == pytest.approx(8 + found.verified)
    record = oracle_share(ANSWERS, TABLES, [1, 8], 150)["oracle"]
    assert 0.4 < record["oracle_share"] <= 1.03
    assert record["oracle_share"] == min(row["share"] for row in record["loads"])
    with pytest.raises(ValueError, match="load: must be >= 1"):
        simulate_oracle(ANSWERS, *TABLES, 0)


def group(factor: float) -> Group:
    """A machine that does what the simulator says, but `off` is `factor` as fast."""
    runs = []
    for name, times in (("joint", 1.0), ("off", factor), ("dflash", 3.0)):
        policy = policy_named("off" if name == "dflash" else name, *TABLES, 0.02)
        speed = simulate(ANSWERS, policy, *TABLES, 4, steps=50).output_throughput
        runs.append(Run(name, 4, times * speed, times * speed / 4))
    return Group(About("decode", "m", "d", K, 0.0), runs)


def test_errors_are_of_ratios_between_policies_that_are_simulated() -> None:
    """Catches absolute speeds compared, and stock methods taken for ours."""
    exact = validate(ANSWERS, TABLES, group(1.0), "joint", 50)["simulator"]
    assert exact["max_error"] == pytest.approx(0) and len(exact["rows"]) == 1
    off = validate(ANSWERS, TABLES, group(0.8), "joint", 50)["simulator"]
    assert off["max_error"] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no load has both full and another"):
        validate(ANSWERS, TABLES, group(1.0), "full", 50)
