"""The fastest draft length for each load range: the batchwise baseline as a schedule.

A cap measured at a load serves the batch sizes above the load before it, up to and including its
own; neighbours with the same cap become one range. Larger batches than the largest load take the
last cap, in ForeSpark as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Throughputs = Mapping[int, Mapping[int, float]]  # load -> cap k -> output tokens/s


@dataclass(frozen=True)
class LoadRange:
    """Batches of `first` to `last` requests draft `cap` tokens each."""

    first: int
    last: int
    cap: int


def fastest_caps(measured: Throughputs) -> dict[int, int]:
    """load -> k with the most tokens/s; of equally fast ones the smallest.

    Raises ValueError, one line, for no load, loads that do not ascend from at least 1, caps that
    were not run at every load, and throughputs that are not positive numbers.
    """
    loads = list(measured)
    if not loads:
        raise ValueError("loads: none was measured; give at least one")
    if loads[0] < 1 or any(a >= b for a, b in zip(loads, loads[1:], strict=False)):
        raise ValueError(f"loads: {loads} must ascend and be >= 1; sort them")
    caps = sorted(measured[loads[0]])
    for load, by_cap in measured.items():
        if not by_cap or sorted(by_cap) != caps:
            raise ValueError(
                f"loads: {load} was run with k = {sorted(by_cap)}, {loads[0]} with k = {caps}; "
                "run every k at every load"
            )
        wrong = {k: v for k, v in by_cap.items() if not (math.isfinite(v) and v > 0)}
        if wrong:
            raise ValueError(f"loads: {load} has throughputs {wrong} tokens/s; measure it again")
    return {load: max(caps, key=lambda k: (by[k], -k)) for load, by in measured.items()}


def merged(caps: Mapping[int, int]) -> list[LoadRange]:
    """The ranges of `fastest_caps`, ascending from a batch of one, without equal neighbours."""
    ranges: list[LoadRange] = []
    for load, cap in caps.items():
        before = ranges[-1] if ranges else None
        if before is not None and before.cap == cap:
            ranges[-1] = LoadRange(before.first, load, cap)
        else:
            ranges.append(LoadRange(1 if before is None else before.last + 1, load, cap))
    return ranges


def our_schedule(ranges: list[LoadRange]) -> list[list[int]]:
    """`scheduler.batchwise_schedule`: pairs [largest batch, k]."""
    return [[span.last, span.cap] for span in ranges]


def vllm_schedule(ranges: list[LoadRange]) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [first batch, last batch, k]."""
    return [[span.first, span.last, span.cap] for span in ranges]
