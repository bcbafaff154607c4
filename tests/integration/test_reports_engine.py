"""User reports that must hold on the real engine, each named by its number."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from serving import prompts, run

pytestmark = pytest.mark.engine


@cache
def result_of(scenario: str, policy: str | None, **extra: Any) -> dict[str, Any]:
    return run({"scenario": scenario, "policy": policy, **extra})


def both(scenario: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return result_of(scenario, "joint"), result_of(scenario, None)


def test_report_1_prefix_cache_does_not_hurt_acceptance() -> None:
    """Catches drafter context that is missing for rows restored from the prefix cache."""
    drafts, alone = both("text_options")
    assert drafts["report_1_first"] == drafts["report_1_second"] == alone["report_1_first"]
    assert drafts["accepted_second"] >= 0.8 * drafts["accepted_first"]


def test_report_2_full_k_without_trimming_drafts_what_stock_drafts() -> None:
    """Catches a checkpoint that loads and drafts garbage through one of the two paths."""
    task = {"scenario": "drafts", "prompts": prompts(8, seed=6), "max_tokens": 40}
    schedule = {"scheduler": {"batchwise_schedule": [[512, 7]]}}
    packed = run({**task, "policy": "batchwise", **schedule})["log"]
    stock = {
        (name, length): row for name, length, _, row in run({**task, "policy": "stock"})["log"]
    }
    whole = [(name, length, row) for name, length, _, row in packed if -1 not in row]
    assert len(whole) >= 50
    assert all(stock[name, length] == row for name, length, row in whole if (name, length) in stock)


def test_report_4_a_broken_selector_shows_at_position_2() -> None:
    """Catches a report that hides which position drafts break at."""
    task = {"scheduler": {"batchwise_schedule": [[512, 7]]}}
    sound = run({"scenario": "broken_selector", "policy": "batchwise", "swap": False, **task})
    swapped = run({"scenario": "broken_selector", "policy": "batchwise", "swap": True, **task})
    assert abs(swapped["conditional"][0] - sound["conditional"][0]) < 0.15
    assert swapped["conditional"][1] < sound["conditional"][1] - 0.05


def test_report_5_top_k_1_is_deterministic() -> None:
    """Catches sampling filters that never reach the verifier."""
    drafts, alone = both("text_options")
    texts = {tuple(r[f"report_5_{t}"]) for r in (drafts, alone) for t in ("a", "b", "greedy")}
    assert len(texts) == 1


def test_report_14_equal_widths_only_falls_back_to_full_blocks() -> None:
    """Catches ragged verification handed to a target that assumes equal widths."""
    drafts, alone = both("uniform_only")
    assert drafts["ids"] == alone["ids"]
    assert drafts["accepted"] > 0
    assert len(drafts["warnings"]) == 1 and "scheduler.policy" in drafts["warnings"][0]


def test_report_16_grammars_with_a_budget_of_zero() -> None:
    """Catches grammar mask rows keyed by verified instead of scheduled drafts."""
    alone = result_of("grammar", None)
    assert result_of("grammar", "joint", verify_nothing=True)["report_16"] == alone["report_16"]
    assert result_of("grammar", "joint")["report_16"] == alone["report_16"]


@pytest.mark.parametrize("report", ["report_25", "report_26", "report_27", "report_29"])
def test_report_25_26_27_29_options_equal_the_target(report: str) -> None:
    """Catches min_tokens, penalties, bad_words or logprobs applied to the wrong draft rows."""
    drafts, alone = both("text_options")
    assert drafts[report] == alone[report]
    assert drafts["report_29_entries"] == len(drafts["report_29"]) == 6


def test_report_28_refusals_are_stocks() -> None:
    """Catches other refusals than vLLM's own, or one that harms the next request."""
    drafts, stock = result_of("refused", "joint"), result_of("refused", "stock")
    assert drafts == stock
    for name, message in drafts["said"].items():
        assert name in message


def test_report_30_json_objects_complete_with_a_small_cache() -> None:
    """Catches a crash when a draft breaks a grammar, also after preemption."""
    drafts, alone = both("grammar")
    assert drafts["finished"] == 30
    assert drafts["report_30"] == alone["report_30"]


def test_report_34_shared_prefixes_are_never_overwritten() -> None:
    """Catches a draft that writes keys into another request's shared blocks."""
    drafts, alone = both("text_options")
    assert drafts["report_34_batch"] == drafts["report_34_serial"] * 4
    assert drafts["report_34_serial"] == alone["report_34_serial"]
