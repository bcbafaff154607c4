"""Split a budget over requests by ranking their scores: one launch, one program, exact.

The winners of a global top-`budget` are those above some score, so the kernel searches for that
score instead of sorting. Floats map to int32 keys of the same order, and an interval [lo, hi) that
holds the key of the last winner shrinks by a factor of WAYS per round. A round is one block-wide
sum: the counts of its WAYS - 1 probes travel packed in one integer. It stops as soon as the keys
>= lo number exactly the budget (on distinct scores about half way), or when lo is a single key that
several entries share. Those ties go to lower `order` first: a second search over `order` finds the
row where the rest of the budget runs out, without a sort, a prefix sum or scratch memory.
"""

from __future__ import annotations

import torch
from forespark.triton_kernels._triton import next_power_of_2, tl, triton
from forespark.triton_kernels.checks import check_tensor, runs_on_gpu
from forespark.triton_kernels.rank_ref import rank_ref

MAX_ROWS = 2048
MAX_WIDTH = 16  # packed counts have 16 bits: MAX_ROWS * MAX_WIDTH must stay below 2^16


@triton.jit
def _probe(probe, count, budget, lo, hi, count_lo, count_hi):
    # Fold one probe into the interval. Probes of a round come in ascending order.
    keeps = count >= budget
    lower = keeps & (probe > lo)
    upper = (count < budget) & (probe < hi)
    return (
        tl.where(lower, probe, lo),
        tl.where(upper, probe, hi),
        tl.where(lower, count, count_lo),
        tl.where(upper, count, count_hi),
    )


@triton.jit(do_not_specialize=["budget_arg", "num_rows", "floor"])
def _rank_kernel(
    scores_ptr,  # f32 [n, K]
    limits_ptr,  # i32 [n]
    order_ptr,  # i32 [n]
    budget_arg,  # integer, or a pointer to one
    out_ptr,  # i32 [n]
    num_rows,
    floor,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BUDGET_ON_DEVICE: tl.constexpr,
    WAYS: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_ROWS)
    position = tl.arange(0, BLOCK_WIDTH)[None, :]
    in_rows = rows < num_rows
    limit = tl.load(limits_ptr + rows, mask=in_rows, other=0)
    limit = tl.minimum(tl.maximum(limit, 0), WIDTH)
    # Loads do not wait for the limits, so that the two memory latencies overlap.
    bits = tl.load(
        scores_ptr + rows[:, None] * WIDTH + position,
        mask=in_rows[:, None] & (position < WIDTH),
        other=0.0,
    ).to(tl.int32, bitcast=True)
    if HAS_ORDER:
        order = tl.load(order_ptr + rows, mask=in_rows, other=0)
    else:
        order = rows
    if BUDGET_ON_DEVICE:
        budget = tl.load(budget_arg).to(tl.int32)
    else:
        budget = budget_arg.to(tl.int32)

    floors = tl.minimum(limit, tl.maximum(floor, 0))
    sums = tl.sum(limit + floors * 65536, axis=0)
    limit_total = sums & 0xFFFF
    floor_total = (sums >> 16) & 0xFFFF
    # Either the budget pays every floor and the rest compete, or only the floors compete.
    budget = tl.minimum(tl.maximum(budget, 0), limit_total)
    pays_floors = budget >= floor_total
    base = tl.where(pays_floors, floors, 0)
    stop = tl.where(pays_floors, limit, floors)
    budget = tl.where(pays_floors, budget - floor_total, budget)
    count_lo = tl.where(pays_floors, limit_total - floor_total, floor_total)
    count_hi = budget * 0

    bits = tl.where(bits == -2147483648, 0, bits)  # -0.0 ties with 0.0
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, -8388608, bits)  # NaN ranks as -inf
    keys = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    eligible = (position >= base[:, None]) & (position < stop[:, None])
    keys = tl.where(eligible, keys, -2147483648)

    # Invariants: count(keys >= lo) = count_lo >= budget > count_hi = count(keys >= hi).
    lo = count_lo.to(tl.int64) * 0 - 2139095041  # the key of -inf
    hi = count_lo.to(tl.int64) * 0 + 2139095041  # one past the key of +inf
    while (count_lo > budget) & (budget > 0) & (hi - lo > 1):
        span = hi - lo
        if WAYS == 2:
            middle = lo + span // 2
            count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32))
            lo, hi, count_lo, count_hi = _probe(middle, count, budget, lo, hi, count_lo, count_hi)
        elif WAYS == 3:
            step = tl.maximum((span * 341) >> 10, 1)
            first = lo + step
            second = hi - step
            packed = (keys >= first.to(tl.int32)).to(tl.int32)
            packed += tl.where(keys >= second.to(tl.int32), 65536, 0)
            counts = tl.sum(packed)
            count = counts & 0xFFFF
            lo, hi, count_lo, count_hi = _probe(first, count, budget, lo, hi, count_lo, count_hi)
            count = (counts >> 16) & 0xFFFF
            lo, hi, count_lo, count_hi = _probe(second, count, budget, lo, hi, count_lo, count_hi)
        else:
            step = tl.maximum(span >> 2, 1)
            first = lo + step
            second = tl.minimum(first + step, hi - 1)
            third = tl.minimum(second + step, hi - 1)
            low = (keys >= first.to(tl.int32)).to(tl.int32)
            low += tl.where(keys >= second.to(tl.int32), 65536, 0)
            high = (keys >= third.to(tl.int32)).to(tl.int64)
            counts = tl.sum((low.to(tl.int64) & 0xFFFFFFFF) + (high << 32))
            count = (counts & 0xFFFF).to(tl.int32)
            lo, hi, count_lo, count_hi = _probe(first, count, budget, lo, hi, count_lo, count_hi)
            count = ((counts >> 16) & 0xFFFF).to(tl.int32)
            lo, hi, count_lo, count_hi = _probe(second, count, budget, lo, hi, count_lo, count_hi)
            count = (counts >> 32).to(tl.int32)
            lo, hi, count_lo, count_hi = _probe(third, count, budget, lo, hi, count_lo, count_hi)

    above = keys >= hi.to(tl.int32)
    reach = keys >= lo.to(tl.int32)
    packed = tl.sum(above.to(tl.int32) + tl.where(reach, 65536, 0), axis=1)
    wins = packed & 0xFFFF
    ties = (packed >> 16) - wins

    # Largest slot whose predecessors' ties still fit in what is left of the budget.
    left = budget - count_hi
    if HAS_ORDER:
        end = tl.max(tl.where(in_rows, order, 0), axis=0) + 1
    else:
        end = num_rows
    start = tl.where(count_lo - count_hi <= left, end, 0)
    spent = left * 0
    while end - start > 1:
        step = tl.maximum((end - start) // 3, 1)
        first = start + step
        second = end - step
        packed = tl.where(order < first, ties, 0) + tl.where(order < second, ties * 65536, 0)
        counts = tl.sum(packed, axis=0)
        near = counts & 0xFFFF
        far = (counts >> 16) & 0xFFFF
        near_fits = near <= left
        far_fits = far <= left
        end = tl.where(far_fits, end, tl.where(near_fits, second, first))
        start = tl.where(far_fits, second, tl.where(near_fits, first, start))
        spent = tl.where(far_fits, far, tl.where(near_fits, near, spent))
    wins += tl.where(order < start, ties, tl.where(order == start, left - spent, 0))
    tl.store(out_ptr + rows, base + wins, mask=in_rows)


def launch_rank(
    scores: torch.Tensor,
    limits: torch.Tensor,
    budget: int | torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor | None = None,
    floor: int = 0,
    ways: int = 4,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Launch the kernel on arguments that `rank` has checked. `ways` and `num_warps` tune it."""
    num_rows, width = scores.shape
    if num_rows == 0:
        return out
    block_rows = next_power_of_2(num_rows)
    block_width = next_power_of_2(width)
    if num_warps is None:
        num_warps = min(max(block_rows * block_width // 256, 1), 16)
    _rank_kernel[(1,)](
        scores,
        limits,
        out if order is None else order,
        budget,
        out,
        num_rows,
        floor,
        WIDTH=width,
        BLOCK_WIDTH=block_width,
        BLOCK_ROWS=block_rows,
        HAS_ORDER=order is not None,
        BUDGET_ON_DEVICE=isinstance(budget, torch.Tensor),
        WAYS=ways,
        num_warps=num_warps,
    )
    return out


def rank(
    scores: torch.Tensor,  # f32 [n, K], rows never increase
    limits: torch.Tensor,  # i32 [n], eligible positions of each row; clipped to 0..K
    budget: int | torch.Tensor,  # entries to pick; a device tensor i32 [1] is read without a sync
    out: torch.Tensor,  # i32 [n]
    order: torch.Tensor | None = None,  # i32 [n], distinct request slots >= 0; default: row index
    floor: int = 0,  # the first min(floor, limit) positions of a row rank before all others
) -> torch.Tensor:
    """Write the prefix lengths of the global top `budget` to `out` and return it.

    sum(out) == min(max(budget, 0), sum of limits) exactly. Ties go to the lower `order`, then to
    the earlier position; -inf inside the limit is eligible and last; NaN ranks as -inf (so a length
    is always in range; `check_finite` is what reports it). n <= 2,048 and K <= 16. One launch that
    a CUDA graph can capture; CPU tensors run `rank_ref`. Raises ValueError on any other argument.
    """
    num_rows, width = scores.shape if scores.dim() == 2 else (-1, -1)
    device = scores.device
    check_tensor("rank", "scores", scores, torch.float32, (num_rows, width), device)
    check_tensor("rank", "limits", limits, torch.int32, (num_rows,), device)
    check_tensor("rank", "out", out, torch.int32, (num_rows,), device)
    if order is not None:
        check_tensor("rank", "order", order, torch.int32, (num_rows,), device)
    if isinstance(budget, torch.Tensor):
        check_tensor("rank", "budget", budget, torch.int32, (1,), device)
    if num_rows > MAX_ROWS or not 1 <= width <= MAX_WIDTH:
        raise ValueError(
            f"rank: scores {num_rows} x {width}; at most {MAX_ROWS} rows of 1..{MAX_WIDTH} work"
        )
    if not runs_on_gpu("rank", scores):
        return out.copy_(rank_ref(scores, limits, budget, order, floor))
    return launch_rank(scores, limits, budget, out, order, floor)
