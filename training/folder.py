"""Checkpoint folders: a plain DFlash2 drafter on top, both estimators in `estimators/`.

`load_checkpoint` reads what `save_checkpoint` wrote and gives the full `forespark` model back; it
also reads drafters without estimators, in speculators' format or in vLLM's own (`dflash_config`),
to start from ("warm start") or to train estimators for.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from forespark.training.model import ForeSparkDraftModel
from forespark.training.model_config import ForeSparkSpeculatorConfig
from loguru import logger as speculators_logger
from safetensors.torch import load_file, save_file
from speculators.models.utils import get_verifier_config
from transformers import Qwen3Config

from forespark.estimators.checkpoint import FOLDER, load_estimators, save_estimators

_VERIFIER_WEIGHTS = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
_NOT_IN_DRAFTER = (*_VERIFIER_WEIGHTS, "pre_draft.", "post_draft.")
_MASK_FILE = "mask_embedding.pt"

speculators_logger.disable("speculators")


def build_model(
    target: str | Path,
    *,
    block_size: int,
    num_layers: int,
    aux_layers: list[int],
    mask_token_id: int,
    intermediate_size: int | None = None,
    conv_kernel_size: int = 2,
    conv_group_size: int = 16,
    selector_rank: int = 64,
    selector_top_k: int = 8,
    rank: int = 256,
    directional: bool = False,
    train_mask_embedding: bool = False,
) -> ForeSparkDraftModel:
    """A fresh model for `target`, sized like it except for the number of layers."""
    verifier = get_verifier_config(str(target))
    if not aux_layers:
        raise ValueError(
            "drafter.aux_layers: empty; name the target layers whose inputs the drafter reads, "
            f"ids 0..{verifier.num_hidden_layers}, or set drafter.init"
        )
    kind = "sliding_attention" if directional else "full_attention"
    heads = verifier.num_attention_heads
    layer = Qwen3Config(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=intermediate_size or verifier.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=verifier.num_key_value_heads,
        head_dim=getattr(verifier, "head_dim", None) or verifier.hidden_size // heads,
        max_position_embeddings=verifier.max_position_embeddings,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_parameters=dict(verifier.rope_parameters),
        layer_types=[kind] * num_layers,
        use_sliding_window=directional,
        sliding_window=verifier.max_position_embeddings if directional else None,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    record = {
        "transformer_layer_config": layer,
        "draft_vocab_size": verifier.vocab_size,
        "block_size": block_size,
        "aux_hidden_state_layer_ids": aux_layers,
        "mask_token_id": mask_token_id,
        "sliding_window_non_causal": not directional,
        "conv_kernel_size": conv_kernel_size,
        "conv_group_size": conv_group_size,
        "selector_rank": selector_rank,
        "selector_top_k": selector_top_k,
    }
    return _from_record(record, target, rank, directional, train_mask_embedding)


def load_checkpoint(
    folder: str | Path,
    target: str | Path,
    *,
    rank: int = 256,
    train_mask_embedding: bool | None = None,
) -> ForeSparkDraftModel:
    """The full model of a checkpoint folder; fresh estimators (of `rank`) where it has none."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"checkpoint: {folder} holds no config.json; give a drafter's folder, or train one "
            "(`forespark train run`)"
        )
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "dflash_config" in record:
        record = _from_vllm_config(record)
    elif record.get("speculators_model_type") not in ("dflash2", "forespark"):
        raise ValueError(
            f"speculators_model_type: {folder} holds "
            f"{record.get('speculators_model_type')!r}; ForeSpark trains dflash2 drafters"
        )
    mask_file = folder / _MASK_FILE
    learned_mask = mask_file.is_file() if train_mask_embedding is None else train_mask_embedding
    directional = not record["sliding_window_non_causal"]
    trained = folder / FOLDER / "config.json"
    if trained.is_file():
        rank = json.loads(trained.read_text(encoding="utf-8"))["rank"]
    model = _from_record(record, target, rank, directional, learned_mask)
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(str(file))
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if key in _drafter_state(model)]
    if missing or unexpected:
        raise ValueError(
            f"{folder}: weights do not fit its config.json (missing {missing[:2]}, "
            f"unexpected {unexpected[:2]}); restore the folder"
        )
    if learned_mask:
        _load_mask_embedding(model, mask_file)
    estimators = load_estimators(
        folder,
        num_speculative_tokens=model.config.num_speculative_tokens,
        hidden_size=model.hidden_size,
        embed_size=model.embed_tokens.embedding_dim,
        selector_rank=model.config.selector_rank,
    )
    if estimators is not None:
        model.pre_draft.load_state_dict(estimators.pre_draft.state_dict())
        model.post_draft.load_state_dict(estimators.post_draft.state_dict())
    return model


def save_checkpoint(
    model: ForeSparkDraftModel,
    folder: str | Path,
    *,
    verifier_name: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the served folder; each file under a temporary name, then renamed.

    `verifier_name` is what config.json calls the target (a hub id or a relative path), since the
    path it was trained from means nothing elsewhere.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = model.config.drafter_dict()
    record["dtype"] = str(dtype).removeprefix("torch.")
    record["speculators_config"]["verifier"]["name_or_path"] = verifier_name
    state = {
        key: value.detach().to("cpu", dtype).contiguous().clone()
        for key, value in _drafter_state(model).items()
    }
    temporary = folder / ".model.safetensors.tmp"
    save_file(state, str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, folder / "model.safetensors")
    if model.config.train_mask_embedding:
        embedding = model.mask_embedding.detach().to("cpu", dtype).clone()
        content = {"mask_token_id": model.mask_token_id, "embedding": embedding}
        torch.save(content, folder / f".{_MASK_FILE}.tmp")
        os.replace(folder / f".{_MASK_FILE}.tmp", folder / _MASK_FILE)
    text = json.dumps(record, indent=2, default=str) + "\n"
    (folder / ".config.json.tmp").write_text(text, encoding="utf-8")
    os.replace(folder / ".config.json.tmp", folder / "config.json")
    save_estimators(folder, model.pre_draft, model.post_draft, dtype=dtype)


def save_beside(model: ForeSparkDraftModel, drafter: str | Path, folder: str | Path) -> None:
    """Write the estimators of a frozen drafter beside its own, unchanged files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(Path(drafter).iterdir()):
        if file.is_file():
            shutil.copy(file, folder / file.name)
    save_estimators(folder, model.pre_draft, model.post_draft, dtype=torch.float32)


def fold_features(model: ForeSparkDraftModel, scale: torch.Tensor) -> None:
    """Set the features' per-channel factor, changing fc so that the drafter stays the same."""
    with torch.no_grad():
        model.fc.weight.mul_((model.feature_scale / scale).to(model.fc.weight))
        model.feature_scale.copy_(scale)


def _drafter_state(model: ForeSparkDraftModel) -> dict[str, torch.Tensor]:
    state = {
        key: value
        for key, value in model.state_dict().items()
        if not key.startswith(_NOT_IN_DRAFTER) and key not in ("mask_embedding", "feature_scale")
    }
    state["fc.weight"] = state["fc.weight"] * model.feature_scale.to(state["fc.weight"])
    return state


def _from_record(
    record: dict[str, Any],
    target: str | Path,
    rank: int,
    directional: bool,
    train_mask_embedding: bool,
) -> ForeSparkDraftModel:
    verifier = get_verifier_config(str(target))
    vocabulary = record["draft_vocab_size"]
    if verifier.vocab_size != vocabulary:
        raise ValueError(
            f"target: {target} has a vocabulary of {verifier.vocab_size} tokens, the drafter one "
            f"of {vocabulary}; use the target the drafter was made for"
        )
    _check_layers(record, target, verifier)
    record = {k: v for k, v in record.items() if k not in ("speculators_model_type", "dtype")}
    record["speculators_config"] = {
        "algorithm": "dflash2",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": record["block_size"] - 1}
        ],
        "verifier": {
            "name_or_path": str(target),
            "architectures": list(verifier.architectures or []),
        },
    }
    config = ForeSparkSpeculatorConfig(
        **record,
        estimator_rank=rank,
        directional=directional,
        train_mask_embedding=train_mask_embedding,
    )
    model = ForeSparkDraftModel(config)
    model.load_verifier_weights()
    with torch.no_grad():
        model.mask_embedding.copy_(model.embed_tokens.weight[model.mask_token_id])
    return model.float()


def _check_layers(record: dict[str, Any], target: str | Path, verifier: Any) -> None:
    aux, layers = record["aux_hidden_state_layer_ids"], verifier.num_hidden_layers
    if max(aux) > layers or min(aux) < 0 or len(set(aux)) < len(aux):
        raise ValueError(
            f"aux_layers: {aux} do not fit the {layers} layers of {target}; use different ids "
            f"0..{layers}, or the target the drafter was made for"
        )
    if not 0 <= record["mask_token_id"] < verifier.vocab_size:
        raise ValueError(
            f"mask_token_id: {record['mask_token_id']} is not among the {verifier.vocab_size} "
            f"tokens of {target}; use an id it never writes"
        )
    layer = record["transformer_layer_config"]
    hidden = layer["hidden_size"] if isinstance(layer, dict) else layer.hidden_size
    if hidden != verifier.hidden_size:
        raise ValueError(
            f"target: {target} has hidden size {verifier.hidden_size}, the drafter {hidden}; "
            "use the target the drafter was made for"
        )


def _from_vllm_config(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of a speculators config from vLLM's own drafter config (layer ids there are - 1)."""
    draft = record["dflash_config"]
    layer = {k: v for k, v in record.items() if k not in ("dflash_config", "architectures")}
    layer.setdefault("layer_types", ["full_attention"] * record["num_hidden_layers"])
    return {
        "transformer_layer_config": Qwen3Config(**layer),
        "draft_vocab_size": record["vocab_size"],
        "block_size": record["block_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in draft["target_layer_ids"]],
        "mask_token_id": draft["mask_token_id"],
        "sliding_window_non_causal": not draft.get("causal", False),
        **{
            key: draft[key]
            for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        },
    }


def _load_mask_embedding(model: ForeSparkDraftModel, file: Path) -> None:
    if not file.is_file():
        return
    record = torch.load(file, weights_only=True)
    with torch.no_grad():
        model.mask_embedding.copy_(record["embedding"].reshape(-1))
