"""Greedy text of every policy on the real engine: the target's own, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import PROMPTS, TOKENS, K, lossless_task

pytestmark = pytest.mark.engine

TIE = 1e-4  # nats between the target's two best tokens
MOST_TIES = 2
Job = Callable[..., dict[str, Any]]


def differences(text: list[int], target: list[int], top: list[Any]) -> tuple[int, int]:
    """(ties, faults) of one text against the target's, judged where they first differ."""
    for place, (token, expected) in enumerate(zip(text, target, strict=False)):
        if token != expected:
            chances = dict(top[place])
            tie = token in chances and abs(chances[expected] - chances[token]) < TIE
            return int(tie), int(not tie)
    return 0, 0


def check_texts(result: dict[str, Any], target: dict[str, Any], task: dict[str, Any]) -> None:
    """Every text is the target's; the few that are not part at a tie of its two best tokens."""
    ties = faults = 0
    for texts, lengths in (
        (result["alone"], [TOKENS] * task["alone"]),
        (result["mixed"], task["lengths"]),
    ):
        assert [len(text) for text in texts] == lengths
        for text, expected, top in zip(texts, target["alone"], target["top"], strict=False):
            tie, fault = differences(text, expected, top)
            ties, faults = ties + tie, faults + fault
    assert faults == 0
    assert ties <= MOST_TIES


RUNS_COMPARED = [
    "target",
    "joint",
    "off",
    "full",
    "batchwise",
    "adaptive_verification",
    "single_curve",
    "joint_free",
    "joint_dear",
    "stock",
]


@pytest.mark.parametrize("run", RUNS_COMPARED)
def test_greedy_text_is_the_targets(run: str, engine_job: Job) -> None:
    """Catches a draft, trim, cache row or prefill chunk that changes what the target says, and
    plans that the device does not follow while it says it."""
    task = lossless_task(run)
    result = engine_job("lossless", **task)
    target = engine_job("lossless", **lossless_task("target"))
    assert len(target["alone"]) == len(target["top"]) == PROMPTS
    check_texts(result, target, task)
    assert result.get("broken", []) == []
    if run not in ("target", "off", "joint_dear"):  # drafts are verified beside prefill chunks
        assert result["beside_chunks"] >= 10


@pytest.mark.parametrize("run", ["single_curve", "joint"])
def test_the_scheduler_varies_its_lengths(run: str, engine_job: Job) -> None:
    """Catches a planner stuck at one length, which would make equal text a weaker proof."""
    result = engine_job("lossless", **lossless_task(run))
    assert sum(count > 0 for count in result["lengths"]) >= 5
    assert len(set(result["D"])) > 10 and len(set(result["B"])) > 10


def test_adaptive_verification_drafts_full_blocks_and_verifies_some(engine_job: Job) -> None:
    """Catches adaptive verification that trims drafting, or trims nothing."""
    result = engine_job("lossless", **lossless_task("adaptive_verification"))
    assert result["lengths"][K] > 0.5 * sum(result["lengths"][1:])
    assert 0 < sum(result["B"]) < 0.9 * sum(result["D"])


def test_free_drafting_drafts_everything(engine_job: Job) -> None:
    """Catches a joint planner that saves drafts although they cost nothing."""
    lengths = engine_job("lossless", **lossless_task("joint_free"))["lengths"]
    assert lengths[K] > 0.8 * sum(lengths[1:])


def test_drafting_that_never_pays_is_not_done(engine_job: Job) -> None:
    """Catches a joint planner without the candidate D = 0."""
    result = engine_job("lossless", **lossless_task("joint_dear"))
    assert max(result["D"]) == 0 and max(result["B"], default=0) == 0
