"""Attainment and capacity: what counts as in time, and what as a miss."""

from __future__ import annotations

import pytest
from forespark.benchmarks.poisson import measured, speculative
from forespark.benchmarks.slo import Slo, attainment, capacity

# Four requests: in time; slow first token; slow others; failed with a fast first token.
RECORD = {
    "ttfts": [0.2, 1.5, 0.2, 0.01],
    "itls": [[0.03] * 10, [0.03] * 10, [0.2] * 10, []],
    "output_lens": [11, 11, 11, 0],
    "errors": ["", "", "", "Connection reset"],
    "completed": 3,
    "failed": 1,
}
SLO = Slo(1000.0, 50.0)


def test_failures_are_misses() -> None:
    """Catches a server that drops requests and so looks better than one that answers late."""
    assert attainment(RECORD, SLO) == 0.25
    assert attainment(RECORD, SLO.scaled(100)) == 0.75


def test_tokens_that_come_in_chunks_are_averaged() -> None:
    """Catches gaps between chunks taken for gaps between tokens: speculation emits several."""
    record = RECORD | {"itls": [[0.2, 0.2]] * 4, "output_lens": [11] * 4, "errors": [""] * 4}
    assert attainment(record, SLO) == 0.75  # 40 ms a token; one was late with the first


def test_one_token_answers_have_no_rate() -> None:
    """Catches a division by zero, and a one-token answer that fails for want of a second."""
    record = {"ttfts": [0.2], "itls": [[]], "output_lens": [1], "errors": [""]}
    assert attainment(record, SLO) == 1.0
    assert attainment({"ttfts": [], "itls": [], "output_lens": [], "errors": []}, SLO) == 0.0


@pytest.mark.parametrize(
    ("attained", "expected"),
    [
        ([1.0, 0.95, 0.85, 0.2], (3.0, True)),
        ([1.0, 1.0, 0.99, 0.92], (8.0, False)),  # never missed: a lower bound
        ([0.8, 0.7, 0.5, 0.1], (0.0, False)),
        ([0.99, 0.5, 0.95, 0.1], (1 + 0.09 / 0.49, True)),  # the first miss counts
    ],
)
def test_capacity(attained: list[float], expected: tuple[float, bool]) -> None:
    """Catches interpolation on the wrong side, and a bound reported as a measurement."""
    found = capacity([1.0, 2.0, 4.0, 8.0], attained)
    assert found == (pytest.approx(expected[0]), expected[1])
    assert capacity([8.0, 4.0, 2.0, 1.0], attained[::-1]) == found


def test_bad_input_is_one_line() -> None:
    """Catches a summary without details that counts as perfect, and limits of zero."""
    with pytest.raises(ValueError, match="ttfts, itls, output_lens, errors missing"):
        attainment({"completed": 3}, SLO)
    with pytest.raises(ValueError, match="tpot_ms: 0 must be above 0"):
        Slo(100, 0)
    with pytest.raises(ValueError, match="no rate was measured"):
        capacity([], [])


def test_what_is_kept_has_no_nan() -> None:
    """Catches inf or NaN, which no JSON reader takes, in a run with failures."""
    kept = measured(RECORD, 2.0, SLO)
    assert kept["requests"] == 4 and kept["failed"] == 1
    assert kept["attainment"] == {"0.5": 0.0, "0.75": 0.25, "1.0": 0.25, "1.5": 0.5, "2.0": 0.5}


def test_methods_become_server_flags(tmp_path) -> None:
    """Catches a stock baseline that is served by ForeSpark, or the other way round."""
    assert speculative("off", tmp_path, 7) == []
    assert '"enable_adaptive_verification": true' in speculative("dflash_adaptive", tmp_path, 7)[1]
    assert '"policy": "joint"' in speculative("joint", tmp_path, 7)[1]
