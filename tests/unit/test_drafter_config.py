"""Drafter checkpoints: facts from both config formats, and refusal of foreign ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forespark.drafter_config import (
    DrafterFacts,
    TargetFacts,
    check_drafter,
    drafter_facts,
    read_drafter,
)

DRAFTER = Path(__file__).parents[1] / "assets" / "tiny-pair" / "drafter"
TARGET = TargetFacts(hidden_size=256, vocab_size=2048, num_layers=6)


def plain_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlash2DraftModel"],
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_target_layers": 30,
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [1, 8, 28]},
        **changes,
    }


def test_both_formats_give_the_same_kind_of_facts() -> None:
    """Catches an off-by-one between the formats' layer numbering or block size and K."""
    plain = drafter_facts(plain_config(), "plain")
    assert (plain.max_tokens, plain.default_tokens) == (15, 15)
    assert plain.target_layer_ids == (1, 8, 28)
    tiny = read_drafter(DRAFTER)
    assert (tiny.max_tokens, tiny.default_tokens, tiny.block_size) == (7, 7, 8)
    assert tiny.target_layer_ids == (0, 2, 4)


def test_the_tiny_pair_fits() -> None:
    """Catches a check so strict that a good checkpoint is refused."""
    check_drafter(read_drafter(DRAFTER), TARGET, 7)
    check_drafter(read_drafter(DRAFTER), TARGET, 1)


@pytest.mark.parametrize(
    ("target", "tokens", "words"),
    [
        (TARGET, 8, ["num_speculative_tokens: 8", "7", "1..7"]),
        (TargetFacts(512, 2048, 6), 7, ["hidden size 256", "512"]),
        (TargetFacts(256, 4096, 6), 7, ["vocabulary 2048", "4096"]),
        (TargetFacts(256, 2048, 4), 7, ["target layers [4]", "0..3"]),
    ],
)
def test_foreign_drafter_is_one_line(target: TargetFacts, tokens: int, words: list[str]) -> None:
    """Catches a foreign drafter reaching the weight loader, where the message is a shape error."""
    with pytest.raises(ValueError) as caught:
        check_drafter(read_drafter(DRAFTER), target, tokens)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_stated_target_depth_is_compared() -> None:
    """Catches a drafter of a deeper model that happens to read only shallow layers."""
    facts = drafter_facts(plain_config(), "plain")
    with pytest.raises(ValueError, match="layer count 30.*has 24"):
        check_drafter(facts, TargetFacts(576, 49152, 24), 15)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "not a DFlash2DraftModel drafter"),
        ({"speculators_model_type": "eagle3"}, "'eagle3'"),
        (plain_config(block_size="16"), "block_size '16'"),
        (plain_config(dflash_config={}), "target_layer_ids None"),
        ({"speculators_model_type": "dflash2"}, "transformer_layer_config"),
    ],
)
def test_not_a_drafter_says_what_it_is(config: dict[str, Any], words: str) -> None:
    """Catches a KeyError for a target, another algorithm's drafter, or a cut config.json."""
    with pytest.raises(ValueError, match="^model: ") as caught:
        drafter_facts(config, "somewhere")
    assert words in str(caught.value)


def test_unreadable_folders(tmp_path: Path) -> None:
    """Catches a traceback for a missing folder, a folder without config, and broken JSON."""
    with pytest.raises(ValueError, match="is not a folder"):
        read_drafter(tmp_path / "missing")
    with pytest.raises(ValueError, match="no readable config.json"):
        read_drafter(tmp_path)
    for text in ("{", json.dumps([1])):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="restore the file"):
            read_drafter(tmp_path)


def test_speculators_type_forespark_is_served() -> None:
    """Catches our own training output being refused as a foreign type."""
    config = json.loads((DRAFTER / "config.json").read_text())
    config["speculators_model_type"] = "forespark"
    facts: DrafterFacts = drafter_facts(config, "ours")
    assert facts.max_tokens == 7
