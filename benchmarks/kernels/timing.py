"""Timing of launches that take microseconds: CUDA graph replays, medians, spread.

`us` is the time of one call inside a graph of CALLS calls, which leaves out the start of a replay
and is what a call adds to a captured step. `replay_us` is one replay of a graph of one call, back
to back with others: kernel plus replay overhead, the form the latency targets are written in.
Inputs stay in cache between calls, as they do in a decoding step, which has just written them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

if find_spec("forespark.triton_kernels") is None:  # a plain checkout, nothing installed
    import forespark

    forespark.__path__.append(str(Path(__file__).resolve().parents[2]))

CALLS = 20
SAMPLES = 60


def need_gpu() -> torch.device:
    """The GPU, or an exit that says why there is nothing to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("kernel benchmarks need a CUDA GPU; none is visible")
    return torch.device("cuda")


def graph_us(call: Callable[[], Any]) -> dict[str, float]:
    """Median `us` and `replay_us` of a capturable call, with the 10th and 90th percentile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    many = _samples(_capture(call, CALLS), replays=1, calls=CALLS)
    one = _samples(_capture(call, 1), replays=CALLS, calls=CALLS)
    return {
        "us": statistics.median(many),
        "us_p10": _quantile(many, 0.1),
        "us_p90": _quantile(many, 0.9),
        "replay_us": statistics.median(one),
    }


def eager_us(call: Callable[[], Any]) -> dict[str, float]:
    """Median wall time of a call that cannot be captured, synchronised on both sides."""
    samples = []
    for step in range(SAMPLES + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if step >= 5:
            samples.append((time.perf_counter() - begin) * 1e6)
    return {"us": statistics.median(samples), "us_p90": _quantile(samples, 0.9)}


def report(bench: str, rows: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """The record of one benchmark, with what it ran on."""
    import triton

    return {
        "bench": bench,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **extra,
        "rows": rows,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line per row: names as they are, numbers to two decimals."""
    for row in rows:
        cells = (f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
        print("  " + "  ".join(cells), flush=True)


def print_json(record: dict[str, Any]) -> None:
    """The record as the last line of the output."""
    print(json.dumps(rounded(record)))


def rounded(value: Any) -> Any:
    """The same structure with floats to three decimals (a nanosecond, in microseconds)."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def _capture(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def _samples(graph: torch.cuda.CUDAGraph, replays: int, calls: int) -> list[float]:
    samples = []
    for _ in range(SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / calls)
    return samples


def _quantile(samples: list[float], share: float) -> float:
    return sorted(samples)[int(share * (len(samples) - 1))]
