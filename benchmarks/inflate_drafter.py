"""The DFlash2 drafter and its estimators for an inflated target (`inflate.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from forespark.benchmarks.inflate_parts import Inflater, Size, Tensors, layers_of, shape_keys
from safetensors.torch import load_file, save_file

from forespark.estimators.checkpoint import save_estimators
from forespark.estimators.post_draft import PostDraftEstimator
from forespark.estimators.pre_draft import PreDraftEstimator


def inflate_drafter(
    source: Path, out: Path, size: Size, filler_token: int, device: str, dtype: torch.dtype
) -> None:
    """The DFlash2 drafter and its estimators for the target that `inflate_target` writes."""
    given = json.loads((source / "config.json").read_text())
    small = given["transformer_layer_config"]
    tensors = load_file(str(source / "model.safetensors"))
    big = Inflater(small, size, filler_token, device, dtype)
    taps, group = given["conv_kernel_size"], given["conv_group_size"]
    h, extra = small["hidden_size"], size.selector_rank - given["selector_rank"]

    def ranked(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] = extra
        return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)

    fc = torch.cat([big.reads(block) for block in tensors["fc.weight"].split(h, dim=1)], dim=1)
    written = {
        "fc.weight": fc.repeat(big.copies, 1),
        "hidden_norm.weight": big.norm(tensors["hidden_norm.weight"]),
        "norm.weight": big.norm(tensors["norm.weight"]),
        "candidate_selector.hidden_projection.weight": ranked(
            big.reads(tensors["candidate_selector.hidden_projection.weight"]), 0
        ),
    }
    for table in ("predecessor_codebook", "successor_codebook"):
        name = f"candidate_selector.{table}"
        written[name] = ranked(big.vocabulary(big.take(tensors[name])), 1)
    layers: list[Tensors | None] = [*layers_of(tensors, "layers.")]
    layers += [None] * (size.draft_layers - len(layers))
    for index, layer in enumerate(layers):
        for name, tensor in big.draft_layer(layer, taps, group).items():
            written[f"layers.{index}.{name}"] = tensor
    out.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.cpu().contiguous() for name, tensor in written.items()}
    save_file(kept, str(out / "model.safetensors"), {"format": "pt"})
    mask = source / "mask_embedding.pt"
    if mask.exists():
        torch.save(_widened(torch.load(mask, weights_only=True), big), out / "mask_embedding.pt")
    keys = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "head_dim",
            "attention_bias", "bos_token_id", "eos_token_id")  # fmt: skip
    config = {
        **{key: small[key] for key in keys},
        **shape_keys(size, size.draft_layers),
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": False,
        "num_target_layers": size.layers,
        "block_size": given["block_size"],
        "dflash_config": {
            "mask_token_id": given["mask_token_id"],
            "target_layer_ids": [i - 1 for i in given["aux_hidden_state_layer_ids"]],
            "conv_kernel_size": taps,
            "conv_group_size": group,
            "selector_rank": size.selector_rank,
            "selector_top_k": given["selector_top_k"],
        },
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    _estimators(source, out, big, ranked)


def _widened(saved: dict[str, Any], big: Inflater) -> dict[str, Any]:
    """The record of the mask embedding with its vector in every copy."""
    return saved | {"embedding": saved["embedding"].repeat(big.copies)}


def _estimators(source: Path, out: Path, big: Inflater, ranked: Any) -> None:
    tensors = load_file(str(source / "estimators" / "model.safetensors"))
    facts = json.loads((source / "estimators" / "config.json").read_text())
    hidden, rank = big.size.hidden, big.size.selector_rank
    pre = PreDraftEstimator(
        hidden, hidden, facts["num_speculative_tokens"], facts["rank"], facts["directional"]
    )
    post = PostDraftEstimator(hidden, rank)
    given = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith("pre")}
    for name in ("context.weight", "anchor.weight"):
        given[name] = big.reads(given[name])
    pre.load_state_dict(given)
    head = tensors["post_draft.head.weight"]
    h = big.small["hidden_size"]
    post.load_state_dict(
        {
            "selector.weight": ranked(big.reads(tensors["post_draft.selector.weight"]), 0),
            "head.weight": torch.cat([big.reads(head[:, :h]), ranked(big.take(head[:, h:]), 1)], 1),
            "head.bias": tensors["post_draft.head.bias"],
        }
    )
    save_estimators(out, pre, post, dtype=head.dtype)
    calibration = source / "estimators" / "calibration.json"
    if calibration.exists():
        shutil.copy(calibration, out / "estimators" / calibration.name)
