"""Step costs measured on the warm engine: what one more drafted or verified token really costs.

T_verify is the target's forward pass, its LM head and the greedy choice, by token count; it also
carries what every step pays for the drafter (context features and their keys and values). T_draft
is what a packed draft of D + n rows adds to that: a step that drafts nothing pays nothing for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from forespark.core import LatencyTable
from forespark.drafter.speculator import ForeSparkSpeculator

REPEATS = 5
WARM_UPS = 2
MOST_SPREAD = 0.25  # (slowest - fastest) / median of equal steps, median over all sizes
CPU_CONTEXT = 128  # tokens of context a timed step attends to; GPUs take vLLM's own setting


def measure_tables(
    runner: Any, speculator: ForeSparkSpeculator, captured: list[int]
) -> tuple[LatencyTable, LatencyTable]:
    """(T_draft, T_verify) of this worker, medians of `REPEATS` runs at every size."""
    width = speculator.num_query_per_req
    speculator.profile_spreads.clear()
    most = min(runner.max_num_tokens, runner.max_num_reqs * width)
    sizes = sorted({*captured, *_powers_of_two(most)})
    context = _context_len(runner)
    verify = [(size, _verify_ms(runner, speculator, size, context)) for size in sizes]
    rows = [size for size in _powers_of_two(most, halves=True) if size >= 2]
    draft = [(size, _draft_ms(runner, speculator, size, context)) for size in rows]
    buckets = [] if speculator.backbone_graphs is None else speculator.backbone_graphs.sizes
    return (
        _table(_with_buckets(draft, buckets), max(buckets, default=0)),
        _table(verify, max(captured, default=0)),
    )


def busy(speculator: ForeSparkSpeculator) -> str | None:
    """One line when the last profile's repeats differed too much to be this server's alone.

    Only on a GPU, where nothing but another process makes equal steps differ by that much.
    """
    spreads = speculator.profile_spreads
    if speculator.device.type == "cpu" or not spreads:
        return None
    spread = statistics.median(spreads)
    if spread <= MOST_SPREAD:
        return None
    return (
        f"profile: equal steps took times {spread:.0%} apart (at most {MOST_SPREAD:.0%} on a free "
        "GPU): something else is using it; stop that and measure again"
    )


def _with_buckets(points: list[tuple[int, float]], buckets: list[int]) -> list[tuple[int, float]]:
    """Measured points, and the captured sizes between them by interpolation."""
    sizes, ms = zip(*points, strict=True)
    added = [size for size in buckets if sizes[0] < size <= sizes[-1] and size not in sizes]
    return sorted([*points, *((size, float(np.interp(size, sizes, ms))) for size in added)])


def _powers_of_two(most: int, halves: bool = False) -> list[int]:
    """1, 2, 4, ... and `most` itself; with `halves` also 96, 192, 384, ... between them."""
    sizes = {most, *(1 << k for k in range(most.bit_length()))} - {0}
    if halves:
        sizes |= {3 * size // 4 for size in sizes if size >= 128}
    return sorted(sizes)


def _context_len(runner: Any) -> int:
    import vllm.envs as envs

    wanted = envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN
    if runner.device.type == "cpu":
        wanted = min(wanted, CPU_CONTEXT)
    return min(wanted, runner.max_model_len // 2)


def timed_steps(
    runner: Any,
    speculator: ForeSparkSpeculator,
    num_tokens: int,
    context: int,
    drafted: int,
    spreads: list[float] | None = None,
) -> tuple[float, float]:
    """Median (target forward, drafter) milliseconds of a dummy step that drafts `drafted`.

    How far apart the repeats were, as a share of their median, is added to `spreads`.
    Raises ValueError when the engine ran another step than the one asked for.
    """
    speculator.profile_draft = drafted
    try:
        for _ in range(WARM_UPS):
            runner._dummy_run(num_tokens, context_len=context)
        with runner.step_timing.collect() as samples:
            for _ in range(REPEATS):
                runner._dummy_run(num_tokens, context_len=context)
    finally:
        speculator.profile_draft = None
    check_executed(samples, num_tokens, drafted, speculator.num_speculative_steps)
    if spreads is not None:
        totals = [sample.forward_ms + sample.drafter_ms for sample in samples]
        spreads.append((max(totals) - min(totals)) / statistics.median(totals))
    forward = statistics.median(sample.forward_ms for sample in samples)
    return forward, statistics.median(sample.drafter_ms for sample in samples)


def check_executed(
    samples: Sequence[Any], num_tokens: int, drafted: int, num_speculative_tokens: int
) -> None:
    """ValueError unless every timed step ran what its price will stand for.

    `samples` are vLLM's StepTimingSample, one a repeat; vLLM shortens dummy steps that do not fit.
    """
    if len(samples) != REPEATS:
        raise ValueError(
            f"latency.profile: {len(samples)} of {REPEATS} steps of {num_tokens} tokens were "
            "timed; use a latency.artifact measured elsewhere"
        )
    for sample in samples:
        if sample.num_target_tokens != num_tokens:
            raise ValueError(
                f"latency.profile: a step of {num_tokens} tokens ran {sample.num_target_tokens}, "
                "so its time is another size's; raise max_num_batched_tokens, or use a "
                "latency.artifact"
            )
        room = sample.num_reqs * num_speculative_tokens
        if drafted > room:
            raise ValueError(
                f"latency.profile: a draft of {drafted} tokens ran {room} ({sample.num_reqs} "
                f"requests, K = {num_speculative_tokens}); lower max_num_seqs, or use a "
                "latency.artifact"
            )


def _verify_ms(runner: Any, speculator: ForeSparkSpeculator, size: int, context: int) -> float:
    spreads = speculator.profile_spreads
    forward, upkeep = timed_steps(runner, speculator, size, context, drafted=0, spreads=spreads)
    hidden = torch.zeros(
        size, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device
    )

    def head() -> torch.Tensor:
        return runner.model.compute_logits(hidden).argmax(dim=-1)

    return forward + upkeep + _timed_ms(runner.device, head)


def _draft_ms(runner: Any, speculator: ForeSparkSpeculator, rows: int, context: int) -> float:
    num_reqs = -(-rows // speculator.num_query_per_req)
    _, idle = timed_steps(runner, speculator, num_reqs, context, drafted=0)
    _, busy = timed_steps(runner, speculator, num_reqs, context, drafted=rows - num_reqs)
    return max(busy - idle, 1e-3)


def _timed_ms(device: torch.device, run: Callable[[], object]) -> float:
    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) * 1e3

    with torch.inference_mode():
        once()
        return statistics.median(once() for _ in range(REPEATS))


def _table(points: list[tuple[int, float]], captured_limit: int) -> LatencyTable:
    sizes, ms = np.array(points, dtype=np.float64).T
    # Disturbances only ever add time, so a step costs no more than any larger one was seen to cost.
    ms = np.minimum.accumulate(ms[::-1])[::-1]
    return LatencyTable(sizes, ms, captured_limit, source="start-up profile")
