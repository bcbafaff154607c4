"""ForeSpark's training model: speculators' DFlash2 drafter with both estimators as submodules.

Layers, selector, frozen target weights and losses are DFlash2's. What differs is where the blocks
come from: anchors and the draft length arrive with the batch (so that a resumed run repeats them),
and the backbone can run at any draft length d <= K on any subset of the anchors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from forespark.training.attention import NAME, BlockLayout, PackedMask, build_mask
from forespark.training.labels import acceptance_of_kept, target_summary, valid_slots
from forespark.training.losses import drafter_loss, post_draft_loss, pre_draft_loss
from forespark.training.model_config import ForeSparkSpeculatorConfig
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from speculators.models.dflash2 import DFlash2DraftModel
from torch import nn

from forespark.estimators.post_draft import PostDraftEstimator
from forespark.estimators.pre_draft import PreDraftEstimator, row_start

ANCHOR_STRIDE = 4  # lengths d < K are re-drafted from every fourth anchor (appendix A)


@SpeculatorModel.register("forespark")
class ForeSparkDraftModel(DFlash2DraftModel):
    """DFlash2 plus pre-draft and post-draft estimator, trained together."""

    config_class: ClassVar[type[ForeSparkSpeculatorConfig]] = ForeSparkSpeculatorConfig  # type: ignore[assignment]

    def __init__(self, config: ForeSparkSpeculatorConfig) -> None:
        config.transformer_layer_config._attn_implementation = NAME
        super().__init__(config)
        hidden = config.transformer_layer_config.hidden_size
        self.pre_draft = PreDraftEstimator(
            hidden,
            self.embed_tokens.embedding_dim,
            config.num_speculative_tokens,
            rank=config.estimator_rank,
            directional=config.directional,
        )
        self.post_draft = PostDraftEstimator(hidden, config.selector_rank)
        self.mask_embedding = nn.Parameter(torch.zeros(hidden))
        self.mask_embedding.requires_grad_(config.train_mask_embedding)
        # Per-channel factor on the target's features; folded into fc when the drafter is saved.
        self.register_buffer("feature_scale", torch.ones(self.fc.in_features))
        for unused in (self.embed_tokens, self.lm_head, self.verifier_lm_head):
            unused.weight.requires_grad_(False)

    def freeze_drafter(self) -> None:
        """Leave only the estimators trainable."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(("pre_draft.", "post_draft.")))

    @property
    def drafter_is_frozen(self) -> bool:
        """True when no weight of the drafter is trained."""
        return not self.fc.weight.requires_grad

    @contextmanager
    def _block_width(self, width: int) -> Iterator[None]:
        convs = [conv for layer in self.layers for conv in (layer.attention_conv, layer.mlp_conv)]
        full = [conv.block_size for conv in convs]
        try:
            for conv in convs:
                conv.block_size = width
            yield
        finally:
            for conv, size in zip(convs, full, strict=True):
                conv.block_size = size

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """H_feat [..., H] of the target's features [..., n_aux * H]."""
        return self.hidden_norm(self.fc(features * self.feature_scale))

    def draft_hidden(
        self,
        context: torch.Tensor,  # [1, B * S, H]
        anchor_ids: torch.Tensor,  # int64 [B, A]
        anchors: torch.Tensor,  # int64 [B, A]
        draft_len: int,
    ) -> torch.Tensor:
        """Final hidden states [B, A, d + 1, H] of blocks of exactly d masks (section 4.1)."""
        docs, count = anchors.shape
        # The convolutions look back `taps - 1` slots and want at least that many; slots added for
        # them are seen by nobody, and earlier slots never look forward.
        taps = max(layer.attention_conv.kernel_size for layer in self.layers)
        layout = BlockLayout(
            anchors=anchors,
            doc_length=context.shape[1] // docs,
            width=max(draft_len + 1, taps),
            visible=draft_len + 1,
        )
        anchor = self.embed_tokens(anchor_ids)[:, :, None]
        blocks = torch.cat(
            (anchor, self._mask_vector().expand(docs, count, layout.width - 1, -1)), dim=2
        )
        hidden = blocks.reshape(1, docs * layout.num_slots, -1)
        position = torch.arange(layout.doc_length, device=anchors.device).repeat(docs)
        positions = torch.cat((position[None], layout.positions()), dim=1)
        rotary = self.rotary_emb(hidden, positions)
        masks = self._layer_masks(layout)
        with self._block_width(layout.width):
            for index, layer in enumerate(self.layers):
                hidden = layer(
                    hidden_states=hidden,
                    target_hidden=context,
                    attention_mask=masks[index in self.sliding_window_indices],
                    position_ids=positions,
                    use_cache=False,
                    position_embeddings=rotary,
                )
        hidden = self.norm(hidden).view(docs, count, layout.width, -1)
        return hidden[:, :, : draft_len + 1]

    def _mask_vector(self) -> torch.Tensor:
        if self.config.train_mask_embedding:
            return self.mask_embedding
        return self.embed_tokens.weight[self.mask_token_id]

    def _layer_masks(self, layout: BlockLayout) -> dict[bool, PackedMask]:
        masks = {}
        if self.uses_full_attn:
            masks[False] = build_mask(layout, window=None, causal=False)
        if self.uses_sliding_window_attn:
            masks[True] = build_mask(
                layout, window=self.sliding_window, causal=not self.sliding_window_non_causal
            )
        return masks

    def propose(
        self,
        hidden: torch.Tensor,  # [n, H]
        previous_ids: torch.Tensor,  # int64 [n]
        logits: torch.Tensor,  # [n, V] unary logits of `hidden`
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates int64 [n, k] and their scores [n, k] after the selector."""
        ids, scores = self.candidate_selector.select(logits[None], hidden[None], previous_ids[None])
        return ids[0], scores[0]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, B * S, n_aux * H]
        input_ids: torch.Tensor,  # int64 [1, B * S]
        loss_mask: torch.Tensor,  # [1, B * S]
        verifier_last_hidden_states: torch.Tensor,  # [1, B * S, H] before the final norm
        anchor_positions: torch.Tensor,  # int64 [B, A] inside each document, >= 1
        anchor_valid: torch.Tensor,  # bool [B, A]
        draft_len: int,  # row of the triangle this step trains
        loss_fn: str = '{"ce": 0.1, "tv": 0.9}',
        loss_implementation: str = "eager",
        gamma: float = 4.0,
        selector_weight: float = 1.0,
        lambda_pre: float = 1.0,
        lambda_post: float = 1.0,
        label_temperature: float = 1.0,
        **_: Any,  # what the trainer adds to a batch (document ids, error counts)
    ) -> tuple[None, torch.Tensor, dict[str, torch.Tensor]]:
        """One training step's loss and its `<name>_sum` / `<name>_total` metrics."""
        docs = anchor_positions.shape[0]
        ids, mask = input_ids.view(docs, -1), loss_mask.view(docs, -1)
        frozen = self.drafter_is_frozen
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            context = self.context(hidden_states)
            anchor_ids = ids.gather(1, anchor_positions)
            block = self.draft_hidden(context, anchor_ids, anchor_positions, self.block_size - 1)
            valid = valid_slots(mask, anchor_positions, anchor_valid, self.block_size)
            doc, index, slot = valid.nonzero(as_tuple=True)
            row = doc * ids.shape[1] + anchor_positions[doc, index] + slot - 1
            hidden, previous = block[doc, index, slot], input_ids[0, row]
            logits = self.lm_head(hidden)
            with torch.no_grad():
                targets = self.verifier_lm_head(
                    self.verifier_norm(verifier_last_hidden_states[0, row])
                )
                candidates = logits.topk(self.candidate_selector.top_k, dim=-1).indices

        def scores(candidate_ids: torch.Tensor) -> torch.Tensor:
            return self.candidate_selector.score_candidates(
                logits[None], hidden[None], previous[None], candidate_ids
            )

        parts: dict[str, torch.Tensor] = {}
        loss = logits.new_zeros((), dtype=torch.float32)
        if not frozen:
            loss, parts = drafter_loss(
                logits[None],
                targets[None],
                candidates[None],
                scores,
                slot[None],
                loss_config=resolve_loss_config(loss_fn, loss_implementation),
                gamma=gamma,
                selector_weight=selector_weight,
            )
        if lambda_pre or lambda_post:
            with torch.no_grad():
                summary = target_summary(targets, label_temperature)
                alpha = acceptance_of_kept(
                    scores(candidates[None])[0],
                    candidates,
                    targets.gather(-1, candidates),
                    summary,
                    label_temperature,
                )
                parts["alpha"] = alpha.mean()
        if lambda_post:
            embedding = self.candidate_selector.predecessor_codebook[previous]
            post = post_draft_loss(self.post_draft(hidden, embedding), alpha, slot, gamma)
            loss = loss + lambda_post * post
            parts["post_draft_loss"] = post.detach()
        if lambda_pre:
            full = torch.zeros(valid.shape, device=alpha.device).masked_scatter(valid, alpha)
            pre = self._pre_draft_loss(
                context.detach(), ids, anchor_positions, valid, full, targets, summary, draft_len,
                label_temperature,
            )  # fmt: skip
            loss = loss + lambda_pre * pre
            parts["pre_draft_loss"] = pre.detach()
        parts["loss"] = loss.detach()
        metrics = {f"{key}_sum": value for key, value in parts.items()}
        metrics |= {f"{key}_total": torch.ones((), device=loss.device) for key in parts}
        return None, loss, metrics

    def _pre_draft_loss(
        self,
        context: torch.Tensor,  # [1, B * S, H], no gradient
        ids: torch.Tensor,  # int64 [B, S]
        anchors: torch.Tensor,  # int64 [B, A]
        valid: torch.Tensor,  # bool [B, A, K + 1]
        alpha: torch.Tensor,  # f32 [B, A, K + 1] labels of the length-K pass
        targets: torch.Tensor,  # [n, V] target logits of the valid slots, row-major
        summary: torch.Tensor,  # [n] what labels need of each whole row
        draft_len: int,
        label_temperature: float,
    ) -> torch.Tensor:
        """BCE of the triangle's row d; every row from one pass when the drafter is directional."""
        block = self.block_size - 1
        if not self.config.directional and draft_len < block:
            chosen = slice(None, None, ANCHOR_STRIDE)
            with torch.no_grad():
                alpha = self._labels_at_length(
                    context, ids, anchors, valid, targets, summary, draft_len, label_temperature
                )
            anchors, valid = anchors[:, chosen], valid[:, chosen]
        else:
            draft_len = block
        feature = context.view(*ids.shape, -1)
        doc = torch.arange(ids.shape[0], device=ids.device)[:, None]
        # The last accepted token is the one before the anchor: the anchor has no target state yet.
        inputs = feature[doc, anchors - 1], self.embed_tokens(ids.gather(1, anchors)).detach()
        first = 0 if self.config.directional else row_start(draft_len)
        logits = self.pre_draft(*inputs)[..., first : first + draft_len]
        kept = slice(1, draft_len + 1)
        return pre_draft_loss(
            logits.flatten(0, 1), alpha[..., kept].flatten(0, 1), valid[..., kept].flatten(0, 1)
        )

    def _labels_at_length(
        self,
        context: torch.Tensor,
        ids: torch.Tensor,
        anchors: torch.Tensor,
        valid: torch.Tensor,
        targets: torch.Tensor,
        summary: torch.Tensor,
        draft_len: int,
        label_temperature: float,
    ) -> torch.Tensor:
        """alpha [B, A', d + 1] of every fourth anchor, drafted again at exactly length d."""
        ordinal = torch.full(valid.shape, -1, device=valid.device)
        ordinal[valid] = torch.arange(int(targets.shape[0]), device=valid.device)
        chosen = slice(None, None, ANCHOR_STRIDE)
        anchors, valid = anchors[:, chosen], valid[:, chosen, : draft_len + 1]
        ordinal = ordinal[:, chosen, : draft_len + 1]
        block = self.draft_hidden(context, ids.gather(1, anchors), anchors, draft_len)
        doc, index, slot = valid.nonzero(as_tuple=True)
        hidden = block[doc, index, slot]
        previous = ids[doc, anchors[doc, index] + slot - 1]
        candidates, scores = self.propose(hidden, previous, self.lm_head(hidden))
        known = ordinal[doc, index, slot]
        alpha = acceptance_of_kept(
            scores, candidates, targets[known[:, None], candidates], summary[known],
            label_temperature,
        )  # fmt: skip
        return torch.zeros(valid.shape, device=alpha.device).masked_scatter(valid, alpha)
