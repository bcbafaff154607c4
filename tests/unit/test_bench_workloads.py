"""Workloads of the closed loop: formats, what is dropped, and records that are continued."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from forespark.benchmarks.engine import check
from forespark.benchmarks.held import held_record, missing, planned, save
from forespark.benchmarks.workloads import by_category, read_workload, tokenized


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class Characters:
    """A tokenizer: one token a character, no template."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize(
    ("record", "kind", "text"),
    [
        ({"question": "2+2?", "answer": "4"}, "math-code", "2+2?"),
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": "..."}, "math-code", "def f():"),
        ({"text": "Write a sum.", "test_list": []}, "math-code", "Write a sum."),
        ({"category": "coding", "turns": ["sort it"]}, "acceptance", "sort it"),
        ({"prompt": "hello"}, "prompts", "hello"),
        ({"conversations": [{"from": "human", "value": "hi"}]}, "prompts", "hi"),
    ],
)
def test_formats_are_told_apart(tmp_path: Path, record: Any, kind: str, text: str) -> None:
    found = read_workload(write(tmp_path / "x.jsonl", [record]))
    assert (found.name, found.texts) == (kind, [text])


def test_categories_alternate_and_what_lacks_one_is_named(tmp_path: Path) -> None:
    """Catches a short window that sees one category only, and silent drops."""
    records: list[Any] = [{"category": "a", "turns": [f"a{n}"]} for n in range(3)]
    records += [{"category": "b", "turns": ["b0"]}, {"turns": ["lost"]}, "no object"]
    found = read_workload(write(tmp_path / "x.jsonl", records))
    assert found.texts == ["a0", "b0", "a1", "a2"]
    assert found.categories == ["a", "b", "a", "a"]
    assert found.dropped == {"no category": 2}
    assert found.summary() == "acceptance: 4 prompts (3 a, 1 b); dropped: 2 no category"


def test_files_without_a_usable_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"--prompts: .* has no usable prompt"):
        read_workload(write(tmp_path / "x.jsonl", [{"answer": 1}]))


def test_long_prompts_are_counted_and_all_of_them_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"prompt": "short"}, {"prompt": "much longer"}])
    workload = read_workload(file)
    assert len(tokenized(workload, Characters(), 5, file).ids) == 1
    assert workload.dropped == {"longer than 5 tokens": 1}
    with pytest.raises(ValueError, match=r"no prompt of at most 2 tokens \(--longest-prompt\)"):
        tokenized(read_workload(file), Characters(), 2, file)


def test_acceptance_of_categories() -> None:
    seen = [("b", 4, 1), ("a", 1, 1), ("a", 2, 1), (None, 9, 1)]
    assert by_category(seen) == {
        "a": {"request_steps": 2, "acceptance_length": 1.5},
        "b": {"request_steps": 1, "acceptance_length": 4.0},
    }


def arguments(**changed: Any) -> argparse.Namespace:
    held = {"method": "forespark", "policies": ["joint", "batchwise:2"], "loads": [1, 8]}
    held |= {"drafter": "d", "max_num_seqs": 8, "repeats": 2, "max_tokens": 4}
    return argparse.Namespace(**(held | {"temperature": 0.0, "seconds": 1.0} | changed))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"loads": [1, 9]}, r"--loads: \[9\] must be 1..8 \(--max-num-seqs\)"),
        ({"policies": ["joint:3"]}, "--policies: 'joint:3' is unknown"),
        ({"drafter": None}, "--drafter: --method forespark needs one"),
        ({"latency": Path("none.json")}, "--latency: none.json is no file"),
        ({"repeats": 0}, "--repeats: 0 must be at least 1"),
        ({"temperature": -1.0}, "--temperature: -1.0 must be at least 0"),
    ],
)
def test_what_cannot_run_is_refused_before_an_engine_starts(
    changed: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        check(arguments(**changed))


def test_only_runs_that_the_file_lacks_are_run(tmp_path: Path) -> None:
    """Catches a finished run that is overwritten and a repeat that is skipped."""
    out = tmp_path / "run.json"
    new = {"tokens": 7, "provenance": {"commit": "c"}, "runs": []}
    record = held_record(out, new)
    plan = planned(arguments())
    assert len(plan) == 8 and missing(record, plan) == plan
    record["runs"].append({"policy": "joint", "repeat": 0, "load": 8, "output_throughput": 1.0})
    save(record, out)
    held = held_record(out, {**new, "runs": []})
    assert held["runs"] == record["runs"]
    assert missing(held, plan) == [key for key in plan if key != (0, "joint", 8)]
    with pytest.raises(ValueError, match="holds runs of another commit; rename it"):
        held_record(out, {**new, "provenance": {"commit": "other"}})
    out.write_text('{"runs": [')
    with pytest.raises(ValueError, match=r"cannot be continued .*; rename it"):
        held_record(out, new)


def test_a_figure_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        save({"runs": [{"output_throughput": float("nan")}]}, out)
    assert not out.exists()
