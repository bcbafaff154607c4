"""CPU rejection sampling: greedy exactness and the exact emitted distribution.

The kernels are chained exactly as vLLM's `rejection_sample` launches them, on a vocabulary of 6.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from forespark.cpu_mode import kernels_accept, kernels_rejection, kernels_resample

V = 6


def reject(target, draft, drafts, lengths, temps, seeds, where, *, block=False):
    """target [rows, V], draft [slots, K, V] or None, drafts [rows] -> tokens of each request."""
    rows, n, steps = target.shape[0], len(lengths), max(lengths)
    cu = torch.tensor([0, *np.cumsum([d + 1 for d in lengths])], dtype=torch.int32)
    slots = torch.arange(n, dtype=torch.int32)
    idx = torch.repeat_interleave(slots, cu.diff().long())
    local = torch.cat([torch.arange(d + 1, dtype=torch.int32) for d in lengths])
    stat = [torch.full((rows, 2), float("nan")) for _ in range(4)]
    argmax = torch.full((rows, 2), -1)
    temps, seeds, where = torch.tensor(temps), torch.tensor(seeds), torch.tensor(where)
    has = draft is not None
    kernels_rejection.local_logits_stats(
        argmax, 2, stat[0], 2, stat[1], 2, stat[2], 2, stat[3], 2, target, V, draft, 0, 0, idx,
        local, temps, V, steps, HAS_DRAFT_LOGITS=has,
    )  # fmt: skip
    log_p = mass = None
    if block:
        log_p, mass = torch.full((rows,), float("nan")), torch.full((rows, 2), float("nan"))
        kernels_rejection.cumulative_log_p(
            log_p, target, V, stat[0], 2, stat[1], 2, drafts, draft, 0, 0, stat[2], 2, stat[3], 2,
            cu, slots, temps, 2, HAS_DRAFT_LOGITS=has,
        )  # fmt: skip
        if has:
            kernels_rejection.local_residual_mass(
                mass, 2, log_p, target, V, stat[0], 2, stat[1], 2, draft, 0, 0, stat[2], 2,
                stat[3], 2, drafts, idx, local, temps, V, steps, 2,
            )  # fmt: skip
    sampled = torch.full((n, steps + 1), -1)
    count = torch.full((n,), -1, dtype=torch.int32)
    lse = [torch.full((n,), float("nan")) for _ in range(2)]
    kernels_accept.rejection(
        sampled, steps + 1, count, lse[0], lse[1], target, V, argmax, 2, stat[0], 2, stat[1], 2,
        drafts, draft, 0, 0, stat[2], 2, stat[3], 2, cu, slots, temps, seeds, where, None, log_p,
        mass if has else None, 2, 2, HAS_DRAFT_LOGITS=has, USE_BLOCK_VERIFICATION=block,
    )  # fmt: skip
    best = torch.full((n, 2), -1)
    kernels_resample.resample(
        best, 2, best, 2, target, V, lse[0], draft, 0, 0, lse[1], count, cu, idx, drafts, temps,
        seeds, where, log_p, None, 0, None, None, 0, 0, V, HAS_DRAFT_LOGITS=has,
        USE_BLOCK_VERIFICATION=block,
    )  # fmt: skip
    kernels_resample.insert_resampled(
        sampled, steps + 1, count, best, 2, best, 2, 2, cu, idx, temps
    )
    return [sampled[i, : int(count[i])].tolist() for i in range(n)]


def test_greedy_keeps_the_targets_own_choice():
    """Catches an accepted draft that the target would not have produced, and lost bonus tokens."""
    target = torch.eye(V)[[1, 2, 3, 4, 0, 5]]
    drafts = torch.tensor([0, 1, 2, 0, 0, 0])  # 1, 2 agree, then 0 disagrees with 3; second: 0 ok
    out = reject(target, None, drafts, [3, 1], [0.0, 0.0], [1, 1], list(range(6)))
    assert out == [[1, 2, 3], [0, 5]]


def test_placeholder_drafts_are_rejected_and_replaced_by_the_target():
    """Catches -1 (not drafted) being accepted, or biasing the token that replaces it."""
    target = torch.tensor([[0.0, 9.0, 0, 0, 0, 0]]).repeat(4, 1) * 10
    drafts = torch.tensor([0, -1, 0, -1])
    out = reject(target, None, drafts, [1, 1], [0.0, 1.0], [1, 1], [3, 4, 3, 4])
    assert out == [[1], [1]]


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("one_hot", [False, True], ids=["draft-logits", "one-hot"])
def test_the_emitted_distribution_is_the_targets(block, one_hot):
    """Catches any bias of acceptance or resampling: chi-square over all emitted pairs of tokens."""
    n, temp = 12_000, 0.8
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(V, generator=generator), torch.randn(V, V, generator=generator)
    q_logits = torch.randn(2, V, generator=generator)
    if one_hot:
        draws = torch.randint(0, V, (n, 2), generator=generator)
    else:
        probs = torch.softmax(q_logits / temp, 1)
        draws = torch.multinomial(probs, n, replacement=True, generator=generator).T
    # Rows: after nothing, after the first draft, after both (bonus), tempered like vLLM's.
    bonus = torch.randn(V, generator=generator)
    target = torch.stack(
        [first.expand(n, V), second[draws[:, 0]], bonus.expand(n, V)], dim=1
    ).reshape(3 * n, V)
    drafts = torch.stack([torch.zeros(n, dtype=torch.long), draws[:, 0], draws[:, 1]], 1).flatten()
    out = reject(
        target / temp,
        None if one_hot else q_logits.expand(n, 2, V),
        drafts,
        [2] * n,
        [temp] * n,
        list(range(n)),
        [10, 11, 12] * n,
        block=block,
    )
    p_first = torch.softmax(first.double() / temp, 0)
    observed = np.bincount([tokens[0] for tokens in out], minlength=V)
    assert stats.chisquare(observed, p_first.numpy() * n).pvalue > 1e-3
    # Given that a second token was emitted, it follows the target given the first.
    p_second = torch.softmax(second.double() / temp, 1)
    for token in range(V):
        follow = [tokens[1] for tokens in out if len(tokens) > 1 and tokens[0] == token]
        if len(follow) > 200:
            observed = np.bincount(follow, minlength=V)
            expected = p_second[token].numpy() * len(follow)
            assert stats.chisquare(observed, expected).pvalue > 1e-4
    third = [tokens[2] for tokens in out if len(tokens) > 2]
    expected = torch.softmax(bonus.double() / temp, 0).numpy() * len(third)
    assert stats.chisquare(np.bincount(third, minlength=V), expected).pvalue > 1e-3


def test_the_outcome_does_not_depend_on_the_batch():
    """Catches randomness tied to the batch row instead of (seed, position)."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(6, V, generator=generator)
    draft, drafts = torch.randn(2, 2, V, generator=generator), torch.tensor([0, 1, 2, 0, 3, 4])
    both = reject(target, draft, drafts, [2, 2], [1.0, 0.9], [7, 8], [4, 5, 6, 1, 2, 3])
    alone = reject(target[3:], draft[1:], drafts[3:], [2], [0.9], [8], [1, 2, 3])
    assert both[1] == alone[0]
