"""CPU kernels of the drafter and of the stock acceptance estimator."""

from __future__ import annotations

import numpy as np
import torch

from forespark.cpu_mode import kernels_drafting, kernels_estimator


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_dflash_inputs_against_a_loop_over_requests():
    """Catches a wrong anchor, context row, cache slot or padding of the drafter's inputs."""
    k, q, n, max_reqs, block = 3, 4, 2, 3, 4
    starts, slots, rejected = [0, 4, 6], [2, 0], [1, 0]
    positions = [5, 6, 7, 8, 0, 1]
    table = torch.tensor([[7, 3, 5, 6], [0, 9, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    out = {name: torch.full((20,), -5) for name in ("ids", "pos", "qslot", "cpos", "cslot")}
    starts_out, lens = torch.full((4,), -5), torch.full((3,), -5)
    sample = [torch.full((max_reqs * k,), -5) for _ in range(3)]
    temps, seeds = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    kernels_drafting.prepare_dflash_inputs(
        out["ids"],
        out["pos"],
        starts_out,
        lens,
        out["qslot"],
        out["cpos"],
        out["cslot"],
        *sample,
        temps,
        seeds,
        torch.tensor(positions),
        ints(*starts),
        ints(*slots),
        torch.tensor([[11], [12], [13]]),
        torch.tensor([21, 22, 23]),
        ints(2, 0),
        ints(*rejected),
        torch.tensor([0.5, 0.6, 0.7]),
        torch.tensor([1, 2, 3]),
        table,
        4,
        99,
        block,
        q,
        k,
        max_reqs,
        20,
        12,
        0,
    )

    def slot(row, where):
        number = int(table[row, min(where // block, 3)])
        return number * block + where % block if number else -1

    for row in range(n):
        valid = starts[row + 1] - starts[row] - rejected[row]
        for offset, token in enumerate(range(starts[row], starts[row + 1])):
            where = positions[token] if offset < valid else 0
            assert out["cpos"][token] == where
            assert out["cslot"][token] == (slot(row, where) if offset < valid else -1)
        anchor = positions[starts[row] + valid - 1] + 1
        assert lens[row] == min(anchor + q, 12)
        for j in range(q):
            at = row * q + j
            assert out["ids"][at] == (99 if j else [13, 21][row])
            assert out["pos"][at] == min(anchor + j, 11)
            assert out["qslot"][at] == slot(row, anchor + j)
            if j:
                assert [int(s[row * k + j - 1]) for s in sample] == [at, anchor + j, slots[row]]
    assert starts_out.tolist() == [0, 4, 8, 8] and lens[2] == 0
    assert set(out["qslot"][8:].tolist()) == {-1}
    assert sample[2][6:].tolist() == [-1] * 3 and sample[0][6:].tolist() == [0] * 3
    assert temps.tolist()[2] == torch.tensor(0.7).item() and seeds.tolist() == [1, 0, 3]


def test_selector_walk_follows_the_best_path():
    """Catches a transition read from the wrong predecessor, and padding rows being written."""
    generator = torch.Generator().manual_seed(0)
    n, k, top = 3, 4, 5
    scores = torch.randn(n, k, top, top, generator=generator)
    ids = torch.randint(0, 1000, (n, k, top), generator=generator)
    slots = torch.tensor([1] * k + [-1] * k + [0] * k)
    tokens, realized = torch.full((4, k), -1), torch.full((4, k, top), 7.0)
    kernels_drafting.selector_walk(
        scores,
        ids,
        torch.arange(n * k) + 5,
        slots,
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        tokens,
        realized,
        num_steps=k,
        top_k=top,
        SAMPLE_PROBABILISTIC=True,
    )
    for row in (0, 2):
        previous = 0
        for step in range(k):
            line = scores[row, step, previous]
            assert torch.equal(realized[row, step], line)
            previous = int(line.argmax())
            assert tokens[row, step] == ids[row, step, previous]
    assert tokens[1].tolist() == [-1] * k and tokens[3].tolist() == [-1] * k


def test_cached_draft_logits_hold_only_the_newest_candidates():
    """Catches candidates of an earlier proposal surviving in the cache."""
    logits = torch.full((3, 2, 9), -float("inf"))
    cached = torch.zeros(3, 2, 2, dtype=torch.int64)
    for ids, value in (([[1, 2], [3, 4]], 0.5), ([[5, 6], [1, 3]], 1.5)):
        kernels_drafting.cache_draft_logits(
            logits,
            cached,
            torch.tensor([ids]),
            torch.full((4, 2, 2), value),
            torch.tensor([2, 2]),
            0,
            0,
            num_steps=2,
            top_k=2,
        )
    assert logits[2, 0].isfinite().nonzero().flatten().tolist() == [5, 6]
    assert logits[2, 1].isfinite().nonzero().flatten().tolist() == [1, 3]
    assert not logits[:2].isfinite().any()


def test_estimator_newton_step_equals_a_dense_solve():
    """Catches a wrong arrowhead elimination in the refit."""
    rng = np.random.default_rng(0)
    info = torch.tensor(rng.uniform(1, 2, (3, 3)), dtype=torch.float32)
    grad = torch.tensor(rng.normal(size=(3, 2)), dtype=torch.float32)
    counts = torch.tensor([30.0, 20.0, 10.0])
    a, b, c = info[:, 0].sum(), info[:, 1], info[:, 2]
    dense = torch.diag(torch.cat([a.reshape(1), c]))
    dense[0, 1:], dense[1:, 0] = b, b
    dense += 0.01 * torch.eye(4)
    step = torch.linalg.solve(dense, torch.cat([grad[:, 0].sum().reshape(1), grad[:, 1]]))
    slope, intercepts = torch.tensor([5.0]), torch.zeros(3)
    kernels_estimator.refit(
        slope, intercepts, info, 3, grad, 2, counts, NUM_SPECULATIVE_STEPS=3, L2=0.01, DAMPING=0.0
    )
    torch.testing.assert_close(slope, 5.0 + step[:1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(intercepts, step[1:], rtol=1e-4, atol=1e-4)
    assert not info.any() and not grad.any() and not counts.any()


def test_estimator_grades_accepted_drafts_and_the_first_rejected():
    """Catches unverified drafts entering the statistics."""
    info, grad, counts = torch.zeros(3, 3), torch.zeros(3, 2), torch.zeros(3)
    kernels_estimator.accumulate(
        info,
        grad,
        ints(1, 0),
        ints(2, 1),
        ints(2, 0),
        torch.ones(2, 3),
        3,
        torch.full((2, 3), 0.5),
        3,
        counts,
        2,
    )
    assert counts.tolist() == [1.0, 1.0, 0.0]
    assert grad[:, 1].tolist() == [0.5, -0.5, 0.0]
