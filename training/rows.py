"""A prepared set: token rows with loss masks, and the identity of what they were made from.

Rows are a `datasets` folder with speculators' columns (`input_ids`, `loss_mask`, `seq_len`), so
speculators' own tools read them too. `identity.json` names target, sampling and prompts: a set is
reused only when all of it matches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk
from forespark.training.saving import replacing


@dataclass(frozen=True)
class Row:
    """One conversation: prompt and answer tokens, 1 in `loss_mask` on answer tokens."""

    input_ids: list[int]
    loss_mask: list[int]


def identity(
    target: str | Path, sampling: dict[str, Any], prompts: list[list[str]]
) -> dict[str, Any]:
    """What a prepared set depends on; any difference means the answers may differ."""
    text = json.dumps(prompts, ensure_ascii=False).encode()
    return {**origin(target, sampling), "prompts_sha256": hashlib.sha256(text).hexdigest()}


def origin(target: str | Path, sampling: dict[str, Any]) -> dict[str, Any]:
    """The part of `identity` that is known without reading the prompts."""
    folder = Path(target)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"target: {folder} holds no config.json; give the folder of a downloaded model"
        )
    weights = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
        weights.update(file.read_bytes())
    tokenizer = hashlib.sha256()
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        if (folder / name).is_file():
            tokenizer.update((folder / name).read_bytes())
    return {
        "schema": 1,
        "target_sha256": weights.hexdigest(),
        "tokenizer_sha256": tokenizer.hexdigest(),
        **{f"sampling.{key}": value for key, value in sorted(sampling.items())},
    }


def save_rows(
    folder: str | Path,
    splits: dict[str, list[Row]],
    identity_record: dict[str, Any],
    dropped: Sequence[dict[str, Any]] = (),
) -> None:
    """Write all splits beside the final place, then swap, so a kill leaves the old set whole.

    `dropped` (one object a conversation that was left out) goes to `dropped.jsonl`.
    """
    with replacing(Path(folder)) as temporary:
        temporary.mkdir()
        for name, rows in splits.items():
            Dataset.from_dict(
                {
                    "input_ids": [row.input_ids for row in rows],
                    "loss_mask": [row.loss_mask for row in rows],
                    "seq_len": [len(row.input_ids) for row in rows],
                }
            ).save_to_disk(str(temporary / name))
        lines = "".join(json.dumps(record) + "\n" for record in dropped)
        (temporary / "dropped.jsonl").write_text(lines, encoding="utf-8")
        # Last: without it the folder counts as not prepared.
        (temporary / "identity.json").write_text(json.dumps(identity_record, indent=2) + "\n")


def load_rows(folder: str | Path, split: str) -> list[Row]:
    """Rows of one split, in their prepared order."""
    data = load_from_disk(str(Path(folder) / split))
    return [
        Row(list(ids), list(mask))
        for ids, mask in zip(data["input_ids"], data["loss_mask"], strict=True)
    ]


def matches(folder: str | Path, wanted: dict[str, Any]) -> bool:
    """True when `folder` holds exactly the wanted set; ValueError when it holds another one."""
    file = Path(folder) / "identity.json"
    if not file.is_file():
        return False
    found = json.loads(file.read_text())
    _refuse_other(folder, found, wanted, wanted.keys() | found.keys())
    return True


def require(folder: str | Path, target: str | Path, sampling: dict[str, Any]) -> None:
    """ValueError when `folder` holds no set, or one with another target or sampling."""
    file = Path(folder) / "identity.json"
    if not file.is_file():
        raise ValueError(
            f"prepared: {folder} holds no prepared set; run `forespark train prepare` first"
        )
    found, wanted = json.loads(file.read_text()), origin(target, sampling)
    _refuse_other(folder, found, wanted, wanted.keys() & found.keys())


def _refuse_other(
    folder: str | Path, found: dict[str, Any], wanted: dict[str, Any], keys: Iterable[str]
) -> None:
    differing = [key for key in sorted(keys) if wanted.get(key) != found.get(key)]
    if differing:
        key = differing[0]
        raise ValueError(
            f"prepared: {folder} was made with {key} = {found.get(key)!r}, the recipe asks for "
            f"{wanted.get(key)!r} ({len(differing)} differences); prepare into another folder or "
            "remove this one"
        )
