"""Whole training runs on the tiny pair: killed and resumed, and with and without L_pre."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forespark.training.corpus import stdlib_prompts
from forespark.training.history import read_lines
from forespark.training.rows import Row, save_rows
from safetensors.torch import load_file
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "tests" / "assets" / "tiny-pair"
STEPS, SAVED_EVERY = 10, 3


def prepared(folder: Path) -> None:
    """Rows of library text: what the target would answer does not matter for resuming."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    texts = [text for text in stdlib_prompts() if len(text) > 100][:40]
    ids = [tokenizer(text)["input_ids"][:120] for text in texts]
    rows = [Row(row, [0] * 8 + [1] * (len(row) - 8)) for row in ids if len(row) > 24]
    save_rows(folder, {"train": rows[:24], "heldout": rows[24:30]}, {})


def recipe(folder: Path, lambda_pre: float = 1.0) -> Path:
    """A run in `folder` that trains the whole tiny drafter and both estimators."""
    prepared(folder / "prepared")
    record = {
        "target": str(PAIR / "target"),
        "target_name": "tiny",
        "workdir": str(folder),
        "prompts": {"source": "stdlib"},
        "drafter": {"init": str(PAIR / "drafter")},
        "estimators": {"rank": 16, "lambda_pre": lambda_pre},
        "train": {
            "steps": STEPS,
            "batch_size": 4,
            "anchors": 8,
            "checkpoint_steps": SAVED_EVERY,
            "log_steps": 1,
            "curve_points": 0,
            "dtype": "float32",
            "tensorboard": False,
        },
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(record))
    return file


def start(file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "forespark.training.cli", "run", "--config", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> str:
    """What the run said."""
    said, errors = process.communicate(timeout=400)
    assert process.returncode == 0, errors.decode()[-2000:]
    return said.decode()


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(recipe(folder)))
    return folder


def weights(folder: Path, part: str) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "checkpoint" / part))


def state(folder: Path) -> dict[str, Any]:
    """The training state: float32, where a checkpoint's bfloat16 would round a difference away."""
    found: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Bit for bit: both runs do the same sums in the same order on one thread."""
    assert ours.keys() == theirs.keys() and ours
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different[:3]


@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, whole: Path) -> None:
    """Catches optimiser moments, the data order, the cycle of lengths or the schedule starting
    over after a kill, all of it starting over, and a loss curve with a step missing or twice."""
    file = recipe(tmp_path)
    kill_at = random.Random().randrange(SAVED_EVERY + 1, STEPS - 1)
    process = start(file)
    while not any(step >= kill_at for step, _ in losses(tmp_path)):
        assert process.poll() is None, process.stderr.read().decode()[-2000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(losses(tmp_path)) < STEPS, "the run ended before it was killed"
    saved = state(tmp_path)["global_step"]
    assert 0 < saved < STEPS
    assert f"from step {saved} on" in finish(start(file))
    assert losses(tmp_path) == losses(whole), f"killed at step {kill_at}"
    resumed, plain = state(tmp_path), state(whole)
    assert_equal(resumed["model"], plain["model"])
    for number, moments in plain["optimizer"]["state"].items():
        assert_equal(resumed["optimizer"]["state"][number], moments)
    assert [step for step, _ in losses(whole)] == sorted({step for step, _ in losses(whole)})
    for part in ("model.safetensors", "estimators/model.safetensors"):
        assert_equal(weights(tmp_path, part), weights(whole, part))
    steps = json.loads((tmp_path / "checkpoint" / "provenance.json").read_text())["steps"]
    assert steps == STEPS
    first = load_file(str(PAIR / "drafter" / "model.safetensors"))
    trained = weights(tmp_path, "model.safetensors")
    assert any(not torch.equal(first[name], trained[name]) for name in first if name in trained)


@pytest.mark.timeout(600)
def test_the_drafter_is_trained_the_same_with_and_without_the_pre_draft_loss(
    tmp_path: Path, whole: Path
) -> None:
    """Catches L_pre reaching the drafter through the optimiser, the clipping of gradients or the
    random state, which a test of gradients alone does not see."""
    finish(start(recipe(tmp_path, lambda_pre=0.0)))
    ours, plain = (state(run)["model"] for run in (whole, tmp_path))
    pre = {name for name in ours if name.startswith("pre_draft.")}
    assert_equal(*({n: w for n, w in run.items() if n not in pre} for run in (ours, plain)))
    assert any(not torch.equal(ours[name], plain[name]) for name in pre)
    assert_equal(*(weights(run, "model.safetensors") for run in (whole, tmp_path)))
