"""The multi-turn stream: order, distance, what is carried, and what is dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forespark.benchmarks.conversations import read_conversations, stream


def talk(name: str, turns: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{name}{i}"} for i in range(turns)]


def test_turns_are_a_ring_apart_and_carry_the_answers() -> None:
    """Catches turns in a row, which the prefix cache would answer, and a lost history."""
    requests = list(stream([talk("a", 6), talk("b", 6), talk("c", 4)], ring=2))
    last = [request[-1]["content"] for request in requests]
    assert last == ["a0", "b0", "a2", "b2", "a4", "b4", "c0", "c2"]
    assert [m["content"] for m in requests[4]] == ["a0", "a1", "a2", "a3", "a4"]


def test_what_is_dropped_is_counted(tmp_path: Path) -> None:
    """Catches short, answerless or damaged records that vanish, and warm-up on what is measured."""
    share = [{"from": f, "value": v} for f, v in (("gpt", "x"), ("human", "q"), ("gpt", "a"))]
    records = [{"messages": talk(f"t{i}", 4)} for i in range(20)]
    lines = [json.dumps(r) for r in (*records, {"conversations": share}, {"prompt": "p"})]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join([*lines, "{broken"]))
    found = read_conversations(file)
    assert len(found.measured) == 18 and len(found.held_out) == 2
    assert dict(found.dropped) == {
        "fewer than 4 turns": 1, "no messages": 1, "unreadable line": 1,
    }  # fmt: skip
    assert len(read_conversations(file, min_turns=2).measured) == 19
    with pytest.raises(ValueError, match="too few conversations with recorded answers"):
        read_conversations(file, min_turns=9)
    with pytest.raises(ValueError, match="cannot be read"):
        read_conversations(tmp_path / "none.json")
