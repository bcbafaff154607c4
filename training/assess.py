"""The evaluation stage of a recipe: estimators offline, acceptance by vLLM, JSON and PNG."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forespark.training.evaluate import evaluate
from forespark.training.folder import load_checkpoint
from forespark.training.history import read_lines
from forespark.training.picture import draw
from forespark.training.provenance import device_name, versions
from forespark.training.recipe import Recipe
from forespark.training.rows import Row, load_rows, require
from forespark.training.run import check_block_size, default_device
from forespark.training.target import Target

Say = Callable[[str], None]


def assess(recipe: Recipe, *, device: torch.device | None = None, say: Say = print) -> Path:
    """Write `workdir/evaluation.json` and `.png` for the recipe's checkpoint."""
    device = device or default_device()
    require(recipe.prepared, recipe.target, recipe.generate.model_dump())
    rows = load_rows(recipe.prepared, "heldout")
    model = load_checkpoint(recipe.checkpoint, recipe.target)
    check_block_size(recipe, model, recipe.checkpoint)
    target = Target(recipe.target, model.target_layer_ids, device)
    result, steps = evaluate(model, target, rows, recipe.evaluate, say)
    provenance = json.loads((recipe.checkpoint / "provenance.json").read_text())
    drafter = provenance["parameters"]["drafter"]
    extra = provenance["parameters"]["pre_draft"] + provenance["parameters"]["post_draft"]
    result |= {
        "checkpoint": recipe.target_name,
        "extra_parameters": {"count": extra, "share_of_drafter": extra / drafter},
        "train_time_ratio": train_time_ratio(recipe),
        "curve": read_lines(Path(recipe.workdir) / "curve.jsonl"),
    }
    del model, target
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if recipe.evaluate.engine_prompts:
        asked = rows[: recipe.evaluate.engine_prompts]
        result["vllm"] = engine_acceptance(recipe, asked, result["num_speculative_tokens"], say)
    result["provenance"] = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "training": provenance,
        "versions": versions(),
        "device": device_name(device),
    }
    path = Path(recipe.workdir) / "evaluation.json"
    temporary = path.with_name(".evaluation.json.tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    draw(result, steps, result["curve"], path.with_suffix(".png"))
    say(summary(result))
    return path


def engine_acceptance(
    recipe: Recipe, rows: list[Row], num_speculative_tokens: int, say: Say
) -> dict[str, Any]:
    """vLLM's acceptance of the checkpoint on greedy prompts, and the target alone beside it."""
    prompts = [row.input_ids[: row.loss_mask.index(1)] for row in rows]
    folder = Path(recipe.workdir)
    replies: dict[str, dict[str, Any]] = {}
    for name in ("drafted", "alone"):
        request, reply = folder / "measure-request.pt", folder / f"measure-{name}.pt"
        reply.unlink(missing_ok=True)
        torch.save(
            {
                "model": recipe.target,
                "drafter": str(recipe.checkpoint) if name == "drafted" else None,
                "num_speculative_tokens": num_speculative_tokens,
                "prompts": prompts,
                "max_tokens": recipe.evaluate.engine_max_tokens,
                "max_num_seqs": recipe.evaluate.engine_num_seqs,
            },
            request,
        )
        command = [sys.executable, "-m", "forespark.training.engine", "measure"]
        code = subprocess.run([*command, str(request), str(reply)], check=False).returncode
        if code or not reply.is_file():
            say(f"evaluate: the vLLM process ({name}) ended with status {code}; left out")
            return {"error": f"{name}: status {code}"}
        replies[name] = torch.load(reply, weights_only=True)
    drafted, alone = replies["drafted"], replies["alone"]
    same = [a == b for a, b in zip(drafted.pop("tokens"), alone.pop("tokens"), strict=True)]
    return {
        "prompts": len(prompts),
        "identical_texts": sum(same),
        "speedup": drafted["tokens_per_second"] / alone["tokens_per_second"],
        "target_tokens_per_second": alone["tokens_per_second"],
        **drafted,
    }


def train_time_ratio(recipe: Recipe) -> float | None:
    """Seconds a step with both estimators over seconds without, from `run`'s own timing."""
    timing = Path(recipe.workdir) / "timing.json"
    return json.loads(timing.read_text())["ratio"] if timing.is_file() else None


def summary(result: dict[str, Any]) -> str:
    """The evaluation in one line."""
    pre, vllm = result["pre_draft"], result.get("vllm", {})
    parts = [f"acceptance length {result['acceptance_length']:.3f} (walk)"]
    if "acceptance_length" in vllm:
        parts.append(f"{vllm['acceptance_length']:.3f} (vLLM, {vllm['prompts']} prompts)")
    if "mae" in pre:
        parts.append(
            f"pre-draft MAE {pre['mae']:.3f}, previous step {pre['previous_step']['mae']:.3f}, "
            f"mean {pre['position_mean']['mae']:.3f}; within one {pre['within_one']:.3f} against "
            f"{pre['previous_step']['within_one']:.3f}"
        )
    return "; ".join(parts)
