"""Gated DeltaNet targets on the real engine: one state a request, and the target's own greedy text.

The always-run part is small; FORESPARK_LONG=1 runs 64 prompts of 64 tokens under every policy.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from forespark.benchmarks.shapes import write_pair
from forespark.benchmarks.smoke import LIMITS, write_prompts
from forespark.benchmarks.smoke import run as run_module
from harness import LONG, PAIR, PROMPTS, TOKENS, run_job

pytestmark = pytest.mark.engine

AMOUNT = {"prompts": PROMPTS, "max_tokens": TOKENS} if LONG else {"prompts": 20, "max_tokens": 32}
BLOCKS = 20 if LONG else 12
ADAPTIVE = {"policy": "stock", "speculative": {"enable_adaptive_verification": True}}
RUNS: dict[str, dict[str, Any]] = {
    "target": {"policy": None},
    "adaptive": ADAPTIVE,
    "adaptive, preempted and aborted": {**ADAPTIVE, "blocks": BLOCKS, "aborts": True},
    "full": {"policy": "full"},
    "joint": {"policy": "joint"},
    "stock at full length": {"policy": "stock", "additional": {"forespark_hybrid": True}},
    "no commits": {"policy": "full", "drop_commits": True},
}
LONG_ONLY = {"adaptive", "full", "joint", "stock at full length"}


@functools.cache
def run(name: str) -> dict[str, Any]:
    """The result of one engine process."""
    return run_job("hybrid", {**RUNS[name], **AMOUNT})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.skipif(not LONG, reason="FORESPARK_LONG=1")])
        if name in LONG_ONLY
        else name
        for name in RUNS
        if name not in ("target", "no commits")
    ],
)
def test_greedy_text_is_the_targets_own(name: str) -> None:
    """Catches a state, a window or a length that is wrong after any accepted prefix."""
    result, target = run(name), run("target")
    assert result["speculative_blocks"] == [0]
    assert result["texts"] == target["texts"]
    kept = {tuple(pair) for pair in result["commits"]}
    assert result["accepted"] > 0 and any(accepted > 1 for _, accepted in kept)
    assert all(1 <= accepted <= width for width, accepted in kept)


def test_drafts_of_unequal_lengths_are_verified() -> None:
    """Catches adaptive verification that is accepted and then never trims."""
    assert len({width for width, _ in run("adaptive, preempted and aborted")["commits"]}) > 2


def test_a_small_cache_preempts() -> None:
    """Otherwise the run under that name shows nothing about preemption."""
    assert run("adaptive, preempted and aborted")["preempted"] > 0


def test_states_without_commits_change_the_text() -> None:
    """The comparison above must be able to fail: the layers' states are in the text."""
    assert run("no commits")["texts"] != run("target")["texts"]


def test_workers_of_their_own_process_serve_it_too(tmp_path: Path) -> None:
    """Catches a layer that is replaced only where engine and worker share a process. Also what a
    step costs and what the cache leaves room for, on a shape with random weights."""
    target, drafter = write_pair(tmp_path, "hybrid-tiny", PAIR / "target", 7)
    out = tmp_path / "steps.json"
    run_module(
        "forespark.benchmarks.step_profile", "--target", target, "--drafter", drafter,
        "--tokens", 7, *LIMITS, "--load-format", "dummy", "--policies", "joint", "--loads", 2,
        "--prompts", write_prompts(tmp_path)["prompts"], "--max-tokens", 32,
        "--warm-up", 1, "--seconds", 1, "--out", out,
    )  # fmt: skip
    record = json.loads(out.read_text())
    assert record["cache_room"]["tokens"] > 256
    row = record["rows"][0]
    # Split on the device: without the layer nothing is planned and every step drafts 7.
    assert row["split"] > 0 and row["distribute"] > 0 and row["steps"] > 5
