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


def test_full_drafts_what_stock_drafts(engine_job: Job) -> None:
    """Catches `policy: full` drafting anything else, alone or in mixed batches, than upstream."""
    full, stock = of(engine_job, "full")["log"], of(engine_job, "stock")["log"]
    assert len(full) > 1000
    assert full == stock  # request, context length, tokens emitted, draft: of every step


def test_full_accepts_what_stock_accepts(engine_job: Job) -> None:
    """Catches acceptance that `policy: full` counts or reports differently from upstream."""
    full, stock = of(engine_job, "full")["counters"], of(engine_job, "stock")["counters"]
    assert full == stock
    assert full["vllm:spec_decode_num_accepted_tokens"] > 500


def test_off_adds_no_drafter_work(engine_job: Job) -> None:
    """Catches `policy: off` that still builds a drafter, loads its weights or reserves its KV."""
    off, target, full = (of(engine_job, run) for run in ("off", "target", "full"))
    parts = ("speculator", "drafter_modules", "drafter_parameters", "kv_layers", "counters")
    assert {part: off[part] for part in parts} == {part: target[part] for part in parts}
    assert not off["speculator"] and off["drafter_modules"] == off["drafter_parameters"] == 0
    # The same look finds all of it where there is a drafter.
    assert full["speculator"] and full["drafter_modules"] > 0 < full["drafter_parameters"]
    assert full["kv_layers"] > off["kv_layers"]


def test_off_emits_one_token_a_step(engine_job: Job) -> None:
    """Catches drafts that reach the verifier although the policy is off."""
    off, target, full = (of(engine_job, run)["steps_alone"] for run in ("off", "target", "full"))
    assert off == target[: len(off)]
    assert off[-1] > 1.3 * full[len(off) - 1]
