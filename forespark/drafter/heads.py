"""What turns drafted rows into tokens: candidates, the selector's walk, and the acceptance logits.

Everything is read from persistent buffers and every shape follows from two numbers, so the same
code runs eagerly on exactly D rows and inside a CUDA graph on a bucket of them. Rows past D carry
slot -1 and scatter into a spare line of each buffer.
"""

from __future__ import annotations

from typing import Any

import torch

from forespark.drafter.estimate import DeviceEstimators
from forespark.drafter.selector import DraftRows, SelectorWalk, packed_edge_scores
from forespark.triton_kernels.pack_types import PackBuffers


class DraftHeads:
    """The heads of one speculator, over the packed batch that `pack` described."""

    def __init__(self, speculator: Any, packed: PackBuffers) -> None:
        reqs, steps = speculator.max_num_reqs, speculator.num_speculative_steps
        device = speculator.device
        self._speculator = speculator
        self._packed = packed
        self._walk = SelectorWalk(speculator.candidate_sampler, reqs, device)
        self._row = torch.arange(reqs * steps, dtype=torch.int32, device=device)
        # One line more than there are requests: where padding rows go.
        self._post_logits = torch.zeros(reqs + 1, steps, device=device)
        self.estimators: DeviceEstimators | None = None

    def post_logits(self, num_reqs: int) -> torch.Tensor:
        """f32 [n, K]: acceptance logits of the last draft; undefined past a draft's length."""
        return self._post_logits[:num_reqs]

    def run(self, hidden: torch.Tensor, rows: int, num_reqs: int) -> None:
        """Fill `draft_tokens` and the acceptance logits from `rows` >= D drafted rows.

        `hidden` [R, H] are the backbone's outputs by packed row; `num_reqs` bounds the batch index.
        """
        spec, packed = self._speculator, self._packed
        source = packed.sample_row[:rows]
        drafted = self._rows(rows)
        # A block's anchor is its first packed row.
        anchors = spec.input_buffers.input_ids[(source - drafted.step - 1).clamp(min=0)].long()
        hidden = hidden[source]
        candidates, unary = spec.model.compute_candidates(hidden)
        scores = packed_edge_scores(
            spec.model.model.candidate_selector, candidates, unary, hidden, anchors, drafted.step
        )
        self._walk.run(
            drafted, num_reqs, candidates, scores, packed.temperature, packed.seeds,
            spec.draft_tokens, spec.draft_logits, spec.use_fp64_gumbel,
        )  # fmt: skip
        if self.estimators is not None:
            chosen = spec.draft_tokens[drafted.batch.clamp(max=num_reqs - 1), drafted.step]
            previous = torch.where(drafted.step == 0, anchors, chosen.roll(1))
            self._post_logits[drafted.batch, drafted.step] = self.estimators.post_logits(
                hidden, previous, chosen
            )

    def _rows(self, rows: int) -> DraftRows:
        packed = self._packed
        # The first request whose drafts end after the row; past D, one past the last request.
        batch = torch.searchsorted(packed.sample_start[1:], self._row[:rows], right=True)
        return DraftRows(
            batch=batch,
            step=packed.sample_step[:rows].long(),
            slot=packed.sample_slot[:rows],
            position=packed.sample_pos[:rows],
        )
