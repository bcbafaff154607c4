"""Post-draft estimator: how likely each drafted token is accepted given those before it (4.4).

    p[j] = sigma((w . [h_j ; s_j] + bias) / theta_j),   s_j = (W_s h_j) * E_pred(x_{j-1}),

with h_j the drafter's hidden state of position j, E_pred the selector's predecessor embedding and
x_0 the anchor. Lossless because p[j] reads x_{j-1} and h_j and never x_j: whether position j is
verified cannot depend on the token drawn there, so verification is a stopping rule.
"""

from __future__ import annotations

import torch
from torch import nn


class PostDraftEstimator(nn.Module):
    """Hidden states and previous-token embeddings to acceptance logits.

    `forward(hidden [..., H], previous [..., R]) -> f32 [...]` with `previous = E_pred(x_{j-1})`.
    """

    def __init__(self, hidden_size: int, selector_rank: int) -> None:
        super().__init__()
        self.selector = nn.Linear(hidden_size, selector_rank, bias=False)
        self.head = nn.Linear(hidden_size + selector_rank, 1)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        dtype = self.head.weight.dtype
        hidden = hidden.to(dtype)
        gated = self.selector(hidden) * previous.to(dtype)
        logits: torch.Tensor = self.head(torch.cat((hidden, gated), dim=-1)).squeeze(-1)
        return logits.float()


def post_survival(
    logits: torch.Tensor,  # f32 [n, K], rows right-padded
    draft_lens: torch.Tensor,  # int [n]
    temperature: torch.Tensor | None = None,  # theta f32 [K]
) -> torch.Tensor:
    """S~ f32 [n, K]: running product of p along each draft; -inf at positions never drafted."""
    if temperature is not None:
        logits = logits / temperature
    curve = torch.sigmoid(logits).cumprod(dim=-1)
    steps = torch.arange(logits.shape[-1], device=logits.device)
    return curve.masked_fill(steps[None, :] >= draft_lens[:, None], float("-inf"))
