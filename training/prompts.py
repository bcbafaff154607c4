"""Reading prompts: ShareGPT JSON (also truncated), JSONL with `turns`, `messages` or `prompt`.

Nothing is dropped silently: every conversation that cannot be used is counted under its reason.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GAP = re.compile(r"[\s,]*")
_USER_ROLES = {"user", "human"}


@dataclass
class PromptSet:
    """User turns of each conversation, and what was left out and why."""

    conversations: list[list[str]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    listed: list[tuple[int, str]] = field(default_factory=list)  # record of the file, reason
    read: int = 0

    def add(self, record: Any) -> None:
        """Keep the user turns of one record, or count and list why it has none."""
        turns = user_turns(record)
        if isinstance(turns, str):
            self.drop(turns)
        else:
            self.conversations.append(turns)
            self.read += 1

    def drop(self, reason: str) -> None:
        """Count and list the next record of the file as left out."""
        self.dropped[reason] += 1
        self.listed.append((self.read, reason))
        self.read += 1

    def summary(self) -> str:
        """One line: kept, and dropped per reason."""
        reasons = ", ".join(f"{count} {why}" for why, count in self.dropped.most_common())
        return f"{len(self.conversations)} conversations kept; dropped: {reasons or 'none'}"


@dataclass
class Dropped:
    """What a preparation left out: counts by reason, and every case."""

    counts: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, Any]] = field(default_factory=list)

    def add(self, source: str, record: int, reason: str) -> None:
        """Count and list record `record` of `source`."""
        self.counts[reason] += 1
        self.listed.append({"source": source, "record": record, "reason": reason})


def user_turns(record: Any) -> list[str] | str:
    """The user turns of a record, or the reason why it cannot be used."""
    if not isinstance(record, dict):
        return "not an object"
    if "turns" in record:
        turns = record["turns"]
    elif "prompt" in record:
        turns = [record["prompt"]]
    elif "messages" in record or "conversations" in record:
        messages = record.get("messages", record.get("conversations"))
        if not isinstance(messages, list):
            return "messages are not a list"
        turns = [
            m.get("content", m.get("value"))
            for m in messages
            if isinstance(m, dict) and m.get("role", m.get("from")) in _USER_ROLES
        ]
    else:
        return "no turns, messages, conversations or prompt"
    if not isinstance(turns, list) or not all(isinstance(t, str) for t in turns):
        return "turns are not strings"
    turns = [t.strip() for t in turns]
    if not turns or not turns[0]:
        return "no user text"
    return turns[: turns.index("")] if "" in turns else turns


def read_prompts(path: str | Path) -> PromptSet:
    """Prompts of a `.json`, `.jsonl` or `.gz` file, or of the ShareGPT file inside a wheel."""
    path = Path(path)
    result = PromptSet()
    text = _read_text(path)
    start = text.lstrip("\ufeff \t\r\n")[:1]
    records = _array_records(text, result) if start == "[" else _line_records(text, result)
    for record in records:
        result.add(record)
    if not result.conversations:
        raise ValueError(f"prompts: {path} holds no usable conversation ({result.summary()})")
    return result


def _read_text(path: Path) -> str:
    if path.suffix in (".whl", ".zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if n.endswith(".json") and "ShareGPT" in n]
                if not names:
                    raise ValueError(f"prompts: {path} holds no ShareGPT*.json file")
                return archive.read(names[0]).decode("utf-8", "replace")
        except zipfile.BadZipFile as error:
            raise ValueError(f"prompts: {path} is not a readable archive ({error})") from None
    data = path.read_bytes()
    return (_unzip(path, data) if path.suffix == ".gz" else data).decode("utf-8", "replace")


def _unzip(path: Path, data: bytes) -> bytes:
    """The file's content, or what of it a truncated file still holds."""
    try:
        return gzip.decompress(data)
    except EOFError:
        return zlib.decompressobj(wbits=31).decompress(data)
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"prompts: {path} is not a readable gzip file ({error})") from None


def _array_records(text: str, result: PromptSet) -> Iterator[Any]:
    """Objects of a JSON array that may stop in the middle of one."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        position = _GAP.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            result.drop("file ends early")
            return
        if text[position] == "]":
            return
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            result.drop("cut off by the end of the file")
            return
        yield record


def _line_records(text: str, result: PromptSet) -> Iterator[Any]:
    # Not splitlines: U+2028 and its like are legal inside a JSON string.
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            result.drop("unreadable line")
