"""User report 29 on the CPU kernel behind `logprob_token_ids`."""

from __future__ import annotations

import torch

from forespark.cpu_mode import kernels_sampling


def test_report_29_rows_beyond_the_placeholder_of_an_absent_top_k() -> None:
    """Catches a row without token ids of its own that reads a top k nobody asked for."""
    columns = torch.zeros(4, 3, dtype=torch.int64)
    valid = torch.zeros_like(columns, dtype=torch.bool)
    named = torch.tensor([[100, 200], [0, 0]])  # by slot; also stands in for the top k
    kernels_sampling.fill_logprob_token_ids(
        columns, 3, valid, 3, torch.tensor([1, 2, 3, 4]), named, 2, torch.tensor([1, 0, 1, 1]),
        torch.tensor([2, 0]), named, 2, NUM_TOPK=0,
    )  # fmt: skip
    assert columns.tolist() == [[1, 0, 0], [2, 100, 200], [3, 0, 0], [4, 0, 0]]
    assert valid.tolist() == [[True, False, False], [True] * 3, *[[True, False, False]] * 2]
