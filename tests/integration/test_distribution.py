"""Temperature 1 on the real engine: tokens are drawn from the target's own distribution.

The pair of `small_pair.py` has 16 tokens and a target that reads the last one only, so every
emitted token counts: the transitions are compared with 16 known distributions at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import small_pair
from harness import LONG
from scipy.stats import chi2

pytestmark = pytest.mark.engine

# Verification is dear: a quarter of what could be drafted is verified. Drafting costs nothing, or
# nothing up to half of the full blocks, so that D is split as well.
VERIFY = [[1, 4.0], [128, 5.0], [192, 6.0], [256, 7.0], [320, 9.0], [512, 16.0], [1024, 40.0]]
FULL_BLOCKS = {"draft": [[2, 0.01], [1024, 0.02]], "verify": VERIFY}
# Half of what is drafted is verified at next to no cost, the rest never pays: policies that learn
# what a drafted token is worth must neither stop drafting nor verify all of it.
HALF_BLOCKS = {
    "draft": [[2, 0.1], [384, 0.1], [400, 8.0], [1024, 12.0]],
    "verify": [[1, 4.0], [128, 5.0], [192, 5.1], [256, 5.2], [320, 16.0], [1024, 60.0]],
}
# A quarter is verified and the scores alone decide: the plan must not learn to do without.
BIASED = {"draft": HALF_BLOCKS["draft"], "verify": VERIFY}
SCHEDULE = {"batchwise_schedule": [[32, 4], [512, 2]]}
BATCH = 128
Job = Callable[..., dict[str, Any]]


def sampled(engine_job: Job, policy: str, requests: int, **task: Any) -> dict[str, Any]:
    """Transitions of `requests` random prompts and 400 tokens each, or as `task` says."""
    scheduler = SCHEDULE if policy == "batchwise" else {}
    prices = HALF_BLOCKS if policy in ("joint", "single_curve") else FULL_BLOCKS
    common = {"batch": BATCH, "max_tokens": 400, "prices": prices, "scheduler": scheduler}
    return engine_job("transitions", policy=policy, requests=requests, **(common | task))


def p_value(counts: list[list[int]]) -> float:
    """Chi-square of all transitions, given how often each token was left."""
    seen, chances = np.array(counts), small_pair.chances().numpy()
    expected = chances * seen.sum(axis=1, keepdims=True)
    # Cells expected under five times are pooled, row by row, with the row's smallest other cell.
    statistic, freedom = 0.0, 0
    for row, wanted in zip(seen, expected, strict=True):
        order = np.argsort(wanted)
        pooled = max(1, int(np.searchsorted(np.cumsum(wanted[order]), 5.0)) + 1)
        groups = [order[:pooled], *(order[i : i + 1] for i in range(pooled, len(order)))]
        for group in groups:
            statistic += (row[group].sum() - wanted[group].sum()) ** 2 / wanted[group].sum()
        freedom += len(groups) - 1
    return float(chi2.sf(statistic, freedom))


# batchwise and single_curve take the same roads as joint and adaptive_verification.
POLICIES = ["joint", "adaptive_verification"]
if LONG:
    POLICIES += ["full", "batchwise", "single_curve"]


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_tokens_follow_the_target(policy: str, engine_job: Job) -> None:
    """Catches any bias that drafting, trimming or rejection brings into sampling."""
    requests = 512 if LONG else 128
    result = sampled(engine_job, policy, requests)
    assert int(np.sum(result["counts"])) == requests * 400
    assert result["accepted"] > 0.1 * requests * 400
    assert result.get("broken", []) == []
    if policy not in ("full", "batchwise"):
        assert 0 < sum(result["B"]) < 0.7 * sum(result["D"])
    assert p_value(result["counts"]) > 0.01


def test_ranking_by_the_drafted_tokens_own_probability_is_seen(engine_job: Job) -> None:
    """Proves that the test above sees the bias of a score that reads x_j: same test, it fails."""
    result = sampled(
        engine_job,
        "joint",
        128,
        max_tokens=200,
        own_probability=True,
        prices=BIASED,
        scheduler={"selection": "none"},
    )
    assert 0 < sum(result["B"]) < 0.7 * sum(result["D"])
    assert p_value(result["counts"]) < 1e-6
