"""A random run of the real engine in which every step is checked from inside the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LONG, PRICED, code_prompts

pytestmark = pytest.mark.engine

STEPS = 2000 if LONG else 600
CHURN = {"policy": "joint", "prices": PRICED, "prompts": code_prompts(20), "steps": STEPS}


# Lengths are read back at once, as on a CPU, or bounded by the host, as on a GPU; or the attention
# backend needs them on the host, which then decides them.
@pytest.mark.parametrize("lengths", ["read back", "bounded", "decided"])
def test_every_step_keeps_its_invariants(
    lengths: str, engine_job: Callable[..., dict[str, Any]]
) -> None:
    """Catches a split off the plan, B above what is present, a verified set that is no prefix of
    the draft, drafts past a limit or for a request that opted out, and, where the host decides
    lengths, a host that holds others than the device."""
    seed = ["read back", "bounded", "decided"].index(lengths) + 1
    task = {**CHURN, "seed": seed, "blocks": 24, "reads_lengths": lengths == "read back"}
    if lengths == "decided":
        task["plans_on_host"] = True
    result = engine_job("churn", **task)
    assert result["broken"] == []
    if lengths == "decided":
        assert min(result["uneven"].values()) > STEPS // 10
    assert len(result["D"]) >= STEPS
    # The run met what could break a step ...
    for disturbance in ("aborted", "preempted", "opted_out", "at_model_len", "beside_chunks"):
        assert result[disturbance] >= STEPS // 100, disturbance
    assert result["sampled"] > STEPS // 10 and result["finished"] > STEPS // 5
    assert result["refused"] > STEPS // 10
    # ... and D, B and every draft's length kept moving.
    assert min(result["lengths"]) > 0
    assert min(result["D"]) == 0 and len(set(result["D"])) > 15
    assert min(result["B"]) == 0 and len(set(result["B"])) > 10
