"""Attention of draft blocks over packed documents of equal padded length.

A training row holds B documents of S positions each and A anchored blocks of w slots per document
(section 4.1: keys and values are the context before the anchor plus the block's own slots). With
equal lengths the block-sparse mask of the row is B dense ones, so plain scaled-dot-product
attention serves every draft length without recompiling, on a CPU as on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from speculators.models.attention import ALL_ATTENTION_FUNCTIONS
from torch.nn import functional

NAME = "forespark_packed"


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a row sit, and which slots of a block exist."""

    anchors: torch.Tensor  # int64 [B, A] position of each anchor inside its document
    doc_length: int  # S
    width: int  # w: slots per block, the anchor included
    visible: int  # slots 0..visible-1 exist; later ones are padding nobody attends to

    @property
    def num_slots(self) -> int:
        """Query slots per document: A * w."""
        return self.anchors.shape[1] * self.width

    def positions(self) -> torch.Tensor:
        """int64 [1, B * A * w]: rotary position of every slot inside its document."""
        steps = torch.arange(self.width, device=self.anchors.device)
        return (self.anchors[..., None] + steps).reshape(1, -1)


@dataclass(frozen=True)
class PackedMask:
    """What a layer receives as `attention_mask`: the layout and its boolean mask."""

    layout: BlockLayout
    allowed: torch.Tensor  # bool [B, 1, A * w, S + A * w]


def build_mask(layout: BlockLayout, *, window: int | None, causal: bool) -> PackedMask:
    """Mask of one kind of layer: `window` context positions (None: all), causal block or not."""
    anchors = layout.anchors
    device = anchors.device
    anchor_of = anchors.repeat_interleave(layout.width, dim=1)[..., None]  # [B, A * w, 1]
    context = torch.arange(layout.doc_length, device=device)
    before = context < anchor_of
    if window is not None:
        before &= context >= anchor_of - window
    slot = torch.arange(layout.num_slots, device=device)
    block, step = slot // layout.width, slot % layout.width
    inside = (block[:, None] == block[None, :]) & (step[None, :] < layout.visible)
    if causal:
        inside &= step[None, :] <= step[:, None]
    # A padding slot still attends to its anchor, so that no softmax runs over nothing.
    allowed = torch.cat((before, inside.expand(anchors.shape[0], -1, -1)), dim=-1)
    return PackedMask(layout, allowed[:, None])


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, B * A * w, D]
    key: torch.Tensor,  # [1, kv_heads, B * S + B * A * w, D]
    value: torch.Tensor,  # like key
    attention_mask: PackedMask,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Context and block attention of every document; returns [1, B * A * w, heads, D]."""
    layout = attention_mask.layout
    docs, slots, length = layout.anchors.shape[0], layout.num_slots, layout.doc_length
    groups = query.shape[1] // key.shape[1]

    def per_document(packed: torch.Tensor, rows: int) -> torch.Tensor:
        return packed[0].unflatten(1, (docs, rows)).transpose(0, 1)  # [B, heads, rows, D]

    def keys(packed: torch.Tensor) -> torch.Tensor:
        context, block = packed.split((docs * length, docs * slots), dim=2)
        joined = torch.cat((per_document(context, length), per_document(block, slots)), dim=2)
        return joined.repeat_interleave(groups, dim=1)

    # Norms keep q and k in float32 under autocast; the kernel wants one dtype, the values'.
    output = functional.scaled_dot_product_attention(
        per_document(query, slots).to(value.dtype),
        keys(key).to(value.dtype),
        keys(value),
        attn_mask=attention_mask.allowed,
        scale=scaling,
    )
    return output.permute(0, 2, 1, 3).flatten(0, 1)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
