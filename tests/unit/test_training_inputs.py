"""What goes into a training run: prompts, recipes, checkpoints that do not fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from forespark.training import prepare as preparation
from forespark.training.cli import train_app
from forespark.training.folder import load_checkpoint
from forespark.training.history import read_lines
from forespark.training.prompts import read_prompts
from forespark.training.recipe import load_recipe
from forespark.training.rows import Row, identity, load_rows, matches, save_rows
from forespark.training.run import make_model
from typer.testing import CliRunner

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"
SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"Write a function number {i} in Python."}]}
    for i in range(6)
] + [{"conversations": []}, {"conversations": [{"from": "gpt", "value": "hi"}]}]


def recipe_file(folder: Path, **changed: Any) -> Path:
    record: dict[str, Any] = {
        "target": str(PAIR / "target"),
        "target_name": "tiny",
        "workdir": str(folder / "work"),
        "prompts": {"source": str(folder / "prompts.json"), "heldout": 2},
        "generate": {"engine": "hf", "max_new_tokens": 8},
        "train": {"steps": 2},
    }
    for key, value in changed.items():
        section, _, name = key.partition("__")
        if name:
            record.setdefault(section, {})[name] = value
        else:
            record[section] = value
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(record))
    return file


def run(command: str, file: Path) -> tuple[int, str]:
    result = CliRunner().invoke(train_app, [command, "--config", str(file)])
    return result.exit_code, result.output


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers without a model: the prompt's own last tokens."""
    monkeypatch.setattr(
        preparation, "_answer", lambda recipe, prompts, **_: [ids[-6:] for ids in prompts]
    )


@pytest.mark.usefixtures("echo")
def test_a_truncated_dump_is_used_and_every_loss_is_listed(tmp_path: Path) -> None:
    """Catches a cut file that fails as a whole, and conversations that vanish without a line."""
    whole = json.dumps(SHAREGPT)
    cut = whole[: whole.index("number 5") + 3]  # the last conversations are lost
    (tmp_path / "prompts.json").write_text(cut)
    code, output = run("prepare", recipe_file(tmp_path))
    assert code == 0, output
    prepared = tmp_path / "work" / "prepared"
    assert len(load_rows(prepared, "train")) == 3 and len(load_rows(prepared, "heldout")) == 2
    dropped = read_lines(prepared / "dropped.jsonl")
    assert [(row["record"], row["reason"]) for row in dropped] == [
        (5, "unreadable from here to the end of the file")
    ]
    assert "unreadable from here to the end of the file" in output


@pytest.mark.usefixtures("echo")
def test_long_prompts_are_listed(tmp_path: Path) -> None:
    """Catches turns over the limit that are cut instead of dropped, or dropped in silence."""
    rows = [*SHAREGPT, {"conversations": [{"from": "human", "value": "word " * 400}]}]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    code, output = run("prepare", recipe_file(tmp_path, prompts__max_prompt_tokens=64))
    assert code == 0, output
    reasons = [row["reason"] for row in read_lines(tmp_path / "work/prepared/dropped.jsonl")]
    assert reasons.count("prompts over 64 tokens") == 1
    assert len(reasons) == 3  # and the two without a user turn


@pytest.mark.parametrize("content", ["[]", "not json at all", json.dumps(SHAREGPT[6:])])
def test_no_usable_prompt_is_one_line(tmp_path: Path, content: str) -> None:
    """Catches a traceback, or an empty set that only fails while training."""
    (tmp_path / "prompts.json").write_text(content)
    code, output = run("prepare", recipe_file(tmp_path))
    assert code == 1 and "holds no usable conversation" in output
    assert len(output.strip().splitlines()) == 1 and "Traceback" not in output


def test_a_cut_gzip_gives_what_it_holds_and_noise_is_refused(tmp_path: Path) -> None:
    """Catches a truncated download that is lost as a whole, and a traceback on a wrong file."""
    lines = "".join(json.dumps({"prompt": f"Explain item {i} please."}) + "\n" for i in range(500))
    data = gzip.compress(lines.encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(data[: len(data) // 2])
    assert 10 < len(read_prompts(tmp_path / "cut.jsonl.gz").conversations) < 500
    for name in ("noise.jsonl.gz", "noise.whl"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(ValueError, match=r"prompts: .*noise.* is not a readable"):
            read_prompts(tmp_path / name)


@pytest.mark.usefixtures("echo")
def test_a_prepared_set_is_reused_only_when_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches answers of other settings or prompts that are trained on as if they were these,
    and a prepared set that a changed recipe overwrites."""
    (tmp_path / "prompts.json").write_text(json.dumps(SHAREGPT))
    calls = []
    kept = preparation._answer
    monkeypatch.setattr(
        preparation, "_answer", lambda *args, **kwargs: (calls.append(1), kept(*args, **kwargs))[1]
    )
    assert run("prepare", recipe_file(tmp_path))[0] == 0
    assert run("prepare", recipe_file(tmp_path))[0] == 0
    assert len(calls) == 1
    code, output = run("prepare", recipe_file(tmp_path, generate__max_new_tokens=9))
    assert code == 1 and "sampling.max_new_tokens = 8, the recipe asks for 9" in output
    (tmp_path / "prompts.json").write_text(json.dumps(SHAREGPT[1:]))
    assert run("prepare", recipe_file(tmp_path))[0] == 1
    assert len(calls) == 1 and len(load_rows(tmp_path / "work" / "prepared", "train")) == 4


def test_identity_is_read_from_the_set(tmp_path: Path) -> None:
    """Catches a half-written set that counts as prepared."""
    wanted = identity(str(PAIR / "target"), {"temperature": 0.0}, [["a"], ["b"]])
    save_rows(tmp_path / "set", {"train": [Row([1, 2], [0, 1])]}, wanted)
    assert matches(tmp_path / "set", wanted)
    (tmp_path / "set" / "identity.json").unlink()
    assert not matches(tmp_path / "set", wanted)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"train__stepz": 3}, "did you mean 'steps'"),
        ({"train": {"lr": 1e-3}}, "sets neither train.steps nor train.minutes"),
        ({"train__lr": -1}, "train.lr"),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    """Catches a misspelt key that is ignored, and a pydantic dump instead of a line."""
    code, output = run("run", recipe_file(tmp_path, **changed))
    assert code == 1 and line in output and "Traceback" not in output


def test_another_k_than_the_drafters_is_refused(tmp_path: Path) -> None:
    """Catches estimators trained for another K than the drafter they start from."""
    file = recipe_file(tmp_path, drafter={"init": str(PAIR / "drafter"), "block_size": 16})
    with pytest.raises(ValueError, match=r"drafter.block_size: the recipe says 16, .* has 8"):
        make_model(load_recipe(file))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("num_hidden_layers", 4, "do not fit the 4 layers"),
        ("hidden_size", 128, "hidden size 128, the drafter 256"),
        ("vocab_size", 1024, "vocabulary of 1024 tokens, the drafter one of 2048"),
    ],
)
def test_a_target_that_does_not_fit_is_refused(
    tmp_path: Path, key: str, value: int, line: str
) -> None:
    """Catches a foreign target that fails deep inside, or trains on the wrong layers."""
    config = json.loads((PAIR / "target" / "config.json").read_text()) | {key: value}
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=line):
        load_checkpoint(PAIR / "drafter", tmp_path)
