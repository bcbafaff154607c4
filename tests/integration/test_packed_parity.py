"""Packed drafts of length d against vLLM's own DFlash2 speculator built for K' = d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import K, code_prompts

pytestmark = pytest.mark.engine

TOKENS = 28
DRAFTS = {"prompts": code_prompts(8), "max_tokens": TOKENS}
Job = Callable[..., dict[str, Any]]


def both(engine_job: Job, first: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(packed, stock) drafts of every length. `first` says which engine a test process starts, so
    that two of them start one each."""
    names = ["packed_drafts", "stock_drafts"]
    found = {name: engine_job(name, **DRAFTS) for name in (names[first], names[1 - first])}
    return found[names[0]], found[names[1]]


@pytest.mark.parametrize("length", range(1, K + 1))
def test_packed_drafts_are_stock_drafts_of_that_length(length: int, engine_job: Job) -> None:
    """Catches packed rows that see another block, offset, predecessor, context or noise."""
    packed, stock = (drafts[str(length)] for drafts in both(engine_job, length % 2))
    assert packed["texts"] == stock["texts"]
    compared = accepted = 0
    for index, drafts in packed["drafts"].items():
        for (total, emitted, row), (stock_total, stock_emitted, stock_row) in zip(
            drafts, stock["drafts"][index], strict=False
        ):
            # The same context was reached by the same number of accepted tokens.
            assert (total, emitted) == (stock_total, stock_emitted)
            drafted = [token for token in row if token >= 0]
            if len(drafted) < length:  # the request ends here, which stock drafts do not know
                break
            assert drafted == stock_row[:length]
            compared, accepted = compared + 1, accepted + emitted - 1
    assert compared >= 8 * TOKENS // (length + 1) // 2
    assert accepted > 0


def test_drafts_cut_short_at_the_end_are_stock_drafts_too(engine_job: Job) -> None:
    """Catches wrong drafts in a batch whose blocks have different lengths."""
    packed, stock = both(engine_job)
    compared = 0
    for length in range(2, K + 1):
        for index, drafts in packed[str(length)]["drafts"].items():
            for total, _, row in drafts:
                drafted = [token for token in row if token >= 0]
                if not 0 < len(drafted) < length:
                    continue
                same_length = stock[str(len(drafted))]["drafts"][index]
                there = {place: stock_row for place, _, stock_row in same_length}
                if total in there:
                    assert drafted == there[total][: len(drafted)]
                    compared += 1
    assert compared >= 10
