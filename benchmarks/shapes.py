"""Checkpoints of a given shape with random weights: what a step costs, not what it says.

The target gets only its config and a tokenizer (vLLM fills it with `--load-format dummy`). A
DFlash2 drafter must be a real file: its fused key/value buffers are built while weights load.
"""

from __future__ import annotations

import argparse
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


# Gated DeltaNet and attention 3 : 1, experts in every layer; the text part of the model.
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3.6-35b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248320,
    },
    "hybrid-tiny": {  # to try the tools on a CPU
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "vocab_size": 2048,
    },
}


def target_config(shape: str) -> dict[str, Any]:
    """Config of one of the shapes in `QWEN3` or `HYBRID`."""
    if shape in HYBRID:
        layers = HYBRID[shape]["num_hidden_layers"]
        return _common() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
            "linear_conv_kernel_dim": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.25,
            **HYBRID[shape],
        }
    return _common() | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **QWEN3[shape],
    }


def _common() -> dict[str, Any]:
    return {
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
    }


def drafter_config(shape: str, num_speculative_tokens: int) -> dict[str, Any]:
    """The DFlash2 drafter for that target: 5 layers of the target's width."""
    target = {**QWEN3, **HYBRID}[shape]
    layers = target["num_hidden_layers"]
    step = (layers - 3) // (DRAFT_LAYERS - 1)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size")  # fmt: skip
    return (
        _common()
        | {name: target[name] for name in names if name in target}
        | {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
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
    )


def drafter_weights(config: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Random bf16 tensors under the names a DFlash2 checkpoint has."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head, vocab = config["head_dim"], config["vocab_size"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
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
        "candidate_selector.predecessor_codebook": random(vocab, RANK),
        "candidate_selector.successor_codebook": random(vocab, RANK),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}."
        tensors |= {
            f"{name}self_attn.q_proj.weight": random(queries, hidden),
            f"{name}self_attn.k_proj.weight": random(keys, hidden),
            f"{name}self_attn.v_proj.weight": random(keys, hidden),
            f"{name}self_attn.o_proj.weight": random(hidden, queries),
            f"{name}self_attn.q_norm.weight": ones(head),
            f"{name}self_attn.k_norm.weight": ones(head),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="gets `target` and `drafter`")
    parser.add_argument("--shape", choices=sorted({**QWEN3, **HYBRID}), required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder with one")
    parser.add_argument("--tokens", type=int, default=15, help="K")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for path in write_pair(args.folder, args.shape, args.tokenizer, args.tokens, device):
        print(path)


if __name__ == "__main__":
    main()
