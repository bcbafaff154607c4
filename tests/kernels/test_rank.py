"""`rank`: the kernel against its reference and against a sort written out in Python.

Lengths are integers and every comparison is exact: the kernel compares bit patterns, so there is no
rounding to tolerate.
"""

from __future__ import annotations

import pytest
import torch
from forespark.triton_kernels.rank import MAX_ROWS, launch_rank, rank
from forespark.triton_kernels.rank_ref import rank_ref

INF = float("inf")
SIZES = [(0, 15), (1, 1), (1, 15), (15, 15), (16, 16), (17, 15), (31, 7), (65, 3)]


def plain_rank(scores, limits, budget, order, floor):
    """Lengths from one Python sort of (tier, score, slot, position)."""
    entries = []
    for row, (values, limit) in enumerate(zip(scores.tolist(), limits.tolist(), strict=True)):
        for position in range(min(max(limit, 0), len(values))):
            value = -INF if values[position] != values[position] else values[position]
            entries.append((position >= floor, -value, order[row], position, row))
    lengths = [0] * len(limits)
    for *_, row in sorted(entries)[: max(budget, 0)]:
        lengths[row] += 1
    return lengths


def random_case(generator, num_rows, width):
    """Sorted rows with ties, -inf tails, signed zeros, any limits, slots, floor and budget."""

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    scores = torch.rand(num_rows, width, generator=generator)
    kind = draw(0, 6)
    if kind == 0:
        scores = (scores * 3).round() / 3
    elif kind == 1:
        scores = torch.full_like(scores, 0.25)
    elif kind == 2:
        scores = scores.masked_fill(scores < 0.4, -INF)
    elif kind == 3:
        scores = scores * 1e-42  # denormals: flushing them would tie everything
    elif kind == 4:
        scores = (scores - 0.5).sign() * 0.0  # 0.0 and -0.0 tie
    scores = scores.sort(dim=1, descending=True).values
    limits = torch.randint(-1, width + 2, (num_rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(3 * num_rows + 1, generator=generator)[:num_rows].int()
    order = slots if draw(0, 2) else None
    return scores, limits, draw(-1, num_rows * width + 2), order, (0, 0, 1, 3)[draw(0, 4)]


def run_kernel(device, case, **tuning):
    scores, limits, budget, order, floor = case
    out = torch.full((scores.shape[0],), -77, dtype=torch.int32, device=device)
    order = None if order is None else order.to(device)
    launch_rank(scores.to(device), limits.to(device), budget, out, order, floor, **tuning)
    return out.cpu()


def check_exact(case, out):
    scores, limits, budget, order, floor = case
    want = rank_ref(scores, limits, budget, order, floor)
    assert out.tolist() == want.tolist()
    total = int(limits.clamp(0, scores.shape[1]).sum())
    assert int(out.sum()) == min(max(budget, 0), total)


@pytest.mark.parametrize("num_rows, width", SIZES)
def test_reference_matches_a_sort(num_rows, width):
    """Catches a wrong key order in the specification itself, which every other test leans on."""
    generator = torch.Generator().manual_seed(num_rows)
    for _ in range(30):
        scores, limits, budget, order, floor = random_case(generator, num_rows, width)
        out = rank_ref(scores, limits, budget, order, floor)
        slots = list(range(num_rows)) if order is None else order.tolist()
        assert out.tolist() == plain_rank(scores, limits, budget, slots, floor)


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("num_rows, width", SIZES)
def test_kernel_matches_reference(device, num_rows, width, ways):
    """Catches an off-by-one in the search interval, the packed counts or the padded block."""
    generator = torch.Generator().manual_seed(100 * num_rows + ways)
    for _ in range(4):
        case = random_case(generator, num_rows, width)
        check_exact(case, run_kernel(device, case, ways=ways))


def test_a_thousand_adversarial_cases(device):
    """Catches rare meetings of ties, limits, floors and budgets that no hand-made case has."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(1000):
        num_rows = int(torch.randint(1, 9, (1,), generator=generator))
        width = int(torch.randint(1, 9, (1,), generator=generator))
        case = random_case(generator, num_rows, width)
        check_exact(case, run_kernel(device, case))


@pytest.mark.gpu
def test_a_hundred_thousand_cases(device):
    """Catches races and compiler bugs that the interpreter, which runs serially, cannot show."""
    generator = torch.Generator().manual_seed(8)
    shapes = [(1, 15), (16, 16), (61, 15), (64, 15), (129, 15), (512, 15), (2048, 16)]
    repeats = [40_000, 30_000, 15_000, 10_000, 4_000, 900, 100]
    for (num_rows, width), count in zip(shapes, repeats, strict=True):
        for start in range(0, count, 100):
            cases = [random_case(generator, num_rows, width) for _ in range(min(100, count))]
            outs = [run_kernel_async(device, case, ways=2 + start // 100 % 3) for case in cases]
            for case, out in zip(cases, torch.stack(outs).cpu(), strict=True):
                assert out.tolist() == rank_ref(*case).tolist()


def run_kernel_async(device, case, **tuning):
    scores, limits, budget, order, floor = case
    out = torch.full((scores.shape[0],), -77, dtype=torch.int32, device=device)
    order = None if order is None else order.to(device)
    return launch_rank(scores.to(device), limits.to(device), budget, out, order, floor, **tuning)


@pytest.mark.parametrize("budget", [0, 1, 29, 30, 31, 74, 75])
def test_equal_scores_go_to_lower_slots(device, budget):
    """Catches a tie broken by batch order, which differs between ranks after a reorder."""
    case = (torch.ones(5, 15), torch.full((5,), 15).int(), budget, torch.tensor([4, 9, 0, 7, 2]), 0)
    case = (*case[:3], case[3].int(), 0)
    out = run_kernel(device, case).tolist()
    by_slot = [out[row] for row in (2, 4, 0, 3, 1)]
    assert by_slot == [min(max(budget - 15 * place, 0), 15) for place in range(5)]


def test_minus_infinity_is_eligible_but_last(device):
    """Catches a split that sums to less than the budget when only -inf entries are left."""
    scores = torch.tensor([[0.5, -INF, -INF], [0.4, 0.3, -INF]])
    limits = torch.tensor([3, 3], dtype=torch.int32)
    lengths = [run_kernel(device, (scores, limits, budget, None, 0)).tolist() for budget in (3, 4)]
    assert lengths == [[1, 2], [2, 2]]


def test_nan_never_leaves_the_range(device):
    """Catches a NaN key that counts as a winner twice or pushes a length past its limit."""
    scores = torch.tensor([[float("nan")] * 4, [0.5, float("nan"), 0.4, float("nan")]])
    limits = torch.tensor([2, 4], dtype=torch.int32)
    for budget in range(8):
        out = run_kernel(device, (scores, limits, budget, None, 0))
        assert int(out.sum()) == min(budget, 6) and bool((out >= 0).all() and (out <= limits).all())
        assert out.tolist() == rank_ref(scores, limits, budget).tolist()


def test_floors_rank_before_better_scores(device):
    """Catches a floor paid after the top scores, which would starve a request of its minimum."""
    scores = torch.tensor([[0.9, 0.8, 0.7], [0.1, 0.05, 0.01]])
    limits = torch.tensor([3, 3], dtype=torch.int32)
    by_budget = [run_kernel(device, (scores, limits, b, None, 1)).tolist() for b in range(5)]
    assert by_budget == [[0, 0], [1, 0], [1, 1], [2, 1], [3, 1]]


def test_budget_on_the_device(device):
    """Catches a kernel that bakes the budget in instead of reading it at replay time."""
    scores = torch.tensor([[0.9, 0.2], [0.8, 0.7]], device=device)
    limits = torch.full((2,), 2, dtype=torch.int32, device=device)
    out = torch.full((2,), -77, dtype=torch.int32, device=device)
    for budget, want in ((1, [1, 0]), (3, [1, 2])):
        launch_rank(scores, limits, torch.tensor([budget], dtype=torch.int32, device=device), out)
        assert out.tolist() == want


def test_wrapper_runs_the_reference_on_cpu_and_names_what_is_wrong():
    """Catches a refusal that does not say which argument is wrong and what it was."""
    scores, limits = torch.rand(3, 4), torch.full((3,), 4, dtype=torch.int32)
    out = torch.empty(3, dtype=torch.int32)
    assert rank(scores, limits, 5, out) is out and int(out.sum()) == 5
    with pytest.raises(ValueError, match=r"rank: limits is torch\.int64 \[3\].*torch\.int32"):
        rank(scores, limits.long(), 5, out)
    with pytest.raises(ValueError, match=r"rank: out is .*\[2\].*shape must be \[3\]"):
        rank(scores, limits, 5, out[:2])
    with pytest.raises(ValueError, match=r"rank: scores is .*contiguous"):
        rank(torch.rand(4, 3).T, limits, 5, out)
    with pytest.raises(ValueError, match=r"3 x 17; at most 2048 rows of 1\.\.16"):
        rank(torch.rand(3, 17), limits, 5, out)


@pytest.mark.gpu
def test_replay_reads_the_new_budget(device):
    """Catches anything in the launch that a CUDA graph freezes or that allocates on the host."""
    scores = torch.rand(MAX_ROWS, 16, device=device).sort(dim=1, descending=True).values
    limits = torch.full((MAX_ROWS,), 16, dtype=torch.int32, device=device)
    budget = torch.tensor([100], dtype=torch.int32, device=device)
    out = torch.full((MAX_ROWS,), -77, dtype=torch.int32, device=device)
    rank(scores, limits, budget, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rank(scores, limits, budget, out)
    for value in (0, 1, 12_345, MAX_ROWS * 16):
        budget.fill_(value)
        graph.replay()
        assert out.cpu().tolist() == rank_ref(scores.cpu(), limits.cpu(), value).tolist()
