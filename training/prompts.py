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
    records: list[int] = field(default_factory=list)  # of each conversation, from 0 in the file
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
            self.records.append(self.read)
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


@dataclass(frozen=True)
class Conversation:
    """User turns, and where they come from: record `record` (from 0) of `source`."""

    source: str
    record: int
    turns: list[str]


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
    result = PromptSet()
    for record in read_records(path, result):
        result.add(record)
    if not result.conversations:
        raise ValueError(f"prompts: {path} holds no usable conversation ({result.summary()})")
    return result


def read_records(path: str | Path, damage: PromptSet) -> Iterator[Any]:
    """Records of such a file as they are; what cannot be read is dropped into `damage`."""
    path = Path(path)
    try:
        text, complete = _read_text(path)
    except OSError as error:
        raise ValueError(
            f"prompts: {path} cannot be read ({error.strerror}); give a ShareGPT JSON, JSONL, .gz "
            "or .whl file"
        ) from None
    yield from (_array_records if text.lstrip()[:1] == "[" else _line_records)(text, damage)
    if not complete:
        damage.drop("compressed file ends early")


def _read_text(path: Path) -> tuple[str, bool]:
    """The file's text without a byte order mark, and False when a compressed file was cut."""
    if path.suffix in (".whl", ".zip"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if n.endswith(".json") and "ShareGPT" in n]
                if not names:
                    raise ValueError(f"prompts: {path} holds no ShareGPT*.json file")
                return archive.read(names[0]).decode("utf-8-sig", "replace"), True
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"prompts: {path} is not a readable archive ({error})") from None
    data = path.read_bytes()
    complete = True
    if path.suffix == ".gz":
        data, complete = _unzip(path, data)
    return data.decode("utf-8-sig", "replace"), complete


def _unzip(path: Path, data: bytes) -> tuple[bytes, bool]:
    """The file's content and True, or what a truncated file still holds and False."""
    try:
        try:
            return gzip.decompress(data), True
        except EOFError:
            parts = []
            while data:  # a file may consist of several compressed ones
                member = zlib.decompressobj(wbits=31)
                parts.append(member.decompress(data))
                data = member.unused_data
            return b"".join(parts), False
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
        except (json.JSONDecodeError, RecursionError):
            # A cut and damage look alike; behind either no record's beginning can be told
            result.drop("unreadable from here to the end of the file")
            return
        yield record


def _line_records(text: str, result: PromptSet) -> Iterator[Any]:
    # Not splitlines: U+2028 and its like are legal inside a JSON string.
    for line in text.split("\n"):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            result.drop("unreadable line")
