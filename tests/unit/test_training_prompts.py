"""Prompt files: what is lost is listed under the record it was, and nothing else is lost."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from forespark.training.history import read_lines
from forespark.training.prompts import read_prompts
from test_training_inputs import echo, recipe_file, run

__all__ = ["echo"]  # a fixture


def lines(first: int, last: int) -> bytes:
    rows = [{"prompt": f"Explain item {number} please."} for number in range(first, last)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.usefixtures("echo")
def test_what_is_dropped_is_named_by_its_record_of_the_file(tmp_path: Path) -> None:
    """Catches numbers that count what is left after earlier records were taken out, so that
    `dropped.jsonl` points at conversations that were used."""
    first, second, third = ({"prompt": f"Explain item {name} please."} for name in "abc")
    rows = [first, {"x": 1}, second, first, {"prompt": "word " * 400}, third]
    source = tmp_path / "prompts.json"
    source.write_text(json.dumps(rows))
    file = recipe_file(tmp_path, prompts__heldout=1, prompts__max_prompt_tokens=64)
    code, output = run("prepare", file)
    assert code == 0, output
    dropped = read_lines(tmp_path / "work" / "prepared" / "dropped.jsonl")
    assert {(row["source"], row["record"], row["reason"]) for row in dropped} == {
        (str(source), 1, "no turns, messages, conversations or prompt"),
        (str(source), 3, "also held out"),
        (str(source), 4, "prompts over 64 tokens"),
    }


def test_a_file_of_several_gzip_members_is_read_up_to_the_cut(tmp_path: Path) -> None:
    """Catches reading only the first member, and a cut between two lines that nothing reports."""
    second = gzip.compress(lines(50, 2000))
    path = tmp_path / "two.jsonl.gz"
    path.write_bytes(gzip.compress(lines(0, 50)) + second[: len(second) // 2])
    found = read_prompts(path)
    assert 50 < len(found.conversations) < 2000
    assert found.dropped["compressed file ends early"] == 1
    path.write_bytes(gzip.compress(lines(0, 50))[:-6])  # only the checksum is missing
    assert len(read_prompts(path).conversations) == 50
    assert read_prompts(path).dropped == {"compressed file ends early": 1}


def test_a_damaged_archive_is_one_line(tmp_path: Path) -> None:
    """Catches the error of the decompressor, which is neither ValueError nor OSError."""
    path = tmp_path / "dump.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/ShareGPT.json", json.dumps([{"prompt": "Explain."}] * 99))
    data = bytearray(path.read_bytes())
    data[30 + len("data/ShareGPT.json")] = 0xFF  # behind the header: a block type that is none
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"prompts: .*dump.whl is not a readable archive"):
        read_prompts(path)


def test_a_byte_order_mark_costs_no_record(tmp_path: Path) -> None:
    """Catches a first line that is unreadable because an editor put a mark before it."""
    path = tmp_path / "mark.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines(0, 2))
    assert len(read_prompts(path).conversations) == 2


def test_a_missing_file_names_the_key(tmp_path: Path) -> None:
    """Catches a bare errno that does not say which of the recipe's files it is about."""
    with pytest.raises(ValueError, match=r"prompts: .*none.json cannot be read \(No such file"):
        read_prompts(tmp_path / "none.json")
