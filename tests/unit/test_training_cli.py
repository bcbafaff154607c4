"""`forespark train`: refusals of what does not fit together, in one line and without a trace."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from forespark.training import assess
from forespark.training.cli import train_app
from forespark.training.recipe import load_recipe
from forespark.training.rows import Row, identity, save_rows
from test_training_inputs import PAIR, recipe_file, run
from typer.testing import CliRunner

FRESH = {"block_size": 4, "num_layers": 1, "aux_layers": [1, 3], "intermediate_size": 64}
SHORT = {
    "steps": 1,
    "batch_size": 2,
    "anchors": 4,
    "curve_points": 0,
    "tensorboard": False,
    "dtype": "float32",
}
ROOT = Path(__file__).parents[2]


def small_recipe(folder: Path, **changed: Any) -> Path:
    """A recipe of one short step on a fresh drafter."""
    sections = {"drafter": FRESH, "train": SHORT, "estimators": {"rank": 8}}
    sections["evaluate"] = {"max_documents": 2, "anchors": 4}
    return recipe_file(folder, **(sections | changed))


def prepared(file: Path) -> None:
    """The prepared set of a recipe, of made-up tokens."""
    recipe = load_recipe(file)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, 2000, (6, 40), generator=generator).tolist()
    rows = [Row(row, [0] * 8 + [1] * 32) for row in ids]
    wanted = identity(recipe.target, recipe.generate.model_dump(), [["made up"]])
    save_rows(recipe.prepared, {"train": rows[:4], "heldout": rows[4:]}, wanted)


def refusal(command: str, file: Path) -> str:
    code, output = run(command, file)
    assert code == 1 and "Traceback" not in output, output
    line = output.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_the_recipes_that_ship_are_valid(name: str) -> None:
    """Catches a key that was renamed or removed while a recipe still sets it."""
    assert load_recipe(ROOT / "training" / "recipes" / f"{name}.yaml").target_name


@pytest.mark.parametrize("command", ["prepare", "run", "evaluate"])
def test_a_missing_recipe_is_refused(tmp_path: Path, command: str) -> None:
    """Catches a command that starts loading models before it looks at its recipe."""
    code, output = run(command, tmp_path / "none.yaml")
    assert code == 2 and "does not exist" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stepz=3", "train.stepz: unknown key"),
        ("target.name=3", "target is a value, not a section"),
        ("train.lr=[1", "'[1' is not a YAML value"),
        ("train", "has no '='"),
        ("drafter.aux_layers=[-1, 2]", "drafter.aux_layers.0: Input should be greater"),
    ],
)
def test_a_wrong_override_is_one_line(tmp_path: Path, override: str, line: str) -> None:
    """Catches a traceback, and a negative layer id that silently counts from the end."""
    arguments = ["run", "--config", str(recipe_file(tmp_path)), "--set", override]
    result = CliRunner().invoke(train_app, arguments)
    assert result.exit_code == 1 and len(result.output.strip().splitlines()) == 1
    assert line in result.output


def test_a_broken_recipe_is_one_line(tmp_path: Path) -> None:
    """Catches the YAML parser's own message, which draws over five lines."""
    (tmp_path / "recipe.yaml").write_text("target: [1,\nworkdir: }")
    code, output = run("run", tmp_path / "recipe.yaml")
    assert code == 1 and len(output.strip().splitlines()) == 1 and "cannot be read" in output


@pytest.mark.parametrize("command", ["run", "evaluate"])
def test_what_is_missing_is_named_with_the_step_that_makes_it(tmp_path: Path, command: str) -> None:
    """Catches a bare errno for a set, a target or a drafter that is not there."""
    assert "forespark train prepare" in refusal(command, small_recipe(tmp_path))
    prepared(small_recipe(tmp_path))
    gone = small_recipe(tmp_path, target=str(tmp_path / "gone"))
    assert "target: " in refusal(command, gone) and "no config.json" in refusal("run", gone)
    line = refusal(command, small_recipe(tmp_path, drafter={"init": str(tmp_path / "gone")}))
    assert line.startswith("error: checkpoint: ") and "no config.json" in line


@pytest.mark.parametrize("command", ["run", "evaluate"])
def test_a_set_of_another_target_or_sampling_is_refused(tmp_path: Path, command: str) -> None:
    """Catches training on answers that another target, or other settings, gave."""
    prepared(small_recipe(tmp_path))
    line = refusal(command, small_recipe(tmp_path, generate__max_new_tokens=9))
    assert "sampling.max_new_tokens = 8, the recipe asks for 9" in line
    other = tmp_path / "target"
    shutil.copytree(PAIR / "target", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert "target_sha256" in refusal(command, small_recipe(tmp_path, target=str(other)))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"aux_layers": [1, 9]}, "[1, 9] do not fit the 6 layers"),
        ({"aux_layers": [3, 3]}, "[3, 3] do not fit the 6 layers"),
        ({"aux_layers": []}, "drafter.aux_layers: empty"),
        ({"mask_token_id": 2048}, "2048 is not among the 2048 tokens"),
    ],
)
def test_a_drafter_that_does_not_fit_its_target_is_refused(
    tmp_path: Path, changed: dict[str, Any], line: str
) -> None:
    """Catches an index error deep inside the model."""
    file = small_recipe(tmp_path, drafter=FRESH | changed)
    prepared(file)
    assert line in refusal("run", file)


def test_another_k_or_a_damaged_state_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    """Catches a changed K that goes on from, or measures, a checkpoint of the old one."""
    file = small_recipe(tmp_path)
    prepared(file)
    assert run("run", file)[0] == 0
    work = tmp_path / "work"
    kept = {p: p.read_bytes() for p in [work / "state.pt", *(work / "checkpoint").glob("*.*")]}
    assert len(kept) >= 4
    file = small_recipe(tmp_path, drafter=FRESH | {"block_size": 5})
    assert "drafter.block_size = 4, the recipe has 5" in refusal("run", file)
    assert "the recipe says 5" in refusal("evaluate", file)
    assert {path: path.read_bytes() for path in kept} == kept
    (work / "state.pt").write_bytes(kept[work / "state.pt"][:1000])
    assert "is not a training state" in refusal("run", small_recipe(tmp_path))


def test_vllm_measures_with_the_checkpoints_k(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches asking vLLM for the default K when the recipe leaves K to its drafter (K = 7)."""
    drafter = {"init": str(PAIR / "drafter"), "freeze": True}
    evaluation = {"max_documents": 2, "anchors": 4, "lengths": [7], "engine_prompts": 1}
    file = small_recipe(tmp_path, drafter=drafter, evaluate=evaluation)
    prepared(file)
    assert run("run", file)[0] == 0
    asked = []
    monkeypatch.setattr(
        assess, "engine_acceptance", lambda _recipe, _rows, k, _say: asked.append(k) or {}
    )
    code, output = run("evaluate", file)
    assert code == 0, output
    assert asked == [7]
