"""The captured drafter on a GPU: graphs draft what the eager drafter drafts, at every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import K, lossless_task
from test_invariants import CHURN

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

# bfloat16 sums depend on a GEMM's shape, so padding flips tokens at near ties; a fault in the
# graphs' inputs would cost most of the acceptance instead.
CLOSE = 0.05


def _accepted(result: dict[str, Any]) -> float:
    counters = result["counters"]
    return float(
        counters["vllm:spec_decode_num_accepted_tokens"] / counters["vllm:spec_decode_num_drafts"]
    )


@pytest.mark.parametrize("run", ["joint_free", "joint", "joint_floor", "joint_host"])
def test_graphs_draft_like_the_eager_drafter(
    run: str, engine_job: Callable[..., dict[str, Any]]
) -> None:
    """Catches a graph that reads stale lengths, rows, anchors or attention metadata."""
    eager = engine_job("lossless", **lossless_task(run) | {"graphs": False})
    graphs = engine_job("lossless", **lossless_task(run) | {"graphs": True})
    assert _accepted(graphs) == pytest.approx(_accepted(eager), rel=CLOSE)
    assert graphs["broken"] == []
    if run == "joint":
        assert all(count > 0 for count in graphs["lengths"])


def test_full_graphs_accept_like_stock(engine_job: Callable[..., dict[str, Any]]) -> None:
    """Catches captured drafts of K tokens that are worse than vLLM's own captured drafter's."""
    task = lossless_task("batchwise") | {"scheduler": {"batchwise_schedule": [[512, K]]}}
    stock = engine_job("lossless", **lossless_task("stock") | {"graphs": True})
    ours = engine_job("lossless", **task | {"graphs": True})
    assert _accepted(ours) == pytest.approx(_accepted(stock), rel=CLOSE)
    assert sum(ours["lengths"][K:]) > 0.8 * sum(ours["lengths"][1:])


def test_lengths_decided_on_the_host(engine_job: Callable[..., dict[str, Any]]) -> None:
    """Catches a backend that plans on the host and is not chosen, is given other lengths than the
    device, or replays a graph of equal lengths for a trimmed step; the host runs a step ahead."""
    task = CHURN | {"steps": 400, "seed": 4, "blocks": 24, "reads_lengths": False}
    result = engine_job("churn", **task, graphs=True, plans_on_host=True)
    assert result["broken"] == []
    assert min(result["uneven"].values()) > 40
