"""A random run of the real engine in which every step is checked from inside the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LONG, PRICED, code_prompts

pytestmark = pytest.mark.engine

STEPS = 2000 if LONG else 1000
CHURN = {"policy": "joint", "prices": PRICED, "prompts": code_prompts(20), "steps": STEPS}
Job = Callable[..., dict[str, Any]]


def churn(engine_job: Job, reads_lengths: bool) -> dict[str, Any]:
    """One run: lengths read back at once, as on a CPU, or bounded by the host, as on a GPU."""
    seed = 1 if reads_lengths else 2
    return engine_job("churn", **CHURN, seed=seed, blocks=24, reads_lengths=reads_lengths)


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_every_step_keeps_its_invariants(reads_lengths: bool, engine_job: Job) -> None:
    """Catches a split off the plan, B above what is present, a verified set that is no prefix of
    the draft, and drafts past a limit or for a request that opted out."""
    result = churn(engine_job, reads_lengths)
    assert result["broken"] == []
    assert len(result["D"]) >= STEPS


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_the_random_run_meets_every_disturbance(reads_lengths: bool, engine_job: Job) -> None:
    """Catches a run too tame to break anything: no abort, preemption, chunk, opt-out or limit."""
    result = churn(engine_job, reads_lengths)
    for disturbance in ("aborted", "preempted", "opted_out", "at_model_len", "beside_chunks"):
        assert result[disturbance] >= STEPS // 100, disturbance
    assert result["sampled"] > STEPS // 10 and result["finished"] > STEPS // 5
    assert result["refused"] > STEPS // 10


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_the_random_run_uses_every_length(reads_lengths: bool, engine_job: Job) -> None:
    """Catches invariants that hold because D and B never move."""
    result = churn(engine_job, reads_lengths)
    assert min(result["lengths"]) > 0
    assert min(result["D"]) == 0 and len(set(result["D"])) > 15
    assert min(result["B"]) == 0 and len(set(result["B"])) > 10
