"""The estimators of the drafter that vLLM loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

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
