"""Tensor parallel through the real engine: ranks that compute other numbers still do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LONG, PRICED, code_prompts
from test_lossless import MOST_TIES, differences

pytestmark = pytest.mark.engine

PROMPTS = code_prompts(12)
TOKENS = 40
STEPS = 2000 if LONG else 150
GPU_STEPS = 5000
TASK = {
    "policy": "joint",
    "prices": PRICED,
    "fixed_cost": "learned",  # from measured times: every rank's own clock says something else
    "prompts": PROMPTS,
    "max_tokens": TOKENS,
    "ranks": 2,
    "seed": 3,
    "blocks": 24,
}


def check(result: dict[str, Any], steps: int) -> None:
    """Both ranks ran the same steps, and those were worth comparing."""
    assert result["different"] == []
    assert len(set(result["counts"])) == 1 and result["counts"][0] > 0.9 * steps
    for disturbance in ("aborted", "preempted", "opted_out"):
        assert result[disturbance] > 0, disturbance
    assert result["sampled"] > result["requests"] // 4
    assert len(set(result["D"])) > 10 and len(set(result["B"])) > 10
    assert len(set(result["fixed_ms"])) > 3  # the clock taught something, again and again
    assert result["accepted"] > steps // 4
    assert len(set(result["lines"])) == 1  # of ranks that read different tables
    assert "the verify latency table (rank 1)" in result["lines"][0]
    assert "\n" not in result["lines"][0]


def check_texts(result: dict[str, Any], target: dict[str, Any]) -> None:
    """Every greedy answer starts as the target's does, up to a tie of its two best tokens."""
    ties = faults = 0
    for prompt, text in result["texts"]:
        tie, fault = differences(text, target["alone"][prompt], target["top"][prompt])
        ties, faults = ties + tie, faults + fault
    assert len(result["texts"]) > 10
    assert faults == 0 and ties <= MOST_TIES


def target_task() -> dict[str, Any]:
    return {
        "policy": None,
        "prompts": PROMPTS,
        "max_tokens": TOKENS,
        "lengths": [1] * len(PROMPTS),
        "alone": len(PROMPTS),
    }


def test_ranks_follow_rank_0(engine_job: Callable[..., dict[str, Any]]) -> None:
    """Catches anything a plan, a draft or an acceptance is made of that rank 1 computes itself:
    its logits, scores, survival and tokens are made wrong, and only rank 0's may count. One
    process with one rank tells what the target says."""
    result = engine_job("ranks", **TASK, steps=STEPS, disturbed=True)
    check(result, STEPS)
    check_texts(result, engine_job("lossless", **target_task()))


@pytest.mark.gpu
def test_ranks_follow_rank_0_on_two_gpus(engine_job: Callable[..., dict[str, Any]]) -> None:
    """The same with captured graphs over NCCL. A hang ends in the job's time limit."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for disturbed in (False, True):
        result = engine_job("ranks", **TASK, steps=GPU_STEPS, disturbed=disturbed, graphs=True)
        check(result, GPU_STEPS)
