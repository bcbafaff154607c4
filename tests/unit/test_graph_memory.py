"""Too little memory for the drafter's CUDA graphs: fewer sizes, and a line that says the cost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the adapter needs vLLM")

from forespark.drafter import graph_memory, graphs
from forespark.drafter.graph_memory import RESERVE
from forespark.drafter.graphs import BucketGraphs
from forespark.scheduler.buckets import bucket_sizes, mean_padding

MIB = 1 << 20
Captured = Callable[..., tuple[BucketGraphs, list[int], list[str]]]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """`captured(free, each)`: (graphs captured with `free` bytes, sizes in order, warnings)."""

    def run(free: int, each: int, share: float = 1.0) -> tuple[BucketGraphs, list[int], list[str]]:
        memory, order, lines = {"free": free + RESERVE}, [], []

        def stock_capture(self: Any, create: Any, name: str) -> None:
            for desc in next(iter(self._capture_descs.values())):
                create(desc, True)
                order.append(desc.num_tokens)
                memory["free"] -= each
                if self._capture_mem_samples is not None:
                    self._capture_mem_samples.append(each)
            self._graphs_captured = True

        monkeypatch.setattr(graphs.CudaGraphManager, "capture", stock_capture)
        monkeypatch.setattr(graphs, "free_bytes", lambda device: memory["free"] - RESERVE)
        monkeypatch.setattr(
            graph_memory, "get_tp_group", lambda: SimpleNamespace(world_size=1, cpu_group=None)
        )
        made = object.__new__(BucketGraphs)
        made.sizes, made.max_num_reqs, made.device = bucket_sizes(1024), 64, torch.device("cpu")
        made._graphs_captured, made._capture_mem_samples = False, None
        made._init_candidates()
        monkeypatch.setattr(
            graph_memory.logger, "warning", lambda line, *args: lines.append(line % args)
        )
        made.capture_each(lambda size, reqs: lambda: None, "backbone", share)
        assert memory["free"] >= RESERVE or free < 2 * each  # the reserve is never spent
        return made, order, lines

    return run


def test_enough_memory_captures_every_size(captured: Captured) -> None:
    """Catches a size lost or captured twice by measuring the first two, and a needless warning."""
    every = bucket_sizes(1024)
    made, order, lines = captured(free=len(every) * 2 * MIB, each=2 * MIB)
    assert made.sizes == every and sorted(order) == every and order[0] == every[-1]
    assert [made.bucket(size) for size in (1, 65, 1024, 1025)] == [1, 72, 1024, None]
    assert lines == []


@pytest.mark.parametrize(("room", "share", "count"), [(10, 1.0, 10), (20, 0.5, 11), (2, 1.0, 2)])
def test_little_memory_captures_fewer_and_says_the_cost(
    room: int, share: float, count: int, captured: Captured
) -> None:
    """Catches a server that runs out of memory in the middle of a capture, a full batch that loses
    its graph, and a silent loss."""
    made, order, lines = captured(free=room * 2 * MIB, each=2 * MIB, share=share)
    assert len(made.sizes) == count and sorted(order) == made.sizes
    assert made.sizes[-1] == 1024 and made.bucket(1000) == 1024
    assert all(made.bucket(size) is not None for size in range(1, 1025))
    (line,) = lines
    assert line.startswith("gpu_memory_utilization: ") and "\n" not in line
    assert f"{count} of {len(bucket_sizes(1024))} sizes" in line
    cost = round(100 * mean_padding(made.sizes))
    assert f"costs {cost} % of a draft's rows instead of 5 %; lower gpu_memory_util" in line


def test_no_memory_runs_eagerly_and_says_so(captured: Captured) -> None:
    """Catches a capture that is tried without any memory, or a replay of what was not captured."""
    made, order, lines = captured(free=-1, each=2 * MIB)
    assert order == [] and made.bucket(8) is None
    assert len(lines) == 1 and "kernel by kernel" in lines[0]


def test_ranks_capture_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that thin by their own memory: they would pad a step differently and hang."""
    monkeypatch.setattr(
        graph_memory, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group="cpu")
    )
    seen = []

    def least_of_both(value: torch.Tensor, op: Any, group: str) -> None:
        seen.append((int(value.item()), op, group))
        value.fill_(min(int(value.item()), 3))

    monkeypatch.setattr(graph_memory, "all_reduce", least_of_both)
    assert graph_memory.on_every_rank(5.9) == 3
    assert seen == [(5, graph_memory.ReduceOp.MIN, "cpu")]
