"""Estimators with NaN, or with weights so large that they compute it, stop the engine by name."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import PAIR
from reports_harness import K, generate, greedy, in_engine, once, run_job

pytestmark = pytest.mark.engine


def job(task: dict[str, Any]) -> dict[str, Any]:
    """What an engine says to each kind of broken estimator."""
    return {name: _said(value) for name, value in (("nan", float("nan")), ("huge", 3e38))}


def _serve(llm: Any) -> Any:
    return generate(llm, ["x = 1\n"] * 3, greedy(24))


def _said(value: float) -> str:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        drafter = Path(folder) / "drafter"
        shutil.copytree(PAIR / "drafter", drafter)
        path = drafter / "estimators" / "model.safetensors"
        weights = load_file(path)
        name = next(
            n for n in sorted(weights) if n.startswith("pre_draft") and weights[n].dim() > 1
        )
        weights[name][...] = value
        if value > 0:
            weights[name][::2] = -value  # opposite infinities meet
        save_file(weights, path)
        config = {"drafter": str(drafter), "batchwise_schedule": [[512, K]]}
        try:
            in_engine("batchwise", _serve, config)
        except ValueError as error:
            return str(error)
    return "served"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return once(tmp_path_factory, "broken", lambda: run_job("test_broken_checkpoint:job"))


def test_nan_is_refused_when_the_checkpoint_loads(said: dict[str, str]) -> None:
    """Would catch a server that comes up with weights that are no numbers."""
    assert said["nan"].startswith("model: ") and "\n" not in said["nan"]
    assert "weight estimators/pre_draft." in said["nan"]


def test_numbers_that_break_while_serving_stop_it_by_name(said: dict[str, str]) -> None:
    """Would catch a server that plans with NaN."""
    assert said["huge"].startswith("the pre-draft estimator: ") and "\n" not in said["huge"]
