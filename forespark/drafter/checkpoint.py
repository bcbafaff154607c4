"""The estimators of the drafter that vLLM loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from forespark.config import ForeSparkConfig
from forespark.drafter.estimate import DeviceEstimators
from forespark.estimators.checkpoint import FOLDER, Estimators, load_estimators


def estimators_of(model_config: Any, model: nn.Module, num_tokens: int) -> Estimators | None:
    """Estimators beside the drafter of `model_config`, or None when it ships none.

    A hub id is looked up in the snapshot that vLLM just loaded. Raises ValueError, one line, when
    the estimators do not fit the drafter (see `load_estimators`).
    """
    folder = Path(model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(
                model_config.model,
                revision=model_config.revision,
                allow_patterns=["*.safetensors", f"{FOLDER}/*"],
            )
        )
    drafter: Any = model.model
    return load_estimators(
        folder,
        num_speculative_tokens=num_tokens,
        hidden_size=drafter.config.hidden_size,
        embed_size=drafter.embed_tokens.embedding_dim,
        selector_rank=drafter.candidate_selector.predecessor_codebook.shape[1],
    )


def device_estimators(
    config: ForeSparkConfig,
    model_config: Any,
    model: nn.Module,
    speculator: Any,  # ForeSparkSpeculator: K, dtype and device
) -> DeviceEstimators | None:
    """The drafter's estimators on its device; ValueError when the policy needs them and none are.

    A checkpoint without estimators is a plain drafter: it serves `full` and `batchwise`.
    """
    found = estimators_of(model_config, model, speculator.num_speculative_steps)
    if found is None and config.needs_estimators:
        raise ValueError(
            f"scheduler.policy: {config.scheduler.policy} needs estimators, and "
            f"{model_config.model} has no {FOLDER}/ folder; train them, or use policy full or "
            "batchwise"
        )
    if found is None:
        return None
    single_curve = config.scheduler.policy == "single_curve"
    return DeviceEstimators(found, model, speculator.dtype, speculator.device, single_curve)
