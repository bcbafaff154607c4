"""Packed drafts of length d against vLLM's own DFlash2 speculator built for K' = d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import LONG, K, code_prompts

pytestmark = pytest.mark.engine

TOKENS = 28
LENGTHS = list(range(1, K + 1)) if LONG else [1, 2, 4, K]  # each is an engine of its own
DRAFTS = {"prompts": code_prompts(8), "max_tokens": TOKENS, "lengths": LENGTHS}
Drafts = dict[str, list[list[Any]]]  # of each prompt: [context length, tokens emitted, draft]


def check_full_length(packed: Drafts, stock: Drafts, length: int) -> None:
    """Equal drafts, reached by equal numbers of accepted tokens, until the request's last ones."""
    compared = accepted = 0
    for index, drafts in packed.items():
        for (total, emitted, row), (stock_total, stock_emitted, stock_row) in zip(
            drafts, stock[index], strict=False
        ):
            assert (total, emitted) == (stock_total, stock_emitted), (length, index)
            drafted = [token for token in row if token >= 0]
            if len(drafted) < length:  # the request ends here, which stock drafts do not know
                break
            assert drafted == stock_row[:length], (length, index, total)
            compared, accepted = compared + 1, accepted + emitted - 1
    assert compared >= len(packed) * TOKENS // (length + 1) // 2
    assert accepted > 0


def cut_short(packed: Drafts, stock: dict[str, Any], length: int) -> int:
    """Drafts shorter than `length`, because their request ends, that were compared and equal."""
    compared = 0
    for index, drafts in packed.items():
        for total, _, row in drafts:
            drafted = [token for token in row if token >= 0]
            if not 0 < len(drafted) < length or len(drafted) not in LENGTHS:
                continue
            same_length = stock[str(len(drafted))]["drafts"][index]
            there = {place: stock_row for place, _, stock_row in same_length}
            if total in there:
                assert drafted == there[total][: len(drafted)], (length, index, total)
                compared += 1
    return compared


def test_packed_drafts_are_stock_drafts_of_their_length(
    engine_job: Callable[..., dict[str, Any]],
) -> None:
    """Catches packed rows that see another block, offset, predecessor or context, at every d and
    in batches whose blocks differ in length."""
    found = engine_job("parity", **DRAFTS)
    packed, stock = found["packed"], found["stock"]
    short = 0
    for length in LENGTHS:
        ours, theirs = packed[str(length)], stock[str(length)]
        assert ours["texts"] == theirs["texts"], length
        check_full_length(ours["drafts"], theirs["drafts"], length)
        short += cut_short(ours["drafts"], stock, length)
    assert short >= (10 if LONG else 5)
