"""The training model against speculators' DFlash2, and what its losses may change."""

from pathlib import Path

import pytest
import torch
from forespark.training.folder import load_checkpoint
from forespark.training.labels import valid_slots
from forespark.training.losses import post_draft_loss
from speculators.losses import resolve_loss_config
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"
LOSS = '{"ce": 0.1, "tv": 0.9}'


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_checkpoint(PAIR / "drafter", PAIR / "target").eval()


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    docs, length, anchors = 2, 64, 8
    position = torch.stack([torch.randperm(48)[:anchors].sort().values + 4 for _ in range(docs)])
    mask = torch.ones(docs, length)
    mask[:, :4] = 0
    mask[1, 50:] = 0
    return {
        "hidden_states": torch.randn(1, docs * length, 3 * 256) * 4,
        "input_ids": torch.randint(8, 2048, (1, docs * length)),
        "loss_mask": mask.view(1, -1),
        "verifier_last_hidden_states": torch.randn(1, docs * length, 256) * 4,
        "anchor_positions": position,
        "anchor_valid": torch.ones(docs, anchors, dtype=torch.bool),
        "draft_len": 7,
    }


def library_model():
    """speculators' own DFlash2 of the same folder, with its own dense masks."""
    config = DFlash2SpeculatorConfig.from_pretrained(PAIR / "drafter")
    config.speculators_config.verifier.name_or_path = str(PAIR / "target")
    config.transformer_layer_config._attn_implementation = "sdpa"
    return DFlash2DraftModel.from_pretrained(PAIR / "drafter", config=config).float().eval()


def test_hidden_states_and_loss_equal_speculators(model, batch, monkeypatch):
    """Catches any drift from DFlash2: mask, rotary positions, slot or target alignment, weights."""
    docs, length = 2, 64
    flat = (batch["anchor_positions"] + torch.arange(docs)[:, None] * length).flatten()
    valid = valid_slots(
        batch["loss_mask"].view(docs, -1), batch["anchor_positions"], batch["anchor_valid"], 8
    )
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda *_: (flat, torch.ones(len(flat), dtype=torch.bool)),
    )
    arguments = {
        "hidden_states": batch["hidden_states"],
        "input_ids": batch["input_ids"],
        "loss_mask": batch["loss_mask"],
        "verifier_last_hidden_states": batch["verifier_last_hidden_states"],
        "document_ids": torch.arange(docs).repeat_interleave(length)[None],
        "position_ids": torch.arange(length).repeat(docs)[None],
        "max_anchors": len(flat),
    }
    library = library_model()
    with torch.no_grad():
        hidden = library._backbone_forward(**arguments)[0].view(docs, -1, 8, 256)
        context = model.context(batch["hidden_states"])
        anchor_ids = batch["input_ids"].view(docs, -1).gather(1, batch["anchor_positions"])
        ours = model.draft_hidden(context, anchor_ids, batch["anchor_positions"], 7)
        # float32, another order of the same sums over at most 72 keys
        torch.testing.assert_close(ours, hidden, rtol=1e-4, atol=1e-4)
        # The library counts a slot behind a gap in the mask; blocks here have none.
        assert int(valid.sum()) == int(library._backbone_forward(**arguments)[3].sum())
        eager = resolve_loss_config(LOSS, "eager")
        expected = library(
            **arguments, loss_config=eager, tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0]
        )[1]
        loss = model(**batch, loss_fn=LOSS, lambda_pre=0.0, lambda_post=0.0)[1]
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draft_len", [1, 2, 5])
def test_a_shorter_draft_equals_a_model_of_that_block(model, batch, draft_len):
    """Catches a re-draft that still sees the masks beyond d, or rotates or convolves otherwise."""
    anchors = batch["anchor_positions"][:, ::4]
    ids = batch["input_ids"].view(2, -1).gather(1, anchors)
    with torch.no_grad():
        context = model.context(batch["hidden_states"])
        ours = model.draft_hidden(context, ids, anchors, draft_len)
        assert ours.shape[2] == draft_len + 1
        full = model.draft_hidden(context, ids, anchors, 7)[:, :, : draft_len + 1]
        assert (ours - full).abs().max() > 1e-2  # the block is bidirectional
        library = library_model()
        # a smaller block size is all that a plain DFlash2 model needs to draft d tokens
        library.block_size = draft_len + 1
        for layer in library.layers:
            layer.attention_conv.block_size = layer.mlp_conv.block_size = draft_len + 1
        flat = (anchors + torch.arange(2)[:, None] * 64).flatten()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "speculators.models.dflash.core.select_anchors",
                lambda *_: (flat, torch.ones(len(flat), dtype=torch.bool)),
            )
            hidden = library._backbone_forward(
                batch["hidden_states"],
                batch["input_ids"],
                batch["loss_mask"],
                batch["verifier_last_hidden_states"],
                torch.arange(2).repeat_interleave(64)[None],
                torch.arange(64).repeat(2)[None],
                max_anchors=len(flat),
            )[0]
    torch.testing.assert_close(ours, hidden.view(2, -1, draft_len + 1, 256), rtol=1e-4, atol=1e-4)


def test_convolution_padding_changes_nothing(model, batch):
    """Catches the slots added for the convolution's taps leaking into a one-token draft."""
    anchors = batch["anchor_positions"]
    ids = batch["input_ids"].view(2, -1).gather(1, anchors)
    with torch.no_grad():
        context = model.context(batch["hidden_states"])
        plain = model.draft_hidden(context, ids, anchors, 1)
        with pytest.MonkeyPatch.context() as patch:
            for layer in model.layers:
                patch.setattr(layer.attention_conv, "kernel_size", 6)
                patch.setattr(
                    layer.attention_conv, "prepare", _two_tap(layer.attention_conv.prepare, layer)
                )
            padded = model.draft_hidden(context, ids, anchors, 1)
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-5)


def _two_tap(prepare, layer):
    def run(hidden):
        layer.attention_conv.kernel_size = 2
        try:
            return prepare(hidden)
        finally:
            layer.attention_conv.kernel_size = 6

    return run


@pytest.mark.parametrize("draft_len", [7, 3])
def test_pre_draft_loss_reaches_only_the_pre_draft_estimator(model, batch, draft_len):
    """Catches a missing stop-gradient at c_i or e_i, and a re-draft that keeps its graph."""
    model.zero_grad(set_to_none=True)
    arguments = batch | {"draft_len": draft_len}
    both = model(**arguments, lambda_post=0.0, lambda_pre=1.0)[1]
    none = model(**arguments, lambda_post=0.0, lambda_pre=0.0)[1]
    pre = both - none
    wanted = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(both, [p for _, p in wanted], allow_unused=True)
    without = torch.autograd.grad(none, [p for _, p in wanted], allow_unused=True)
    for (name, _), gradient, plain in zip(wanted, gradients, without, strict=True):
        if name.startswith("pre_draft."):
            assert plain is None and gradient.abs().sum() > 0, name
        elif plain is not None:
            assert torch.equal(gradient, plain), name
    assert pre > 0


def test_each_step_trains_one_row_of_the_triangle(model, batch):
    """Catches training row d with the labels or outputs of another length."""
    for draft_len in (1, 4, 7):
        model.zero_grad(set_to_none=True)
        model(**(batch | {"draft_len": draft_len}), lambda_post=0.0)[1].backward()
        touched = model.pre_draft.out.bias.grad.abs() > 0
        first = draft_len * (draft_len - 1) // 2
        expected = torch.zeros_like(touched)
        expected[first : first + draft_len] = True
        assert torch.equal(touched, expected), draft_len


def test_post_draft_loss_excludes_the_anchor_and_decays():
    """Catches labelling slot 0 or weighting all positions alike."""
    logits = torch.tensor([0.0, 0.0])
    near = post_draft_loss(
        logits + torch.tensor([2.0, 0.0]), torch.ones(2), torch.tensor([1, 5]), 4.0
    )
    far = post_draft_loss(
        logits + torch.tensor([0.0, 2.0]), torch.ones(2), torch.tensor([1, 5]), 4.0
    )
    assert near < far
    with_anchor = post_draft_loss(
        torch.tensor([0.0, 9.0]), torch.tensor([1.0, 0.0]), torch.tensor([1, 0]), 4.0
    )
    alone = post_draft_loss(torch.tensor([0.0]), torch.ones(1), torch.tensor([1]), 4.0)
    torch.testing.assert_close(with_anchor, alone)


def test_frozen_drafter_trains_only_the_estimators(batch):
    """Catches `freeze` leaving a drafter weight trainable, or losing the estimators' gradients."""
    frozen = load_checkpoint(PAIR / "drafter", PAIR / "target")
    frozen.freeze_drafter()
    frozen(**batch)[1].backward()
    got = {n.split(".")[0] for n, p in frozen.named_parameters() if p.grad is not None}
    assert got == {"pre_draft", "post_draft"}
