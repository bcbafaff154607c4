"""Greedy text of every policy on the real engine: the target's own, alone and in mixed batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LONG, PROMPTS, TOKENS, K, lossless_task

pytestmark = pytest.mark.engine

TIE = 1e-4  # nats between the target's two best tokens
MOST_TIES = 2


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


def check_lengths(run: str, result: dict[str, Any]) -> None:
    """The run drafted and verified what its policy and prices are for: else equal text is easy."""
    lengths, drafted, verified = result["lengths"], result["D"], result["B"]
    if run == "joint_host":  # lengths that the host could not have guessed by an even split
        assert min(result["uneven"].values()) > 10
    # Every length, and budgets that keep moving.
    if run in ("single_curve", "joint", "joint_corrected", "joint_host"):
        assert all(count > 0 for count in lengths)
        assert len(set(drafted)) > 10 and len(set(verified)) > 10
    elif run == "adaptive_verification":  # full blocks, trimmed after drafting
        assert lengths[K] > 0.5 * sum(lengths[1:])
        assert 0 < sum(verified) < 0.9 * sum(drafted)
    elif run == "joint_free":
        assert lengths[K] > 0.8 * sum(lengths[1:])
    elif run == "joint_floor":  # two tokens each or nothing at all; 1 only at a request's end
        assert lengths[2] > 0 and lengths[1] < 0.2 * sum(lengths[1:])
    elif run == "joint_dear":
        assert max(drafted) == 0 and max(verified, default=0) == 0


@pytest.mark.parametrize(
    "run",
    [
        "target",
        "joint",
        "off",
        "full",
        "batchwise",
        "adaptive_verification",
        "single_curve",
        "joint_free",
        "joint_floor",
        "joint_host",
        "stock",
        *(["joint_dear", "joint_corrected"] if LONG else []),
    ],
)
def test_greedy_text_is_the_targets(run: str, engine_job: Callable[..., dict[str, Any]]) -> None:
    """Catches a draft, trim, cache row or prefill chunk that changes what the target says, and
    plans that the device does not follow while it says it."""
    task = lossless_task(run)
    result = engine_job("lossless", **task)
    target = engine_job("lossless", **lossless_task("target"))
    assert len(target["alone"]) == len(target["top"]) == PROMPTS
    check_texts(result, target, task)
    if run not in ("target", "off", "joint_dear"):  # drafts are verified beside prefill chunks
        assert result["beside_chunks"] >= 10
    if "broken" in result:
        assert result["broken"] == []
        check_lengths(run, result)
