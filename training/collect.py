"""Compact prompt files from a ShareGPT dump: English user turns, deduplicated and split.

The result is text for a machine without network, kept outside the repository: `train.jsonl.gz` and
`heldout.jsonl.gz`, disjoint by conversation and by normalised text, and free of the prompts of the
evaluation sets given.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path

from forespark.training.prompts import read_prompts

_COMMON = frozenset(
    "the a to of and in is for what how i you me with write on that it this my be can from are as "
    "do give make should or an at by your about please create list explain which why if not have "
    "will use using find get add need want would could there has was were then into".split()
)
_KEY_CHARS = 160
_MIN_CHARS, _MAX_CHARS = 12, 1600
_LATER_MIN_WORDS = 6  # a later turn must stand on its own


def collect(
    source: str | Path,
    folder: str | Path,
    *,
    heldout: int,
    train: int,
    excluded: list[Path],
    seed: int = 0,
) -> Counter[str]:
    """Write both files; return counts of what was kept and dropped, by reason."""
    counts: Counter[str] = Counter()
    prompts = read_prompts(source)
    counts.update(prompts.dropped)
    seen = {
        text_key(turn) for file in excluded for c in read_prompts(file).conversations for turn in c
    }
    order = list(range(len(prompts.conversations)))
    random.Random(seed).shuffle(order)
    kept: list[list[str]] = []
    for index in order:
        turns = []
        for number, turn in enumerate(prompts.conversations[index]):
            reason = refusal(turn, first=number == 0) or _repeated(turn, seen)
            if reason:
                counts[reason] += 1
            else:
                seen.add(text_key(turn))
                turns.append(turn)
        if turns:
            kept.append(turns)
    held = [turns[0] for turns in kept[:heldout]]
    rest = [turn for turns in kept[heldout:] for turn in turns]
    random.Random(seed + 1).shuffle(rest)
    counts["train"], counts["heldout"] = len(rest[:train]), len(held)
    _write(Path(folder) / "heldout.jsonl.gz", held)
    _write(Path(folder) / "train.jsonl.gz", rest[:train])
    return counts


def text_key(text: str) -> str:
    """Normalised beginning of a text, by which near-identical prompts are one."""
    return re.sub(r"\W+", " ", text.lower()).strip()[:_KEY_CHARS]


def refusal(text: str, *, first: bool) -> str | None:
    """Why a turn is no prompt of its own, or None."""
    words = re.findall(r"[a-z']+", text.lower())
    if not _MIN_CHARS <= len(text) <= _MAX_CHARS:
        return "too short or too long"
    if not first and len(words) < _LATER_MIN_WORDS:
        return "later turn leans on the conversation"
    if "<|" in text:
        return "holds chat markup"
    if sum(ch.isascii() for ch in text) < 0.97 * len(text):
        return "not English"
    if len(words) >= 6 and sum(word in _COMMON for word in words) < 0.08 * len(words):
        return "not English"
    return None


def _repeated(text: str, seen: set[str]) -> str | None:
    return "seen before" if text_key(text) in seen else None


def _write(path: Path, turns: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"prompt": t}, ensure_ascii=False) + "\n" for t in turns)
    path.write_bytes(gzip.compress(lines.encode(), compresslevel=9, mtime=0))
