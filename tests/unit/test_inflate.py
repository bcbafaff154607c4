"""An inflated pair computes what the small pair computes: target, drafter and estimators."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forespark.benchmarks.inflate import inflate_target
from forespark.benchmarks.inflate_drafter import inflate_drafter
from forespark.benchmarks.inflate_parts import Inflater, Size
from forespark.training.folder import load_checkpoint
from forespark.training.target import Target
from transformers import AutoTokenizer

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"
# Three copies, wider head groups, more layers, a larger vocabulary and selector.
SIZE = Size(768, 1024, 8, 4, 18, 6, 3000, 96)
K = 7
FILLER = 0  # the padding token: never in a text
TOLERANCE = 1e-4  # float32 sums in another order, with random terms that cancel; 3e-5 was seen


class Side:
    """One pair in float32, with everything a draft needs."""

    def __init__(self, pair: Path) -> None:
        self.model = load_checkpoint(pair / "drafter", pair / "target").eval()
        ids = self.model.target_layer_ids
        self.target = Target(pair / "target", ids, torch.device("cpu"), dtype=torch.float32)

    @torch.no_grad()
    def run(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The target's logits for `ids` [1, T], and full drafts behind every eighth token.

        `margin` [m, K]: how far each drafted token was from being another one.
        """
        model = self.model
        context = model.context(self.target.features(ids)[0])
        anchors = torch.arange(15, ids.shape[1], 8)[None]
        hidden = model.draft_hidden(context, ids.gather(1, anchors), anchors, K)[0, :, 1:]
        previous, drafts, post, margin = ids[0, anchors[0]], [], [], []
        top_k = model.candidate_selector.top_k
        for j in range(K):
            embedding = model.candidate_selector.predecessor_codebook[previous]
            post.append(model.post_draft(hidden[:, j], embedding))
            unary = model.lm_head(hidden[:, j])
            kept, scores = model.propose(hidden[:, j], previous, unary)
            edge = unary.topk(top_k + 1).values[:, -2:]
            best = scores.topk(2).values
            margin.append(torch.stack([edge[:, 0] - edge[:, 1], best[:, 0] - best[:, 1]]).amin(0))
            previous = kept.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
            drafts.append(previous)
        return {
            "logits": self.target.model(input_ids=ids).logits[0],
            "drafts": torch.stack(drafts, 1),
            "margin": torch.stack(margin, 1),
            "post": torch.stack(post, 1),
            "pre": model.pre_draft(
                context[0, anchors[0] - 1], model.embed_tokens(ids[0, anchors[0]])
            ),
        }


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    """The small pair and the large one."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("large")
    common: tuple[Any, ...] = (SIZE, FILLER, "cpu", torch.float32)
    inflate_target(PAIR / "target", folder / "target", *common)
    inflate_drafter(PAIR / "drafter", folder / "drafter", *common)
    return Side(PAIR), Side(folder)


def texts() -> list[torch.Tensor]:
    """Token ids [1, T] of this folder's files: code, as the tiny pair was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    rows = [tokenizer(file.read_text(encoding="utf-8"))["input_ids"][:500] for file in files]
    return [torch.tensor([row]) for row in rows if len(row) == 500]


def test_the_large_pair_says_what_the_small_one_says(sides: tuple[Side, Side]) -> None:
    """Catches a misplaced head, group or norm, an extra layer that adds something, filler tokens
    that are chosen, and estimators that read other features: 10,000 tokens and their drafts."""
    rows = texts()[:20]
    assert sum(row.shape[1] for row in rows) >= 10_000
    drafted, ties, unclear = 0, 0, 0
    for ids in rows:
        small, large = (side.run(ids) for side in sides)
        assert large["logits"].shape[1] == SIZE.vocab
        # Where the best two are a tie to within rounding, either choice is right.
        best = small["logits"].topk(2, -1).values
        clear = best[:, 0] - best[:, 1] > TOLERANCE
        chosen = [side["logits"].argmax(-1)[clear] for side in (large, small)]
        assert torch.equal(*chosen)
        unclear += int((~clear).sum())
        # Behind a tie (the last candidate, or the best two) either draft is right.
        sure = (small["margin"] > TOLERANCE).cumprod(1).bool()
        assert torch.equal(large["drafts"][sure], small["drafts"][sure])
        drafted, ties = drafted + int(sure.sum()), ties + int((~sure).sum())
        assert float((large["pre"] - small["pre"]).abs().max()) < TOLERANCE
        assert float((large["post"] - small["post"])[sure].abs().max()) < TOLERANCE
        vocabulary = small["logits"].shape[1]
        assert float((large["logits"][:, :vocabulary] - small["logits"]).abs().max()) < TOLERANCE
    assert drafted > 5_000 and ties < 0.05 * drafted and unclear < 10


def test_a_misplaced_head_is_seen(sides: tuple[Side, Side]) -> None:
    """Catches a comparison that any weights would pass."""
    small, large = sides
    attention = large.target.model.model.layers[2].self_attn
    rows = attention.q_proj.weight.data
    kept = rows.clone()
    rows[:32], rows[32:64] = kept[32:64], kept[:32]
    try:
        ids = texts()[0]
        differ = large.run(ids)["logits"].argmax(-1) != small.run(ids)["logits"].argmax(-1)
        assert int(differ.sum()) > 10
    finally:
        rows.copy_(kept)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden": 700}, "hidden: 700 is not a multiple of the small model's 256"),
        ({"heads": 6}, "heads: 6 on 6 key-value heads cannot hold"),
        ({"inner": 100}, "intermediate_size: 100 is less than the small model's 384"),
        ({"vocab": 1000}, "vocab_size: 1000 is less than the small model's 2048"),
    ],
)
def test_sizes_that_cannot_hold_the_model(change: dict[str, int], line: str) -> None:
    """Catches a size that fails deep inside, or silently cuts the model."""
    config = json.loads((PAIR / "target" / "config.json").read_text())
    with pytest.raises(ValueError, match=line):
        Inflater(config, dataclasses.replace(SIZE, **change), FILLER, "cpu", torch.float32)
