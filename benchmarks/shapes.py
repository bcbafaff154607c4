"""Checkpoints of a given shape with random weights: what a step costs, not what it says.

The target gets only its config and a tokenizer (vLLM fills it with `--load-format dummy`). A
DFlash2 drafter must be a real file: its fused key/value buffers are built while weights load.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forespark.estimators.checkpoint import save_estimators
from forespark.estimators.post_draft import PostDraftEstimator
from forespark.estimators.pre_draft import PreDraftEstimator

QWEN3: dict[str, dict[str, int]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}
HEAD_DIM = 128
VOCAB = 151936
DRAFT_LAYERS = 5
TAPS, GROUP, RANK, TOP_K = 4, 64, 256, 8


def target_config(shape: str) -> dict[str, Any]:
    """Qwen3 config of one of the shapes in `QWEN3`."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        **QWEN3[shape],
    }


def drafter_config(shape: str, num_speculative_tokens: int) -> dict[str, Any]:
    """The DFlash2 drafter for that target: 5 layers of the target's width."""
    layers = QWEN3[shape]["num_hidden_layers"]
    step = (layers - 3) // (DRAFT_LAYERS - 1)
    return target_config(shape) | {
        "architectures": ["DFlash2DraftModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": layers,
        "block_size": num_speculative_tokens + 1,
        "dflash_config": {
            "mask_token_id": 3,
            "target_layer_ids": [1 + step * i for i in range(DRAFT_LAYERS)],
            "conv_kernel_size": TAPS,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        },
    }


def drafter_weights(config: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Random bf16 tensors under the names a DFlash2 checkpoint has."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * HEAD_DIM
    keys = config["num_key_value_heads"] * HEAD_DIM
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, std: float = 0.02) -> torch.Tensor:
        values = torch.randn(*size, generator=generator, device=device)
        return (values * std).to(torch.bfloat16).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    aux = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": random(hidden, aux * hidden),
        "hidden_norm.weight": ones(hidden),
        "norm.weight": ones(hidden),
        "candidate_selector.hidden_projection.weight": random(RANK, hidden),
        "candidate_selector.predecessor_codebook": random(VOCAB, RANK),
        "candidate_selector.successor_codebook": random(VOCAB, RANK),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": random(queries, hidden),
            f"{name}self_attn.k_proj.weight": random(keys, hidden),
            f"{name}self_attn.v_proj.weight": random(keys, hidden),
            f"{name}self_attn.o_proj.weight": random(hidden, queries),
            f"{name}self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{name}self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{name}mlp.gate_proj.weight": random(inner, hidden),
            f"{name}mlp.up_proj.weight": random(inner, hidden),
            f"{name}mlp.down_proj.weight": random(hidden, inner),
            f"{name}input_layernorm.weight": ones(hidden),
            f"{name}post_attention_layernorm.weight": ones(hidden),
        }
        for conv in ("attention_conv", "mlp_conv"):
            base = random(2, TAPS, hidden)
            base[:, 0] = 1.0
            tensors[f"{name}{conv}.base_kernel"] = base
            tensors[f"{name}{conv}.kernel_projection.weight"] = random(
                2 * TAPS * hidden // GROUP, hidden, std=0.002
            )
    return tensors


def write_pair(
    folder: Path, shape: str, tokenizer: Path, num_speculative_tokens: int = 15, device: str = "cpu"
) -> tuple[Path, Path]:
    """(target, drafter) folders under `folder`; `tokenizer` is copied beside the target."""
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(parents=True, exist_ok=True)
    drafter.mkdir(parents=True, exist_ok=True)
    for file in tokenizer.glob("*"):
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, target / file.name)
    (target / "config.json").write_text(json.dumps(target_config(shape), indent=1))
    config = drafter_config(shape, num_speculative_tokens)
    (drafter / "config.json").write_text(json.dumps(config, indent=1))
    save_file(drafter_weights(config, device), str(drafter / "model.safetensors"), {"format": "pt"})
    torch.manual_seed(0)
    hidden = config["hidden_size"]
    save_estimators(
        drafter,
        PreDraftEstimator(hidden, hidden, num_speculative_tokens),
        PostDraftEstimator(hidden, RANK),
    )
    return target, drafter
