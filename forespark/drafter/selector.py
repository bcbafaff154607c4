"""The path selector over packed draft rows.

Scoring runs on the sum(d_i) drafted rows. The walk itself is vLLM's own kernel over [n, K], whose
rows past a draft are inert, so that a draft of length d equals a stock draft of length d token for
token, sampled ones included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler


def packed_edge_scores(
    selector: torch.nn.Module,
    candidates: torch.Tensor,  # i64 [R, top_k]
    unary: torch.Tensor,  # f32 [R, top_k]
    hidden: torch.Tensor,  # [R, H]
    anchors: torch.Tensor,  # i64 [R], the anchor of the row's request
    steps: torch.Tensor,  # int [R], 0 for the first drafted position
) -> torch.Tensor:
    """[R, top_k, top_k]: score of each candidate after each candidate of the previous position.

    The predecessor of a row is the row before it; of a draft's first row, its anchor.
    """
    before = candidates.roll(1, dims=0)
    predecessors = torch.where(steps[:, None] == 0, anchors[:, None], before)
    gate = selector.predecessor_codebook[predecessors] * selector.hidden_projection(hidden)[:, None]
    successors = selector.successor_codebook[candidates]
    return unary[:, None, :] + torch.einsum("rpe,rce->rpc", gate, successors)


@dataclass
class DraftRows:
    """The drafted rows of one packed batch, R = sum(d_i)."""

    batch: torch.Tensor  # i64 [R]: row -> batch index; n for padding rows
    step: torch.Tensor  # i64 [R]: 0..d_i - 1
    slot: torch.Tensor  # i64 [R]: row -> request slot; -1 for padding rows
    position: torch.Tensor  # i64 [R]: position of the predicted token


class SelectorWalk:
    """Persistent [n + 1, K] buffers around vLLM's candidate walk."""

    def __init__(self, sampler: CandidateSampler, max_num_reqs: int, device: torch.device) -> None:
        steps, top_k = sampler.num_steps, sampler.top_k
        self.sampler = sampler
        lines = max_num_reqs + 1  # the last one takes padding rows
        self.candidates = torch.zeros(lines, steps, top_k, dtype=torch.int64, device=device)
        self.scores = torch.zeros(lines, steps, top_k, top_k, dtype=torch.float32, device=device)
        self.positions = torch.zeros(lines, steps, dtype=torch.int64, device=device)
        self.slots = torch.full((lines, steps), -1, dtype=torch.int64, device=device)

    def run(
        self,
        rows: DraftRows,
        num_reqs: int,
        candidates: torch.Tensor,  # i64 [R, top_k]
        scores: torch.Tensor,  # f32 [R, top_k, top_k]
        temperature: torch.Tensor,  # f32 [slots]
        seeds: torch.Tensor,  # i64 [slots]
        draft_tokens: torch.Tensor,  # i64 [max_num_reqs, K], written
        draft_logits: torch.Tensor | None,
        use_fp64: bool,
    ) -> None:
        """Walk every draft; entries of `draft_tokens` past a draft's length are undefined."""
        at = (rows.batch, rows.step)
        # Rows past a draft keep slot -1, which the kernels leave alone.
        self.slots[:num_reqs].fill_(-1)
        self.slots[at] = rows.slot
        self.positions[at] = rows.position
        self.candidates[at] = candidates
        self.scores[at] = scores.float()
        self.sampler.sample(
            self.candidates[:num_reqs],
            self.scores[:num_reqs],
            num_reqs,
            self.positions[:num_reqs].view(-1),
            self.slots[:num_reqs].view(-1),
            temperature,
            seeds,
            draft_tokens,
            draft_logits,
            use_fp64,
        )
