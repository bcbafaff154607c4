"""CPU sampling kernels: random numbers, exact distributions, logit processors."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from forespark.cpu_mode import kernels_logits, kernels_sampling, noise
from forespark.cpu_mode.nucleus import apply_top_k_top_p


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_uniforms_are_uniform_and_uncorrelated():
    """Catches a hash that is biased, or rows that are shifted copies of each other."""
    keys = noise.row_keys(np.arange(64), np.arange(64) + 7, noise.TARGET_STREAM)
    draws = noise.token_uniform(keys, np.arange(4096, dtype=np.uint32))
    assert stats.kstest(draws.ravel()[:50_000], "uniform").pvalue > 1e-3
    for a, b in (
        (draws[0], draws[1]),
        (draws[3, 1:], draws[3, :-1]),
        (draws[5, 1:], draws[6, :-1]),
    ):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert stats.kstest(noise.row_uniform(keys), "uniform").pvalue > 1e-3
    fine = noise.token_uniform(keys[:2], np.arange(4096, dtype=np.uint32), fp64=True)
    assert fine.dtype == np.float64 and 0.0 < fine.min() and fine.max() < 1.0
    assert stats.kstest(fine.ravel(), "uniform").pvalue > 1e-3


def test_keys_depend_on_seed_position_and_stream_only():
    """Catches drafting and verification sharing noise, and draws depending on the batch."""
    seeds, where = np.array([5, 5, 6]), np.array([1, 2, 1])
    target = noise.row_keys(seeds, where, noise.TARGET_STREAM)
    draft = noise.row_keys(seeds, where, noise.DRAFT_STREAM)
    assert len({*target.tolist(), *draft.tolist()}) == 6
    alone = noise.row_keys(seeds[2:], where[2:], noise.TARGET_STREAM)
    assert alone[0] == target[2]


def gumbel(logits, positions, temps, seeds, slots, **options):
    rows = len(positions)
    token, score = torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 2)
    kernels_sampling.gumbel_sample(
        token, 2, score, 2, None, 0, 0, None, None, 0, logits, logits.shape[1], ints(*slots),
        torch.tensor(seeds), torch.tensor(positions), torch.tensor(temps), logits.shape[1],
        **options,
    )  # fmt: skip
    return token.gather(1, score.argmax(1, keepdim=True)).flatten()


def test_gumbel_sampling_has_the_softmax_distribution():
    """Catches a temperature applied twice or never, and noise of the wrong law."""
    n, logits = 20_000, torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    drawn = gumbel(logits.repeat(n, 1), list(range(n)), [0.7], [3], [0] * n, USE_FP64=False)
    expected = torch.softmax(logits.double() / 0.7, 0).numpy() * n
    assert stats.chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 1e-3


def test_gumbel_greedy_rows_and_reproducibility():
    """Catches noise on greedy rows in mixed batches, and draws that change with the batch."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    mixed = gumbel(logits, [4, 5, 6], [0.0, 1.0], [1, 2], [0, 1, 1])
    assert mixed[0] == logits[0].argmax()
    assert torch.equal(gumbel(logits[2:], [6], [0.0, 1.0], [1, 2], [1]), mixed[2:])


def test_top_k_top_p_against_a_sorted_reference():
    """Catches a nucleus that is one token short or long, also where it exceeds the candidates."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3000, generator=generator) * 2
    logits[5] *= 0.01  # nearly flat: the nucleus is larger than the candidate list
    k, p = ints(3000, 5, 40, 3000, 1, 3000), torch.tensor([0.5, 1.0, 0.7, 1.0, 0.2, 0.9])
    kept = apply_top_k_top_p(logits.clone(), k, p).isfinite()
    for row in range(6):
        values, order = logits[row].sort(descending=True)
        values = values[: int(k[row])]
        before = values.softmax(0).cumsum(0) - values.softmax(0)
        count = len(values) if p[row] == 1.0 else max(int((before < p[row]).sum()), 1)
        expected = set(order[:count].tolist())
        assert set(kept[row].nonzero().flatten().tolist()) == expected
    assert apply_top_k_top_p(logits, None, None) is logits


def test_min_p_and_temperature():
    """Catches min-p touching rows that did not ask for it."""
    logits = torch.tensor([[0.0, -1.0, -3.0], [0.0, -1.0, -3.0]])
    kernels_logits.min_p(logits, 3, ints(0, 1), torch.tensor([0.0, 0.2]), 3)
    assert logits.isfinite().tolist() == [[True, True, True], [True, True, False]]
    logits = torch.ones(3, 2)
    kernels_sampling.temperature(logits, 2, ints(0, 1, 2), torch.tensor([0.0, 1.0, 0.5]), 2)
    assert logits.tolist() == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0]]


def test_penalties_count_drafts_before_the_row():
    """Catches drafts missing from the penalties of later rows of the same request."""
    vocab, prompt, output = 40, [3, 33], [5, 5]
    known = torch.tensor([prompt + output], dtype=torch.int32)
    mask = torch.zeros(1, 2, dtype=torch.int32)
    counts = torch.zeros(1, vocab, dtype=torch.int32)
    kernels_logits.bincount(torch.tensor([0]), known, 4, ints(2), ints(4), mask, 2, counts, vocab)
    logits = torch.linspace(-1, 1, 3 * vocab).view(3, vocab)
    before, inputs = logits.clone(), [5, 7, 5]
    rep, freq, pres = 1.5, 0.25, 0.125
    kernels_logits.penalties(
        logits, vocab, ints(0, 0, 0), ints(*inputs), ints(0, 1, 2), torch.tensor([rep]),
        torch.tensor([freq]), torch.tensor([pres]), mask, 2, counts, vocab, vocab,
    )  # fmt: skip
    for row in range(3):
        generated = output + inputs[1 : row + 1]
        for token in range(vocab):
            value, times = float(before[row, token]), generated.count(token)
            if times or token in prompt:
                value = value / rep if value > 0 else value * rep
            value -= freq * times + pres * (times > 0)
            assert abs(float(logits[row, token]) - value) < 1e-5


def test_biases_allowed_tokens_and_minimum_length():
    """Catches a stop token allowed too early, and the allowed list losing its logits."""
    empty = torch.zeros(2, 4, dtype=torch.int32)
    logits = torch.arange(10.0).repeat(2, 1)
    kernels_logits.logit_bias(
        logits, 10, 10, ints(0, 1), ints(2, 0), torch.tensor([[1, 8, 0, 0], [0, 0, 0, 0]]), 4,
        ints(0, 1), torch.tensor([[0] * 4, [2, 0, 0, 0]]), 4, torch.full((2, 4), 0.5), 4,
        torch.tensor([4, 4]), ints(0, 6), ints(0, 1), ints(0, 0), torch.full_like(empty, 9), 4,
    )  # fmt: skip
    assert logits[0].isfinite().nonzero().flatten().tolist() == [1, 8] and logits[0, 8] == 8
    assert logits[1, 2] == 2.5 and logits[1, 9] == -float("inf") and logits[1, 8] == 8


def test_bad_words_match_across_output_and_drafts():
    """Catches a bad word whose beginning was drafted in the same step."""
    logits = torch.zeros(2, 20)
    kernels_logits.bad_words(
        logits, 20, ints(0, 0), torch.tensor([[4, 5, 6, 9]]), 4, torch.tensor([[0, 3, 4]]), 3,
        ints(2), torch.tensor([[1, 2, 4, 0, 0]]), 5, ints(2), ints(3), ints(4, 5), ints(0, 1),
    )  # fmt: skip
    assert (logits == -float("inf")).nonzero().tolist() == [[0, 9], [1, 6], [1, 9]]


def test_grammar_masks_skip_trimmed_rows():
    """Catches a mask applied to another request's row after trimming."""
    logits = torch.zeros(3, 40)
    allowed = torch.full((3, 2), -1, dtype=torch.int32)
    allowed[:, 0] = ~(1 << 3)
    allowed[0, 1] = ~(1 << 2)
    mapping = ints(
        0, 1, 4
    )  # request 0 positions 0 and 1 (trimmed to one row), request 1 position 0
    kernels_logits.grammar_bitmask(
        logits, 40, mapping, ints(0, 1, 3), allowed, 2, 40, MASK_STRIDE=4
    )
    assert (logits == -float("inf")).nonzero().tolist() == [[0, 3], [0, 34], [1, 3]]


def test_logprobs_ranks_and_requested_token_ids():
    """Catches log-probabilities of the wrong tokens."""
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[3, 4], [5, 6]])
    out = torch.empty(2, 2)
    kernels_sampling.topk_log_softmax(out, logits, 30, ids, 2, 2, 30)
    torch.testing.assert_close(out, logits.log_softmax(1).gather(1, ids))
    rank = torch.empty(2, dtype=torch.int64)
    kernels_sampling.ranks(rank, logits, 30, ids[:, 0], 30)
    assert rank.tolist() == [
        int((row >= row[i]).sum()) for row, i in zip(logits, [3, 5], strict=True)
    ]
    columns, valid = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.bool)
    kernels_sampling.fill_logprob_token_ids(
        columns, 4, valid, 4, torch.tensor([1, 2]), ints(7, 8).repeat(2, 1), 2, ints(1, 0),
        ints(0, 3), torch.tensor([[0, 0, 0], [11, 12, 13]]), 3, NUM_TOPK=2,
    )  # fmt: skip
    assert columns.tolist() == [[1, 11, 12, 13], [2, 7, 8, 0]]
    assert valid.tolist() == [[True] * 4, [True, True, True, False]]
