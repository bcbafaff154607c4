"""`forespark train estimators`: a frozen drafter, its estimators trained on the recipe's set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forespark.training.cli import train_app
from forespark.training.frozen import frozen_recipe
from forespark.training.labels import acceptance_of_kept, acceptance_targets, target_summary
from forespark.training.recipe import load_recipe
from forespark.training.run import train
from safetensors.torch import load_file
from test_training_cli import SHORT, prepared, small_recipe
from test_training_inputs import PAIR
from typer.testing import CliRunner


def test_only_the_estimators_change(tmp_path: Path) -> None:
    """Catches a drafter that is written anew, and estimators that no step reached."""
    file = small_recipe(tmp_path, train=SHORT | {"steps": 2, "lr": 1e-2})
    prepared(file)
    recipe = frozen_recipe(load_recipe(file), PAIR / "drafter")
    assert train(recipe, device=torch.device("cpu"), say=lambda _: None)
    for name in ("model.safetensors", "config.json"):
        written = (recipe.checkpoint / name).read_bytes()
        assert written == (PAIR / "drafter" / name).read_bytes()
    (estimators,) = (PAIR / "drafter" / "estimators").glob("*.safetensors")
    before = load_file(str(estimators))
    after = load_file(str(recipe.checkpoint / "estimators" / estimators.name))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key].float(), after[key].float()) for key in before)


def test_the_recipes_prepared_set_is_used(tmp_path: Path) -> None:
    """Catches answers that are generated twice, and state that overwrites the drafter's run."""
    recipe = load_recipe(small_recipe(tmp_path))
    frozen = frozen_recipe(recipe, PAIR / "drafter")
    assert frozen.prepared == recipe.prepared
    assert frozen.state != recipe.state and frozen.checkpoint != recipe.checkpoint


def test_a_folder_without_a_drafter_is_refused(tmp_path: Path) -> None:
    """Catches a traceback, or minutes of preparation before the refusal."""
    file = small_recipe(tmp_path)
    arguments = ["estimators", "--config", str(file), "--drafter", str(tmp_path / "none")]
    result = CliRunner().invoke(train_app, arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: --drafter: ") and "config.json" in result.output


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0])
def test_labels_of_chosen_rows_equal_labels_of_the_whole(temperature: float) -> None:
    """Catches a re-draft labelled with another row's normaliser or another temperature."""
    torch.manual_seed(0)
    targets, rows = 3 * torch.randn(6, 50), torch.tensor([4, 1, 5])
    ids, scores = torch.randint(50, (3, 8)), torch.randn(3, 8)
    whole = acceptance_targets(scores, ids, targets[rows], temperature)
    summary = target_summary(targets, temperature)
    kept = targets[rows[:, None], ids]
    chosen = acceptance_of_kept(scores, ids, kept, summary[rows], temperature)
    torch.testing.assert_close(chosen, whole, rtol=1e-6, atol=1e-7)
