"""User reports on what the drafter proposes: reports 2 and 4."""

from __future__ import annotations

from typing import Any

import pytest
from reports_harness import K, StepLog, counters, generate, greedy, in_engine, once, run_job

pytestmark = pytest.mark.engine

VERBS, NOUNS = ("merge", "parse", "load", "split", "walk", "copy"), ("data", "path", "node", "key")
PROMPTS = [f"def {verb}({noun}):\n    " for verb in VERBS for noun in NOUNS]


def job(task: dict[str, Any]) -> dict[str, Any]:
    """Drafts and acceptance of full blocks, packed and stock, and with a broken selector."""
    whole = {"batchwise_schedule": [[512, K]]}
    return {
        "packed": in_engine("batchwise", _packed, whole),
        "stock": in_engine("stock", lambda llm: _drafts(llm, StepLog(llm))),
    }


def _drafts(llm: Any, log: StepLog) -> dict[str, Any]:
    texts = generate(llm, PROMPTS, greedy(48))
    return {"texts": texts, "drafts": [[r["request"], r["left"], r["draft"]] for r in log.rows]}


def _packed(llm: Any) -> dict[str, Any]:
    import forespark.drafter.heads as module

    found = _drafts(llm, StepLog(llm))
    found["sound"] = _conditional(counters(llm), {})
    before, scores = counters(llm), module.packed_edge_scores
    # Step 0 everywhere: every position is scored as if it followed the anchor.
    module.packed_edge_scores = lambda selector, candidates, unary, hidden, anchors, steps: scores(
        selector, candidates, unary, hidden, anchors, steps * 0
    )
    found["swapped_texts"] = generate(llm, PROMPTS, greedy(48))
    found["swapped"] = _conditional(counters(llm), before)
    return found


def _conditional(after: dict[str, Any], before: dict[str, Any]) -> list[float]:
    """Acceptance of each position given that all before it were accepted."""
    rates = []
    for position in range(K):
        accepted, reached = (
            after[name] - before.get(name, 0)
            for name in (
                f"forespark:{kind}_tokens_by_position/{position}"
                for kind in ("accepted", "reached")
            )
        )
        rates.append(accepted / reached if reached else 0.0)
    return rates


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "drafts", lambda: run_job("test_reports_drafts:job"))


def test_report_2_full_blocks_without_trimming_are_stock_drafts(found: dict[str, Any]) -> None:
    """Catches a checkpoint that ForeSpark loads but drafts garbage from."""
    packed, stock = found["packed"]["drafts"], found["stock"]["drafts"]
    assert found["packed"]["texts"] == found["stock"]["texts"]
    # Stock drafts K tokens to the very end, ForeSpark what may surely still be emitted.
    ours, theirs = (
        {(name, left): draft for name, left, draft in rows if left > 2 * K}
        for rows in (packed, stock)
    )
    assert ours == theirs  # at the same places, so the same acceptance too
    assert len(ours) > 200 and all(len(draft) == K for draft in ours.values())


def test_report_4_a_broken_selector_shows_at_position_2(found: dict[str, Any]) -> None:
    """Catches a report whose mean hides that drafts break after their first position."""
    sound, swapped = found["packed"]["sound"], found["packed"]["swapped"]
    assert swapped[0] == pytest.approx(sound[0], abs=0.06)
    assert swapped[1] < 0.75 * sound[1]
    assert found["packed"]["swapped_texts"] == found["packed"]["texts"]
