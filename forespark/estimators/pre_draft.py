"""Pre-draft estimator: how many tokens of each candidate length would be accepted (section 4.2).

For request i with context feature c_i (the row of H_feat at the last accepted token: the drafter's
`hidden_norm(fc(aux hidden states))`) and anchor embedding e_i,

    u = SiLU(W_c c + W_e e),  z = W_o u,  S[d, j] = prod_{t <= j} sigma(a[d, t] z[d, t] + b[d, t]).

z is a row-major triangle: row d (1..K) holds t = 1..d, starting at d (d - 1) / 2. A directional
drafter (causal within its block) has the single row K, of which every shorter row is a prefix.
"""

from __future__ import annotations

import torch
from torch import nn


def triangle_size(num_speculative_tokens: int) -> int:
    """Number of logits in the triangle of K rows."""
    return num_speculative_tokens * (num_speculative_tokens + 1) // 2


def row_start(draft_len: int) -> int:
    """Index of t = 1 in row `draft_len` (1..K) of the triangle."""
    return draft_len * (draft_len - 1) // 2


def triangle_index(num_speculative_tokens: int, directional: bool = False) -> torch.Tensor:
    """int64 [K, K]: index into z of (row d - 1, column j - 1); 0 where j > d (mask it)."""
    steps = torch.arange(num_speculative_tokens)
    row = torch.zeros_like(steps) if directional else steps * (steps + 1) // 2
    return (row[:, None] + steps[None, :]).masked_fill(steps[None, :] > steps[:, None], 0)


class PreDraftEstimator(nn.Module):
    """Context feature and anchor embedding to conditional-acceptance logits.

    `forward(context [n, H], anchor [n, E]) -> f32 [n, K(K+1)/2]` (or `[n, K]` when directional).
    """

    def __init__(
        self,
        hidden_size: int,
        embed_size: int,
        num_speculative_tokens: int,
        rank: int = 256,
        directional: bool = False,
    ) -> None:
        super().__init__()
        self.num_speculative_tokens = num_speculative_tokens
        self.rank = rank
        self.directional = directional
        outputs = num_speculative_tokens if directional else triangle_size(num_speculative_tokens)
        self.context = nn.Linear(hidden_size, rank)
        self.anchor = nn.Linear(embed_size, rank, bias=False)
        self.out = nn.Linear(rank, outputs)

    def forward(self, context: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        dtype = self.context.weight.dtype
        hidden = self.context(context.to(dtype)) + self.anchor(anchor.to(dtype))
        logits: torch.Tensor = self.out(nn.functional.silu(hidden))
        return logits.float()


def survival(
    logits: torch.Tensor,  # f32 [n, K(K+1)/2] or [n, K] (directional)
    num_speculative_tokens: int,
    scale: torch.Tensor | None = None,  # a, same trailing shape as logits
    bias: torch.Tensor | None = None,  # b
    directional: bool = False,
) -> torch.Tensor:
    """S f32 [n, K, K]: Pr(at least j accepted | d drafted), 0 where j > d (equation 3)."""
    if scale is not None:
        logits = logits * scale
    if bias is not None:
        logits = logits + bias
    index = triangle_index(num_speculative_tokens, directional).to(logits.device)
    accept = torch.sigmoid(logits)[:, index]
    curves = accept.cumprod(dim=-1)
    steps = torch.arange(num_speculative_tokens, device=logits.device)
    return curves.masked_fill(steps[None, None, :] > steps[None, :, None], 0.0)


def single_curve(curves: torch.Tensor) -> torch.Tensor:
    """Row K for every length ("SC"): S f32 [n, K, K] of prefixes of the full-block curve."""
    full = curves[:, -1:, :].expand_as(curves)
    steps = torch.arange(curves.shape[-1], device=curves.device)
    return full.masked_fill(steps[None, None, :] > steps[None, :, None], 0.0)
