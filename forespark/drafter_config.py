"""What a drafter checkpoint says about itself, and whether it fits a target.

Reads `config.json` in both formats vLLM serves: speculators (`speculators_model_type`, a nested
`transformer_layer_config`) and plain (`dflash_config`). No weights are opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DFLASH2_ARCHITECTURE = "DFlash2DraftModel"


@dataclass(frozen=True)
class DrafterFacts:
    """Sizes of a drafter, as its config.json states them."""

    where: str  # folder or hub id, for messages
    hidden_size: int  # of the target's hidden states it reads
    vocab_size: int
    block_size: int  # anchor plus drafted tokens of a training block
    max_tokens: int  # K it was trained for
    default_tokens: int  # K when the user gives none
    target_layer_ids: tuple[int, ...]  # 0-based target layers whose outputs it reads
    num_target_layers: int | None  # layers of the target it was trained for, if stated

    def check_tokens(self, num_speculative_tokens: int) -> None:
        """Raise ValueError, one line, when K is more than the drafter was trained for."""
        if num_speculative_tokens > self.max_tokens:
            raise ValueError(
                f"num_speculative_tokens: {num_speculative_tokens} is more than the "
                f"{self.max_tokens} that {self.where} was trained for (block_size "
                f"{self.block_size}); use 1..{self.max_tokens}"
            )


@dataclass(frozen=True)
class TargetFacts:
    """The sizes of a target that a drafter depends on."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def read_drafter(folder: Path) -> DrafterFacts:
    """Facts of a local checkpoint folder; ValueError, one line, when it is not a drafter."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(
            f"model: {folder} is not a folder; give a drafter checkpoint folder or a hub id"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(
            f"model: {folder} has no readable config.json; give a drafter checkpoint folder"
        ) from None
    except ValueError as error:
        raise ValueError(f"model: {path} is not valid JSON ({error}); restore the file") from None
    if not isinstance(config, dict):
        raise ValueError(f"model: {path} holds no keys and values; restore the file")
    return drafter_facts(config, str(folder))


def drafter_facts(config: Mapping[str, Any], where: str) -> DrafterFacts:
    """Facts from the content of a config.json."""
    if "speculators_model_type" in config:
        return _from_speculators(config, where)
    architectures = config.get("architectures") or []
    dflash = config.get("dflash_config")
    if DFLASH2_ARCHITECTURE not in architectures or not isinstance(dflash, Mapping):
        raise ValueError(
            f"model: {where} holds {', '.join(architectures) or 'no architecture'}, not a "
            f"{DFLASH2_ARCHITECTURE} drafter; give the drafter's checkpoint, not the target's"
        )
    block = _integer(config, "block_size", where)
    trained = _trained_tokens(block, dflash)
    return DrafterFacts(
        where=where,
        hidden_size=config.get("target_hidden_size") or _integer(config, "hidden_size", where),
        vocab_size=_integer(config, "vocab_size", where),
        block_size=block,
        max_tokens=trained,
        default_tokens=trained,
        target_layer_ids=_layer_ids(dflash, "target_layer_ids", where, shift=0),
        num_target_layers=config.get("num_target_layers"),
    )


def _from_speculators(config: Mapping[str, Any], where: str) -> DrafterFacts:
    kind = config["speculators_model_type"]
    if kind not in ("dflash2", "forespark"):
        raise ValueError(
            f"model: {where} is a speculators checkpoint of type {kind!r}; "
            "ForeSpark drafts with dflash2 (or forespark) checkpoints"
        )
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"model: {where}/config.json lacks transformer_layer_config; restore the file"
        )
    block = _integer(config, "block_size", where)
    trained = _trained_tokens(block, config)
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return DrafterFacts(
        where=where,
        hidden_size=config.get("target_hidden_size") or _integer(inner, "hidden_size", where),
        vocab_size=_integer(inner, "vocab_size", where),
        block_size=block,
        max_tokens=trained,
        default_tokens=min(proposals[0].get("speculative_tokens") or trained, trained),
        # Speculators counts the embedding output as layer 0.
        target_layer_ids=_layer_ids(config, "aux_hidden_state_layer_ids", where, shift=-1),
        num_target_layers=None,
    )


def _trained_tokens(block: int, config: Mapping[str, Any]) -> int:
    # With sampling from the anchor's row the anchor drafts too.
    return block if config.get("sample_from_anchor") else block - 1


def _integer(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"model: {where}/config.json has {key} {value!r}; it must be an integer >= 1"
        )
    return value


def _layer_ids(config: Mapping[str, Any], key: str, where: str, shift: int) -> tuple[int, ...]:
    value = config.get(key)
    if not isinstance(value, list) or not value or any(type(i) is not int for i in value):
        raise ValueError(
            f"model: {where}/config.json has {key} {value!r}; it must list target layers"
        )
    return tuple(i + shift for i in value)


def check_drafter(drafter: DrafterFacts, target: TargetFacts, num_speculative_tokens: int) -> None:
    """Raise ValueError, one line, when the drafter cannot serve this target at this K."""
    drafter.check_tokens(num_speculative_tokens)
    for name, drafter_has, target_has in (
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("layer count", drafter.num_target_layers or target.num_layers, target.num_layers),
    ):
        if drafter_has != target_has:
            raise ValueError(
                f"model: {drafter.where} was trained for a target with {name} {drafter_has}, this "
                f"target has {target_has}; use a drafter trained for this target"
            )
    outside = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_layers]
    if outside:
        raise ValueError(
            f"model: {drafter.where} reads target layers {outside}, this target has layers "
            f"0..{target.num_layers - 1}; use a drafter trained for this target"
        )
