"""The `estimators/` folder beside a drafter: both estimators and their calibration on disk.

A checkpoint folder is a plain DFlash2 drafter (`config.json`, `model.safetensors`), which stock
vLLM serves as it is, plus one subfolder which only ForeSpark reads:

    estimators/config.json        sizes, schema and the hash of the drafter they were trained with
    estimators/model.safetensors  tensors `pre_draft.*` and `post_draft.*`
    estimators/calibration.json   optional: scale and bias per triangle entry, temperature per j

They live in a subfolder because vLLM loads every top-level `*.safetensors` into the drafter.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from forespark.estimators.post_draft import PostDraftEstimator
from forespark.estimators.pre_draft import PreDraftEstimator, triangle_size

SCHEMA = 1
FOLDER = "estimators"
_INT_KEYS = ("num_speculative_tokens", "hidden_size", "embed_size", "rank", "selector_rank")


@dataclass
class Estimators:
    """Both estimators at one K, with calibration where the folder has it."""

    pre_draft: PreDraftEstimator
    post_draft: PostDraftEstimator
    scale: torch.Tensor | None  # a, f32 [K(K+1)/2], or [K] when directional
    bias: torch.Tensor | None  # b, same shape as scale
    temperature: torch.Tensor | None  # theta, f32 [K]
    num_speculative_tokens: int
    directional: bool


def drafter_sha256(folder: str | Path) -> str:
    """Hash of the drafter's weights: all top-level safetensors files of `folder`, in name order."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"estimators: {folder} holds no drafter weights (*.safetensors); "
            "save the drafter first, then its estimators"
        )
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def save_estimators(
    folder: str | Path,
    pre_draft: PreDraftEstimator,
    post_draft: PostDraftEstimator,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write `folder/estimators/` for the drafter already in `folder`; return the subfolder.

    Every file is written under a temporary name and renamed; `config.json` comes last, so an
    interrupted save never leaves a folder that loads with half of its tensors.
    """
    target = Path(folder) / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "schema": SCHEMA,
        "num_speculative_tokens": pre_draft.num_speculative_tokens,
        "hidden_size": pre_draft.context.in_features,
        "embed_size": pre_draft.anchor.in_features,
        "rank": pre_draft.rank,
        "directional": pre_draft.directional,
        "selector_rank": post_draft.selector.out_features,
        "drafter_sha256": drafter_sha256(folder),
    }
    tensors = {
        f"{name}.{key}": value.detach().to("cpu", dtype).contiguous().clone()
        for name, module in (("pre_draft", pre_draft), ("post_draft", post_draft))
        for key, value in module.state_dict().items()
    }
    temporary = target / ".model.safetensors.tmp"
    save_file(tensors, str(temporary), metadata={"format": "pt"})
    temporary.chmod(0o644)
    os.replace(temporary, target / "model.safetensors")
    if scale is not None or bias is not None or temperature is not None:
        save_calibration(folder, scale=scale, bias=bias, temperature=temperature)
    else:
        (target / "calibration.json").unlink(missing_ok=True)
    _write_json(target / "config.json", config)
    return target


def save_calibration(
    folder: str | Path,
    *,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    temperature: torch.Tensor | None,
) -> None:
    """Write `folder/estimators/calibration.json` (triangle entries row-major, as in z)."""
    values = {"scale": scale, "bias": bias, "temperature": temperature}
    record: dict[str, Any] = {"schema": SCHEMA}
    record |= {key: [float(x) for x in v.flatten()] for key, v in values.items() if v is not None}
    _write_json(Path(folder) / FOLDER / "calibration.json", record)


def load_estimators(
    folder: str | Path,
    *,
    num_speculative_tokens: int,
    hidden_size: int,
    embed_size: int,
    selector_rank: int,
) -> Estimators | None:
    """Estimators of a local checkpoint folder for serving at K, or None when it has none.

    Estimators trained for a longer block serve a shorter one: rows d <= K of the triangle come
    first (and the first K outputs of a directional row are its prefix), so the rest is cut off.

    Raises ValueError, one line, when the folder cannot serve: unknown schema, wrong sizes, larger
    K than trained, a damaged file, or another drafter than the one they were trained with.
    """
    root = Path(folder) / FOLDER
    if not root.is_dir():
        return None
    config = _read_config(root / "config.json")
    trained = int(config["num_speculative_tokens"])
    if num_speculative_tokens > trained:
        raise ValueError(
            f"num_speculative_tokens: {num_speculative_tokens} is more than the {trained} the "
            f"estimators in {root} were trained for; use 1..{trained} or retrain at a longer block"
        )
    if num_speculative_tokens < 1:
        raise ValueError(
            f"num_speculative_tokens: {num_speculative_tokens} drafts nothing; use 1..{trained}"
        )
    expected = (
        ("hidden_size", hidden_size, "the drafter's hidden size"),
        ("embed_size", embed_size, "the target's embedding size"),
        ("selector_rank", selector_rank, "the drafter's selector rank"),
    )
    for key, value, meaning in expected:
        if config[key] != value:
            raise ValueError(
                f"{key}: the estimators in {root} have {config[key]}, but {meaning} is {value}; "
                "serve them with the drafter and target they were trained with"
            )
    actual = drafter_sha256(folder)
    if config["drafter_sha256"] != actual:
        raise ValueError(
            f"drafter_sha256: {root}/config.json names {str(config['drafter_sha256'])[:12]}..., "
            f"but the drafter's weights hash to {actual[:12]}...; restore the drafter's files or "
            "train estimators for this drafter"
        )
    return _build(root, config, num_speculative_tokens)


def _build(root: Path, config: Mapping[str, Any], num_speculative_tokens: int) -> Estimators:
    file = root / "model.safetensors"
    try:
        tensors = load_file(str(file))
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file}: cannot be read ({_first_line(error)}); restore the file or retrain"
        ) from None
    directional = bool(config["directional"])
    kept = num_speculative_tokens if directional else triangle_size(num_speculative_tokens)
    pre_draft = PreDraftEstimator(
        config["hidden_size"],
        config["embed_size"],
        num_speculative_tokens,
        rank=config["rank"],
        directional=directional,
    )
    post_draft = PostDraftEstimator(config["hidden_size"], config["selector_rank"])
    for key in ("pre_draft.out.weight", "pre_draft.out.bias"):
        if key in tensors:
            tensors[key] = tensors[key][:kept]
    for name, module in (("pre_draft", pre_draft), ("post_draft", post_draft)):
        prefix = f"{name}."
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise ValueError(
                f"{file}: tensors do not fit {name} ({_first_line(error)}); "
                "restore the file or retrain"
            ) from None
    calibration = _read_calibration(root / "calibration.json", config)
    scale, bias, temperature = (calibration.get(k) for k in ("scale", "bias", "temperature"))
    return Estimators(
        pre_draft=pre_draft,
        post_draft=post_draft,
        scale=None if scale is None else scale[:kept],
        bias=None if bias is None else bias[:kept],
        temperature=None if temperature is None else temperature[:num_speculative_tokens],
        num_speculative_tokens=num_speculative_tokens,
        directional=directional,
    )


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path)
    if config.get("schema") != SCHEMA:
        raise ValueError(
            f"schema: {path} has {config.get('schema')!r}; this version reads schema {SCHEMA}"
        )
    for key in (*_INT_KEYS, "directional", "drafter_sha256"):
        if key not in config:
            raise ValueError(f"{key}: missing in {path}; restore the file or retrain")
    for key in _INT_KEYS:
        if type(config[key]) is not int or config[key] < 1:
            raise ValueError(f"{key}: {path} has {config[key]!r}; it must be an integer >= 1")
    return config


def _read_calibration(path: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if not path.is_file():
        return {}
    record = _read_json(path)
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"schema: {path} has {record.get('schema')!r}; this version reads schema {SCHEMA}"
        )
    block = int(config["num_speculative_tokens"])
    entries = block if config["directional"] else triangle_size(block)
    result = {}
    for key, length in (("scale", entries), ("bias", entries), ("temperature", block)):
        values = record.get(key)
        if values is None:
            continue
        if not _finite_numbers(values) or len(values) != length:
            raise ValueError(
                f"{key}: {path} must hold {length} finite numbers; calibrate this checkpoint again"
            )
        if key == "temperature" and min(values) <= 0:
            raise ValueError(f"temperature: {path} holds {min(values)}; temperatures must be > 0")
        result[key] = torch.tensor(values, dtype=torch.float32)
    return result


def _finite_numbers(values: object) -> bool:
    return isinstance(values, Sequence) and all(
        isinstance(v, int | float) and math.isfinite(v) for v in values
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({_first_line(error)}); restore the file"
        ) from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}: holds {type(record).__name__}, not an object; restore the file")
    return record


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(line.strip() for line in lines[:2]) if lines else type(error).__name__
