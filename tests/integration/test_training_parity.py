"""The training model against the served drafter, on drafts that a running engine made.

Both run in float32. They differ in who computes the target's features (Hugging Face or vLLM), in
the order of sums, and in attention over a padded block or a paged cache, so equal values differ by
a few float32 roundings (6e-8 of the summands) that six target and three drafter layers pass on.
Largest difference measured over all drafts of d = 1..7: 9.7e-6 in a hidden state, 5.2e-6 and 6.7e-6
in the pre-draft and post-draft logits. A wrong row, slot or predecessor moves them by far more
(last test).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forespark.training.folder import load_checkpoint
from forespark.training.target import Target
from harness import PAIR, K
from test_packed_parity import DRAFTS

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4  # ten times the largest difference measured


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Target]:
    """The training model of the pair, and its target."""
    torch.set_num_threads(1)
    model = load_checkpoint(PAIR / "drafter", PAIR / "target").eval()
    target = Target(
        PAIR / "target", model.target_layer_ids, torch.device("cpu"), dtype=torch.float32
    )
    return model, target


@torch.no_grad()
def training_side(model: Any, target: Target, row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the training forward says about one captured draft: its `hidden`, `candidates`, ..."""
    ids = torch.tensor([row["ids"]])
    anchors = torch.tensor([[ids.shape[1] - 1]])
    context = model.context(target.features(ids)[0])
    anchor = ids.gather(1, anchors)
    hidden = model.draft_hidden(context, anchor, anchors, row["d"])[0, 0, 1:]
    previous = torch.tensor([row["ids"][-1], *row["tokens"][:-1]])
    candidates, scores = model.propose(hidden, previous, model.lm_head(hidden))
    embedding = model.candidate_selector.predecessor_codebook[previous]
    return {
        "hidden": hidden,
        "candidates": candidates,
        "tokens": candidates.gather(1, scores.argmax(-1, keepdim=True))[:, 0],
        "pre": model.pre_draft(context[0, -2], model.embed_tokens(anchor)[0, 0]),
        "post": model.post_draft(hidden, embedding),
    }


def test_training_and_serving_compute_the_same(
    engine_job: Callable[..., dict[str, Any]], trained: tuple[Any, Target]
) -> None:
    """Catches an estimator trained on another row, norm, slot or predecessor than it is served on,
    and a drafter whose training blocks are not the blocks that are served."""
    captured = engine_job("parity", **DRAFTS)["captured"]
    assert {row["d"] for row in captured} == set(range(1, K + 1))
    assert len(captured) > 10 * K and any(len(row["ids"]) > 60 for row in captured)
    for row in captured:
        ours = training_side(*trained, row)
        where = (row["d"], row["request"], row["total"])
        assert ours["tokens"].tolist() == row["tokens"], where
        # The k best in any order: equal to rounding, two may change places.
        assert ours["candidates"].sort(-1).values.tolist() == [
            sorted(ids) for ids in row["candidates"]
        ], where
        for key in ("hidden", "pre", "post"):
            served = torch.tensor(row[key])
            assert ours[key].shape == served.shape
            difference = float((ours[key] - served).abs().max())
            assert difference < TOLERANCE, (*where, key)


@pytest.mark.parametrize("mistake", ["context", "anchor", "length", "predecessor"])
def test_the_comparison_sees_mistakes(
    engine_job: Callable[..., dict[str, Any]], trained: tuple[Any, Target], mistake: str
) -> None:
    """Catches a tolerance so wide that a shifted row, block or predecessor would pass."""
    captured = engine_job("parity", **DRAFTS)["captured"]
    row = next(row for row in captured if row["d"] == 5 and len(row["ids"]) > 30)
    wrong = dict(row)
    if mistake == "context":
        wrong["ids"] = [row["ids"][0], *row["ids"][:-2], row["ids"][-1]]
    elif mistake == "anchor":
        wrong["ids"] = [*row["ids"][:-1], row["ids"][-1] + 1]
    elif mistake == "length":
        wrong |= {"d": 4, "tokens": row["tokens"][:4]}
    else:
        wrong["tokens"] = [row["tokens"][0] + 1, *row["tokens"][1:]]
    ours = training_side(*trained, wrong)
    shown = {"context": "pre", "anchor": "pre", "length": "hidden", "predecessor": "post"}[mistake]
    served = torch.tensor(row[shown])[: ours[shown].shape[0]]
    assert float((ours[shown] - served).abs().max()) > 100 * TOLERANCE
