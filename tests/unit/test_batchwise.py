"""The batchwise baseline: the fastest length by load, and the schedule in both forms."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
from forespark.benchmarks.batchwise import calibrate_batchwise, conclude, with_caps
from forespark.benchmarks.closed_loop import SETTINGS
from forespark.benchmarks.held import settings
from forespark.benchmarks.provenance import provenance
from forespark.calibration.batchwise import (
    LoadRange,
    fastest_caps,
    merged,
    our_schedule,
    vllm_schedule,
)

from forespark.config import ForeSparkConfig
from forespark.scheduler.policies import parse_schedule


def table(**fastest: int) -> dict[int, dict[int, float]]:
    """load -> k -> tokens/s with the given k fastest; keys are n1, n8, ..."""
    return {
        int(load[1:]): {k: 100.0 - abs(k - best) for k in range(1, 8)}
        for load, best in fastest.items()
    }


def test_fastest_by_load_and_ties_to_the_shorter() -> None:
    """Catches the first or the longest of equally fast lengths, and a slowest one."""
    assert fastest_caps(table(n1=7, n8=5, n64=1)) == {1: 7, 8: 5, 64: 1}
    assert fastest_caps({4: {3: 50.0, 2: 50.0, 1: 49.0}}) == {4: 2}


def test_ranges_cover_every_batch_once() -> None:
    """Catches a gap or an overlap between ranges, and equal neighbours left apart."""
    found = merged({1: 7, 8: 7, 32: 4, 128: 2, 256: 2})
    assert found == [LoadRange(1, 8, 7), LoadRange(9, 32, 4), LoadRange(33, 256, 2)]
    assert merged({16: 3}) == [LoadRange(1, 16, 3)]
    # The same length again behind another one is a range of its own.
    assert our_schedule(merged({1: 5, 2: 4, 3: 5})) == [[1, 5], [2, 4], [3, 5]]


def test_both_forms_say_the_same_and_are_taken() -> None:
    """Catches a schedule that our settings or vLLM refuse, or that the two read differently."""
    ranges = merged(fastest_caps(table(n1=7, n8=7, n32=4, n256=1)))
    ours, stock = our_schedule(ranges), vllm_schedule(ranges)
    assert [list(entry) for entry in parse_schedule(ours)] == stock
    config = ForeSparkConfig.from_any(
        {"method": "forespark", "model": "drafter",
         "scheduler": {"policy": "batchwise", "batchwise_schedule": ours}}
    )  # fmt: skip
    assert [list(entry) for entry in config.batchwise_ranges(7)] == stock
    dynamic = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    dense = dynamic.build_dynamic_sd_schedule_lookup(stock, 300, 7)
    assert [dense[n] for n in (1, 8, 9, 32, 33, 256, 300)] == [7, 7, 4, 4, 1, 1, 1]


@pytest.mark.parametrize(
    ("measured", "line"),
    [
        ({}, "loads: none was measured"),
        ({8: {1: 1.0}, 1: {1: 1.0}}, r"loads: \[8, 1\] must ascend"),
        ({0: {1: 1.0}}, r"loads: \[0\] must ascend and be >= 1"),
        ({1: {1: 1.0, 2: 2.0}, 8: {1: 1.0}}, r"loads: 8 was run with k = \[1\]"),
        ({1: {}}, r"loads: 1 was run with k = \[\]"),
        ({1: {1: math.nan}}, "loads: 1 has throughputs"),
        ({1: {1: 0.0, 2: 3.0}}, "loads: 1 has throughputs"),
    ],
)
def test_tables_that_decide_nothing_are_refused(measured: Any, line: str) -> None:
    """Catches a schedule from half a measurement."""
    with pytest.raises(ValueError, match=line):
        fastest_caps(measured)


def arguments(out: Path, **changed: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "method": "forespark", "policies": ["batchwise"], "tokens": 3, "loads": [1, 4],
        "target": Path("t"), "drafter": Path("d"), "prompts": Path("p.jsonl"), "temperature": 0.0,
        "seconds": 1.0, "warm_up": 0.0, "max_tokens": 8, "longest_prompt": 8, "dtype": "float32",
        "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "repeats": 2,
        "enforce_eager": True, "out": out,
    }  # fmt: skip
    return argparse.Namespace(**(given | changed))


def test_every_cap_is_run_and_odd_requests_are_refused(tmp_path: Path) -> None:
    """Catches a cap left out, and an engine started for a run that cannot conclude."""
    args = arguments(tmp_path / "x.json")
    assert with_caps(args).policies == ["batchwise:1", "batchwise:2", "batchwise:3"]
    assert args.policies == ["batchwise"]  # what the engine starts with
    for changed, line in (
        ({"policies": ["joint"]}, "--policies: joint"),
        ({"method": "dflash"}, "--method dflash"),
        ({"loads": [4, 1]}, "--loads: .* must ascend"),
        ({"loads": [1, 1]}, "--loads: .* must ascend"),
        ({"loads": [1, 9]}, r"--loads: \[9\] must be 1..4"),
        ({"tokens": 0}, "--tokens: 0"),
    ):
        with pytest.raises(ValueError, match=line):
            with_caps(arguments(tmp_path / "x.json", **changed))


def runs(rate_by_cap: dict[int, float], load: int) -> list[dict[str, Any]]:
    return [
        {"policy": f"batchwise:{k}", "load": load, "repeat": n, "output_throughput": rate + n}
        for k, rate in rate_by_cap.items()
        for n in range(2)
    ]


def test_a_finished_record_concludes_without_an_engine(tmp_path: Path) -> None:
    """Catches repeats that overwrite each other, runs of loads not asked for, and a finished
    record that starts an engine again (there is no target here to start)."""
    out = tmp_path / "batchwise.json"
    args = arguments(out, loads=[1, 4])
    done = runs({1: 10, 2: 20, 3: 20}, 1) + runs({1: 30, 2: 9, 3: 9}, 4) + runs({1: 1}, 2)
    empty: dict[str, Any] = {"runs": done}
    conclude(empty, [1, 4])
    assert empty["table"]["1"] == {"1": 10.5, "2": 20.5, "3": 20.5}
    # A first call that finds no runs would start an engine: write its record by hand.
    held = {
        "schema": 1, "workload": "batchwise", **settings(args, *SETTINGS),
        "provenance": provenance(args), "runs": done,
    }  # fmt: skip
    out.write_text(json.dumps(held))
    record = calibrate_batchwise(args)
    assert record == json.loads(out.read_text())
    assert record["fastest"] == {"1": 2, "4": 1}
    assert record["batchwise_schedule"] == [[1, 2], [4, 1]]
    assert record["num_speculative_tokens_per_batch_size"] == [[1, 1, 2], [2, 4, 1]]
    with pytest.raises(ValueError, match="of another max_tokens"):
        calibrate_batchwise(arguments(out, max_tokens=9))
