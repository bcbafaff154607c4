"""Prompts of a closed loop: chat prompts, `math-code` tasks, or `acceptance` categories.

What the dataset reader of training accepts can be read (ShareGPT JSON, JSONL, .gz); nothing is
dropped silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from forespark.training.prompts import PromptSet, read_records, user_turns

FORMATS = ("auto", "prompts", "math-code", "acceptance")
TASK_KEYS = ("question", "prompt", "text")  # GSM8K, HumanEval, MBPP
TASK_SIGNS = ("question", "text", "canonical_solution", "test", "test_list")


@dataclass
class Workload:
    """Texts to send, each with its category, and what was left out and why."""

    name: str  # of the format
    texts: list[str] = field(default_factory=list)
    categories: list[str | None] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line: kept, per category where there are any, and dropped per reason."""
        named = Counter(name for name in self.categories if name is not None)
        of = f" ({', '.join(f'{count} {name}' for name, count in named.items())})" if named else ""
        reasons = ", ".join(f"{count} {why}" for why, count in self.dropped.most_common())
        return f"{self.name}: {len(self.texts)} prompts{of}; dropped: {reasons or 'none'}"


@dataclass
class Prompts:
    """Token ids of a workload's prompts, with their categories."""

    ids: list[list[int]]
    categories: list[str | None]


def format_of(record: Any) -> str | None:
    """Which format a record is of; None for none of them."""
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("category"), str) and ("turns" in record or "messages" in record):
        return "acceptance"
    if any(key in record for key in ("turns", "messages", "conversations")):
        return "prompts"
    if any(key in record for key in TASK_SIGNS):
        return "math-code"
    return "prompts" if "prompt" in record else None


def read_workload(file: Path, kind: str = "auto") -> Workload:
    """The first user turn of every usable record. ValueError, one line, when there is none."""
    damage = PromptSet()
    records = list(read_records(file, damage))
    if kind == "auto":
        found = (format_of(record) for record in records)
        kind = next((name for name in found if name is not None), "prompts")
    result = Workload(kind, dropped=damage.dropped)
    for record in records:
        text = _text(record, kind)
        if isinstance(text, tuple):
            result.dropped[text[0]] += 1
            continue
        result.texts.append(text)
        result.categories.append(record["category"] if kind == "acceptance" else None)
    if not result.texts:
        raise ValueError(f"--prompts: {file} has no usable prompt ({result.summary()})")
    if kind == "acceptance":
        _alternate(result)
    return result


def _text(record: Any, kind: str) -> str | tuple[str]:
    """The text to send, or (why not,)."""
    if kind == "math-code":
        if not isinstance(record, dict):
            return ("not an object",)
        texts = (record.get(key) for key in TASK_KEYS)
        text = next((t.strip() for t in texts if isinstance(t, str) and t.strip()), None)
        return text if text is not None else (f"no {', '.join(TASK_KEYS)}",)
    if kind == "acceptance" and not (
        isinstance(record, dict) and isinstance(record.get("category"), str)
    ):
        return ("no category",)
    turns = user_turns(record)
    return turns[0] if isinstance(turns, list) else (turns,)


def _alternate(workload: Workload) -> None:
    """One prompt of every category in turn, so that a short window sees all of them."""
    held: dict[str | None, list[str]] = {}
    for name, text in zip(workload.categories, workload.texts, strict=True):
        held.setdefault(name, []).append(text)
    rounds = zip_longest(*([(name, text) for text in texts] for name, texts in held.items()))
    pairs = [pair for row in rounds for pair in row if pair is not None]
    workload.categories = [name for name, _ in pairs]
    workload.texts = [text for _, text in pairs]


def tokenized(workload: Workload, tokenizer: Any, longest: int, file: Path) -> Prompts:
    """One chat turn each; longer ones are dropped and counted. ValueError when all are longer."""
    kept: list[tuple[list[int], str | None]] = []
    for text, name in zip(workload.texts, workload.categories, strict=True):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        if len(ids) <= longest:
            kept.append((ids, name))
    if len(kept) < len(workload.texts):
        workload.dropped[f"longer than {longest} tokens"] += len(workload.texts) - len(kept)
    if not kept:
        raise ValueError(
            f"--prompts: {file} has no prompt of at most {longest} tokens (--longest-prompt)"
        )
    return Prompts([ids for ids, _ in kept], [name for _, name in kept])


def by_category(seen: Iterable[tuple[str | None, int, int]]) -> dict[str, dict[str, float]]:
    """From (category, tokens, steps) of requests: steps and acceptance length of a category."""
    sums: dict[str, list[int]] = {}
    for name, tokens, steps in seen:
        if name is not None and steps:
            held = sums.setdefault(name, [0, 0])
            held[0] += tokens
            held[1] += steps
    return {
        name: {"request_steps": steps, "acceptance_length": round(tokens / steps, 4)}
        for name, (tokens, steps) in sorted(sums.items())
    }
