"""Full-block drafts over held-out text: what was drafted, accepted and estimated at each anchor.

The text is the target's own greedy answer, so acceptance is known without running the target
again: a drafted token is accepted when all before it were and it equals the text (greedy
verification). Every position is drafted and verified, so nothing is censored by a schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from forespark.training.loader import pad, padded_length
from forespark.training.model import ForeSparkDraftModel
from forespark.training.rows import Row
from forespark.training.target import Target

from forespark.estimators.pre_draft import row_start

Amp = Callable[[], AbstractContextManager[object]]
_HEAD_ROWS = {"cpu": 1024, "cuda": 16384}  # rows of vocabulary logits held at a time


@dataclass
class Trace:
    """One row per draft of exactly `draft_len` tokens, in document and position order."""

    draft_len: int
    document: np.ndarray  # int64 [n]
    position: np.ndarray  # int64 [n] the anchor's position
    match: np.ndarray  # bool [n, d] drafted token equals the text
    exists: np.ndarray  # bool [n, d] the text goes that far
    pre_logits: np.ndarray  # f32 [n, d] row d of the triangle
    post_logits: np.ndarray  # f32 [n, d]
    drafter_prob: np.ndarray  # f32 [n, d] the drafter's own probability of its token

    @property
    def accepted(self) -> np.ndarray:
        """int64 [n]: accepted tokens of each draft."""
        return (self.match & self.exists).cumprod(axis=1).sum(axis=1)

    def select(self, rows: np.ndarray) -> Trace:
        """The drafts at `rows` (bool or int [m])."""
        fields = ("document", "position", "match", "exists", "pre_logits", "post_logits")
        values = {name: getattr(self, name)[rows] for name in (*fields, "drafter_prob")}
        return Trace(draft_len=self.draft_len, **values)

    @classmethod
    def join(cls, parts: Sequence[Trace]) -> Trace:
        """Traces of one length, one behind the other."""
        names = [field for field in cls.__dataclass_fields__ if field != "draft_len"]
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in names]
        return cls(parts[0].draft_len, *columns)


def walk(trace: Trace) -> np.ndarray:
    """int64 [m]: the drafts a decoding run makes, each starting behind the last one's bonus."""
    accepted, chosen, following = trace.accepted, [], {}
    for index, key in enumerate(zip(trace.document, trace.position, strict=True)):
        if following.get(key[0], key[1]) == key[1]:
            chosen.append(index)
            following[key[0]] = key[1] + accepted[index] + 1
    return np.array(chosen, dtype=np.int64)


def record(
    model: ForeSparkDraftModel, target: Target, rows: Sequence[Row], draft_len: int, **options: Any
) -> Trace:
    """`record_lengths` of one length."""
    return record_lengths(model, target, rows, [draft_len], **options)[0]


@torch.no_grad()
def record_lengths(
    model: ForeSparkDraftModel,
    target: Target,
    rows: Sequence[Row],
    lengths: Sequence[int],
    *,
    amp: Amp,
    anchors: int = 32,
    stride: int = 1,
    batch_size: int = 16,
) -> list[Trace]:
    """Draft each of `lengths` at every `stride`-th answer position of every row.

    The target runs once for all of them. One trace a length, all of the same positions.
    """
    parts: dict[int, list[list[np.ndarray]]] = {length: [] for length in lengths}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].input_ids))
    for start in range(0, len(order), batch_size):
        documents = order[start : start + batch_size]
        for length, columns in _record_batch(
            model, target, rows, documents, lengths, amp, anchors, stride
        ):
            parts[length].append(columns)
    traces = []
    for length, found in parts.items():
        trace = Trace(length, *(np.concatenate(column) for column in zip(*found, strict=True)))
        traces.append(trace.select(np.lexsort((trace.position, trace.document))))
    return traces


def _record_batch(
    model: ForeSparkDraftModel,
    target: Target,
    rows: Sequence[Row],
    documents: list[int],
    lengths: Sequence[int],
    amp: Amp,
    anchors: int,
    stride: int,
) -> Iterator[tuple[int, list[np.ndarray]]]:
    ids_list = [rows[d].input_ids for d in documents]
    padded = padded_length(max(map(len, ids_list)))
    ids = pad(ids_list, padded).to(target.device)
    ends = torch.tensor([len(i) for i in ids_list], device=target.device)
    starts = torch.tensor([rows[d].loss_mask.index(1) for d in documents], device=target.device)
    names = torch.tensor(documents, device=target.device)[:, None]
    with amp():
        features, _ = target.features(ids)
        context = model.context(features.flatten(0, 1)[None])
        for first in range(0, int((ends - starts).max()) - 1, anchors * stride):
            offset = torch.arange(first, first + anchors * stride, stride, device=target.device)
            position = starts[:, None] + offset  # [B, A]
            kept = position < ends[:, None] - 1
            if not kept.any():
                continue
            block = position.clamp(max=padded - 1)
            for length in lengths:
                step = _draft(model, context, ids, block, length)
                future = block[..., None] + torch.arange(1, length + 1, device=target.device)
                exists = future < ends[:, None, None]
                text = ids.gather(1, future.clamp(max=padded - 1).flatten(1)).view_as(future)
                columns = (names.expand_as(position), position, step[0] == text, exists, *step[1:])
                yield length, [column[kept].cpu().numpy() for column in columns]


def _draft(
    model: ForeSparkDraftModel,
    context: torch.Tensor,  # [1, B * S, H]
    ids: torch.Tensor,  # int64 [B, S]
    anchors: torch.Tensor,  # int64 [B, A]
    draft_len: int,
) -> tuple[torch.Tensor, ...]:
    """Tokens, row d of z, post-draft logits and drafter probabilities, each [B, A, d]."""
    anchor_ids = ids.gather(1, anchors)
    hidden = model.draft_hidden(context, anchor_ids, anchors, draft_len)[:, :, 1:].flatten(0, 1)
    doc = torch.arange(ids.shape[0], device=ids.device)[:, None]
    feature = context.view(*ids.shape, -1)[doc, anchors - 1]
    z = model.pre_draft(feature, model.embed_tokens(anchor_ids)).flatten(0, 1)
    begin = 0 if model.config.directional else row_start(draft_len)
    tokens, post, prob = [], [], []
    flat_anchor = anchor_ids.flatten()
    count = max(1, _HEAD_ROWS[hidden.device.type] // draft_len)
    for part in range(0, hidden.shape[0], count):
        rows = slice(part, part + count)
        logits = model.lm_head(hidden[rows])  # [m, d, V]
        normaliser = logits.float().logsumexp(-1)
        previous, columns = flat_anchor[rows], []
        for j in range(draft_len):
            state = hidden[rows, j]
            candidates, scores = model.propose(state, previous, logits[:, j])
            embedding = model.candidate_selector.predecessor_codebook[previous]
            token = candidates.gather(1, scores.argmax(-1, keepdim=True))
            own = (logits[:, j].gather(1, token)[:, 0].float() - normaliser[:, j]).exp()
            previous = token[:, 0]
            columns.append((previous, model.post_draft(state, embedding), own))
        for store, column in zip((tokens, post, prob), zip(*columns, strict=True), strict=True):
            store.append(torch.stack(column, dim=1))
    shape = (*anchors.shape, draft_len)
    return (
        torch.cat(tokens).view(shape),
        z[:, begin : begin + draft_len].float().reshape(shape),
        torch.cat(post).float().view(shape),
        torch.cat(prob).float().view(shape),
    )
