"""Multi-turn requests: each carries its conversation so far, with the recorded answers.

A ring of conversations is gone round again and again, one user turn at each place, so that turns
of one conversation are `RING` requests apart (fewer when there are fewer conversations). One that
is over is replaced by the next. The order depends on the file alone: every method replays it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forespark.training.prompts import PromptSet, read_records

RING = 512
MOST = 20_000
HELD_OUT = 16  # every 16th conversation warms up and is never measured
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
Message = dict[str, str]


@dataclass
class Conversations:
    """Conversations to measure and to warm up with; what was dropped, by reason."""

    measured: list[list[Message]] = field(default_factory=list)
    held_out: list[list[Message]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """One line: kept, held out, and dropped per reason."""
        reasons = ", ".join(f"{count} {why}" for why, count in self.dropped.most_common())
        return (
            f"{len(self.measured)} conversations, {len(self.held_out)} held out; "
            f"dropped: {reasons or 'none'}"
        )


def messages_of(record: Any, min_turns: int) -> list[Message] | str:
    """Messages from the first user turn on, roles alternating; or why the record is dropped."""
    held = record.get("messages", record.get("conversations")) if isinstance(record, dict) else None
    if not isinstance(held, list) or not all(isinstance(m, dict) for m in held):
        return "no messages"
    found: list[Message] = []
    for entry in held:
        role = ROLES.get(entry.get("role", entry.get("from")))
        text = entry.get("content", entry.get("value"))
        wanted = "assistant" if len(found) % 2 else "user"
        if not found and role != "user":
            continue
        if role != wanted or not isinstance(text, str) or not text.strip():
            break
        found.append({"role": role, "content": text})
    return found if len(found) >= min_turns else f"fewer than {min_turns} turns"


def read_conversations(file: Path, min_turns: int = 4, most: int = MOST) -> Conversations:
    """The first `most` usable conversations. ValueError for a file without two."""
    damage = PromptSet()
    result = Conversations()
    for record in read_records(file, damage):
        found = messages_of(record, min_turns)
        kept = len(result.measured) + len(result.held_out)
        if isinstance(found, str):
            result.dropped[found] += 1
        elif kept >= most:
            break
        else:
            part = result.held_out if kept % HELD_OUT == 0 else result.measured
            part.append(found)
    result.dropped += damage.dropped
    if not result.measured:
        raise ValueError(
            f"--prompts: {file} has too few conversations with recorded answers "
            f"({result.summary()}); give ShareGPT JSON or JSONL with `messages`"
        )
    return result


def stream(conversations: Iterable[list[Message]], ring: int = RING) -> Iterator[list[Message]]:
    """Requests in order: messages up to and including a user turn. Ends with the last turn."""
    waiting = iter(conversations)
    places: list[Iterator[list[Message]]] = []
    for conversation in waiting:
        places.append(_turns(conversation))
        if len(places) == ring:
            break
    while places:
        kept = []
        for place in places:
            current, request = place, next(place, None)
            while request is None:
                following = next(waiting, None)
                if following is None:
                    break
                current = _turns(following)
                request = next(current, None)
            if request is not None:
                kept.append(current)
                yield request
        places = kept


def _turns(conversation: list[Message]) -> Iterator[list[Message]]:
    for end, message in enumerate(conversation, start=1):
        if message["role"] == "user":
            yield conversation[:end]
