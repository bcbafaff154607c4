"""`policy: full` is vLLM's own DFlash2, and `policy: off` is no drafter at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import lossless_task

pytestmark = pytest.mark.engine

Job = Callable[..., dict[str, Any]]


def of(engine_job: Job, run: str) -> dict[str, Any]:
    """The lossless run of that name, shared with the text tests."""
    return engine_job("lossless", **lossless_task(run))


def test_full_drafts_and_accepts_what_stock_does(engine_job: Job) -> None:
    """Catches `policy: full` drafting or accepting anything else than upstream, alone or mixed."""
    full, stock = of(engine_job, "full"), of(engine_job, "stock")
    assert len(full["log"]) > 1000
    # Request, context length, tokens emitted and draft of every request in every step.
    assert full["log"] == stock["log"]
    assert full["counters"] == stock["counters"]
    assert full["counters"]["vllm:spec_decode_num_accepted_tokens"] > 500


def test_off_adds_no_drafter_work(engine_job: Job) -> None:
    """Catches `policy: off` that builds a drafter, loads its weights, reserves its KV or drafts."""
    off, target, full = (of(engine_job, run) for run in ("off", "target", "full"))
    parts = ("speculator", "drafter_modules", "drafter_parameters", "kv_layers", "counters")
    assert {part: off[part] for part in parts} == {part: target[part] for part in parts}
    assert not off["speculator"] and off["drafter_modules"] == off["drafter_parameters"] == 0
    steps, most = off["steps_alone"], full["steps_alone"]
    assert steps == target["steps_alone"][: len(steps)]
    # The same look finds all of it where there is a drafter.
    assert full["speculator"] and full["drafter_modules"] > 0 < full["drafter_parameters"]
    assert full["kv_layers"] > off["kv_layers"] and steps[-1] > 1.3 * most[len(steps) - 1]
