"""A small trained pair inside a large architecture: real acceptance at the large model's step cost.

Exact as a function (how: `inflate_parts.py`); in floating point only the order of sums differs. The
drafter's estimators are carried along. Nothing about the text is claimed beyond what the small pair
does.

    python -m forespark.benchmarks.inflate TARGET DRAFTER OUT --filler-token ID
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from forespark.benchmarks.inflate_drafter import inflate_drafter
from forespark.benchmarks.inflate_parts import Inflater, Size, Tensors, layers_of, shape_keys
from safetensors.torch import load_file, save_file

LAYERS_A_SHARD = 4
# Qwen3-14B's weights (14.5e9) and cache a token, as multiples of SmolLM2's 576 and heads of 64.
# Llama configurations want the hidden size to be a multiple of the heads.
LIKE_QWEN3_14B = Size(5184, 17408, 40, 5, 64, 16, 151936, 256)


class _Shards:
    """Writes shards as they come and their index last."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.map, self.bytes = folder, {}, 0

    def write(self, tensors: Tensors) -> None:
        name = f"model-{len(set(self.map.values())) + 1:05d}.safetensors"
        kept = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_file(kept, str(self.folder / name), {"format": "pt"})
        self.map |= dict.fromkeys(kept, name)
        self.bytes += sum(value.numel() * value.element_size() for value in kept.values())

    def close(self) -> None:
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self.map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))


def inflate_target(
    source: Path, out: Path, size: Size, filler_token: int, device: str, dtype: torch.dtype
) -> None:
    """A Llama checkpoint of `size` that computes what the one in `source` computes."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(str(source / "model.safetensors"))
    big = Inflater(config, size, filler_token, device, dtype)
    shards = _Shards(out)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    shards.write(
        {
            "model.embed_tokens.weight": big.vocabulary(big.writes(embedding.T).T),
            "lm_head.weight": big.vocabulary(big.reads(head)),
            "model.norm.weight": big.norm(tensors["model.norm.weight"]),
        }
    )
    layers: list[Tensors | None] = [*layers_of(tensors, "model.layers.")]
    layers += [None] * (size.layers - len(layers))
    for start in range(0, len(layers), LAYERS_A_SHARD):
        shards.write(
            {
                f"model.layers.{start + at}.{name}": tensor
                for at, layer in enumerate(layers[start : start + LAYERS_A_SHARD])
                for name, tensor in big.layer(layer).items()
            }
        )
    shards.close()
    for file in source.glob("*"):
        if "token" in file.name or file.suffix == ".jinja" or "generation" in file.name:
            shutil.copy(file, out / file.name)
    config.pop("layer_types", None)  # all full attention (checked); the large model has more
    config |= shape_keys(size, size.layers) | {"tie_word_embeddings": False}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("out", type=Path, help="gets target/ and drafter/")
    parser.add_argument("--filler-token", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    common = (LIKE_QWEN3_14B, args.filler_token, args.device, torch.bfloat16)
    inflate_target(args.target, args.out / "target", *common)
    inflate_drafter(args.drafter, args.out / "drafter", *common)


if __name__ == "__main__":
    main()
