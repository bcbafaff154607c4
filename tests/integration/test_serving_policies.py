"""Every policy on the real engine: the same text as the target alone, and its step invariants."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from exact import p_value, triple_probabilities
from serving import DEAR, FREE, TRIMMED, prompts, run

pytestmark = pytest.mark.engine

# FORESPARK_LONG=1: the full numbers (64 prompts one at a time, 2,000 steps, 200,000 tokens).
LONG = os.environ.get("FORESPARK_LONG") == "1"
GREEDY = {
    "scenario": "greedy",
    "prompts": prompts(64),
    "max_tokens": 64,
    "alone": 64 if LONG else 16,
}
BATCHWISE = {"scheduler": {"batchwise_schedule": [[2, 7], [8, 4], [512, 2]]}}


@cache
def target_alone() -> dict[str, Any]:
    return run({**GREEDY, "policy": None})


@pytest.mark.parametrize(
    ("policy", "extra"),
    [
        ("off", {}),
        ("full", {}),
        ("batchwise", BATCHWISE),
        ("adaptive_verification", {}),
        ("single_curve", {}),
        ("joint", {}),
        ("joint", {"prices": FREE}),
        ("joint", {"prices": DEAR}),
        ("joint", {"scheduler": {"min_draft_len": 2}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_greedy_text_is_the_targets(policy: str, extra: dict[str, Any]) -> None:
    """Catches a draft, trim or cache row that changes the text, alone or beside prefill."""
    alone, result = target_alone(), run({**GREEDY, "policy": policy, **extra})
    assert result["alone"] == alone["alone"]
    assert result["mixed"] == alone["mixed"]
    assert result["speculates"] is (policy != "off")
    assert result.get("broken", []) == []
    if extra.get("prices") is DEAR:
        assert max(result["D"]) == 0
    elif policy in ("joint", "single_curve"):
        assert max(result["B"]) > 0 and min(result["lens"]) < max(result["lens"])


@pytest.mark.parametrize("reads_lengths", [True, False])
def test_every_step_keeps_its_invariants(reads_lengths: bool) -> None:
    """Catches a split that misses the plan, B above what is drafted, drafts past a limit, and
    drafts for a request that opted out, under arrivals, aborts and preemption (reports 20, 33)."""
    steps = 2000 if LONG else 350
    task = {"scenario": "churn", "policy": "joint", "prompts": prompts(20), "steps": steps}
    result = run({**task, "seed": 1, "reads_lengths": reads_lengths}, timeout=900)
    assert result["broken"] == []
    assert result["steps"] >= steps and result["requests"] > steps / 5
    assert min(result["B"]) == 0 < max(result["B"]) and max(result["D"]) > min(result["D"])


SAMPLED = {
    "scenario": "sampled",
    "prompt": "import os\n\ndef merge(key, default=None):\n    if key is None:\n"
    '        return ""\n    return self.data.join(key',
    "requests": 25000 if LONG else 6000,
    "max_tokens": 8,
    "prices": TRIMMED,
}


@pytest.mark.parametrize(
    "policy",
    ["full", "adaptive_verification", "joint"]
    if not LONG
    else ["full", "batchwise", "adaptive_verification", "single_curve", "joint"],
)
def test_sampled_tokens_keep_the_targets_distribution(policy: str) -> None:
    """Catches a bias from trimming: chi-square of the first three tokens at temperature 1.

    A fair sampler falls below 0.01 once in a hundred runs, so a low value is drawn again with
    another seed; a biased one is below it every time.
    """
    exact = triple_probabilities(SAMPLED["prompt"])
    for seed in (0, 1):
        result = run({**SAMPLED, "policy": policy, "engine_seed": seed}, timeout=1500)
        if policy in ("adaptive_verification", "joint"):
            assert 0 < result["B"] < result["D"]
        if p_value(result["counts"], exact) > 0.01:
            return
    pytest.fail(f"{policy}: p <= 0.01 with two independent seeds")


def test_ranking_by_the_drafted_tokens_own_probability_is_seen() -> None:
    """Proves that the test above can see the bias that a score reading x_j would bring."""
    result = run({**SAMPLED, "policy": "joint", "biased": True}, timeout=1500)
    assert p_value(result["counts"], triple_probabilities(SAMPLED["prompt"])) < 1e-6


def _by_place(result: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    return {(name, total): row for name, total, _, row in result["log"]}


@pytest.mark.parametrize("length", range(1, 8) if LONG else (1, 3, 6))
def test_packed_drafts_are_stock_drafts_of_that_length(length: int) -> None:
    """Catches packed rows that see another block, offset, predecessor or context."""
    task = {"scenario": "drafts", "prompts": prompts(8, seed=5), "max_tokens": 40}
    stock = _by_place(run({**task, "policy": "stock", "tokens": length}))
    schedule = {"scheduler": {"batchwise_schedule": [[512, length]]}}
    packed = _by_place(run({**task, "policy": "batchwise", **schedule}))
    compared = 0
    for place, row in packed.items():
        drafted = [token for token in row if token >= 0]
        if place in stock and len(drafted) == length:
            assert drafted == stock[place][:length], place
            compared += 1
    assert compared >= 50


def test_full_is_stock_dflash() -> None:
    """Catches `policy: full` drafting or accepting anything else than vLLM's own method."""
    task = {"scenario": "drafts", "prompts": prompts(8, seed=6), "max_tokens": 40}
    assert run({**task, "policy": "full"})["log"] == run({**task, "policy": "stock"})["log"]
