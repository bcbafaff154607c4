"""Batches for the trainer: packed documents, their target features, anchors and draft length.

Everything random in step s is drawn from a generator seeded by (seed, s), so a resumed run sees
the batches an uninterrupted one would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from forespark.training.labels import draft_length
from forespark.training.rows import Row
from forespark.training.target import Target

_LENGTH_MULTIPLE = 64  # few distinct shapes for the allocator and the kernels
_BUCKET_BATCHES = 16  # batches of similar length are cut from this many shuffled ones

Batch = tuple[int, list[int]]  # global step, document indices


class BatchPlan:
    """Which documents form each step; the part of a sampler that speculators' trainer resumes."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        if len(lengths) < batch_size:
            raise ValueError(
                f"batch_size: {batch_size} documents a step, but only {len(lengths)} are prepared; "
                "use a smaller batch or prepare more prompts"
            )
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0
        # The trainer puts the rest of an epoch here when it resumes inside one.
        self._cached_generated_batches: tuple[int, list[Batch]] = (-1, [])

    def __len__(self) -> int:
        return len(self.lengths) // self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer at the start of an epoch."""
        self.epoch = epoch

    def _generate_batches(self, epoch: int) -> list[Batch]:
        shuffle = random.Random(f"{self.seed}-{epoch}")
        order = list(range(len(self.lengths)))
        shuffle.shuffle(order)
        order = order[: len(self) * self.batch_size]
        batches = []
        span = self.batch_size * _BUCKET_BATCHES
        for start in range(0, len(order), span):
            bucket = sorted(order[start : start + span], key=self.lengths.__getitem__)
            batches += [
                bucket[i : i + self.batch_size] for i in range(0, len(bucket), self.batch_size)
            ]
        shuffle.shuffle(batches)
        return list(enumerate(batches, start=epoch * len(self)))

    def __iter__(self) -> Iterator[Batch]:
        epoch, rest = self._cached_generated_batches
        batches = rest if epoch == self.epoch else self._generate_batches(self.epoch)
        self._cached_generated_batches = (-1, [])
        return iter(batches)


class FeatureCache:
    """Target features of whole documents, computed once and kept while memory lasts."""

    def __init__(self, target: Target, rows: Sequence[Row], budget_bytes: int) -> None:
        self.target, self.rows, self.left = target, rows, budget_bytes
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def batch(self, documents: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, S, n_aux * H] and last states [B, S, H], zero behind each document."""
        new = [d for d in documents if d not in self._kept]
        fresh: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if new:
            ids = pad([self.rows[d].input_ids for d in new], length)
            features, last = self.target.features(ids)
            for index, document in enumerate(new):
                size = len(self.rows[document].input_ids)
                pair = features[index, :size].clone(), last[index, :size].clone()
                fresh[document] = pair
                cost = sum(part.numel() * part.element_size() for part in pair)
                if cost <= self.left:
                    self._kept[document] = pair
                    self.left -= cost
        pairs = [self._kept.get(d) or fresh[d] for d in documents]
        return tuple(  # type: ignore[return-value]
            torch.stack(
                [
                    torch.nn.functional.pad(pair[part], (0, 0, 0, length - len(pair[part])))
                    for pair in pairs
                ]
            )
            for part in (0, 1)
        )


class TrainLoader:
    """Iterates over batches as the trainer wants them; `batch_sampler` is its `BatchPlan`."""

    def __init__(
        self,
        rows: Sequence[Row],
        target: Target,
        *,
        num_speculative_tokens: int,
        batch_size: int,
        anchors: int,
        seed: int,
        cache_bytes: int,
    ) -> None:
        self.rows, self.anchors, self.seed = rows, anchors, seed
        self.block = num_speculative_tokens
        self.batch_sampler = BatchPlan([len(r.input_ids) for r in rows], batch_size, seed)
        self.cache = FeatureCache(target, rows, cache_bytes)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, documents in self.batch_sampler:
            yield self.make(step, documents)

    def make(self, step: int, documents: list[int]) -> dict[str, Any]:
        """The batch of one step: packed tensors [1, B * S, ...] plus anchors [B, A]."""
        rows = [self.rows[d] for d in documents]
        length = padded_length(max(len(r.input_ids) for r in rows))
        features, last = self.cache.batch(documents, length)
        device = features.device
        mask = pad([r.loss_mask for r in rows], length)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        anchors, valid = choose_anchors(mask, self.anchors, generator)
        inside = torch.arange(length) < torch.tensor([len(r.input_ids) for r in rows])[:, None]
        document = torch.arange(len(rows))[:, None].masked_fill(~inside, -1)
        return {
            "hidden_states": features.flatten(0, 1)[None],
            "verifier_last_hidden_states": last.flatten(0, 1)[None],
            "input_ids": pad([r.input_ids for r in rows], length).view(1, -1).to(device),
            "loss_mask": mask.view(1, -1).to(device),
            "document_ids": document.reshape(1, -1).to(device),
            "anchor_positions": anchors.to(device),
            "anchor_valid": valid.to(device),
            "draft_len": draft_length(step, self.block),
            "error_records": 0,
        }


def choose_anchors(
    loss_mask: torch.Tensor,  # [B, S]
    count: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors int64 [B, A], sorted, and bool [B, A]: drawn among supervised tokens.

    An anchor is a generated token with a supervised token behind it and a token before it; a
    document with fewer than A of them is filled up with invalid anchors at position 1.
    """
    eligible = loss_mask.bool().clone()
    eligible[:, :-1] &= loss_mask[:, 1:].bool()
    eligible[:, -1] = False
    eligible[:, 0] = False
    noise = torch.rand(eligible.shape, generator=generator).masked_fill(~eligible, -1.0)
    score, position = noise.topk(min(count, eligible.shape[1]), dim=1)
    valid = score >= 0
    position = position.masked_fill(~valid, eligible.shape[1])
    position, order = position.sort(dim=1)
    valid = valid.gather(1, order)
    return position.masked_fill(~valid, 1), valid


def padded_length(length: int) -> int:
    """`length` rounded up to the shape grid."""
    return -(-length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


def pad(rows: list[list[int]], length: int) -> torch.Tensor:
    """int64 [B, length], zeros on the right."""
    result = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        result[index, : len(row)] = torch.tensor(row)
    return result
