"""The committed figures on what a step costs, from records of known content."""

from __future__ import annotations

from typing import Any

import pytest
from forespark.benchmarks.speed import EMPTY, kernel_figures, merged, stage_figures


def stage(policy: str, load: int, step: float, drafter: float, tokens: int = 64) -> dict[str, Any]:
    return {"policy": policy, "load": load, "step": step, "drafter": drafter, "tokens": tokens}


def test_stage_ratios_compare_equal_loads_and_budgets_only() -> None:
    """Catches a ratio across loads, across verification budgets, or upside down."""
    rows = [stage("batchwise:4", 256, 50.0, 10.0), stage("batchwise:15", 256, 61.0, 33.0)]
    ours = {"method": "forespark", "verify_per_req": 4.0, "ready_s": 90.0, "rows": rows}
    rows = [stage("dflash_adaptive", 256, 60.0, 30.0), stage("dflash_adaptive", 1, 5.0, 1.0)]
    stock = {"method": "dflash_adaptive", "verify_per_req": 4.0, "ready_s": 70.0, "rows": rows}
    found = stage_figures([ours, stock])
    assert found["drafter_ratio"] == {"d4": 0.333, "full_256": 1.1}
    assert found["machinery_ratio"] == {"256": 1.017}
    assert found["startup_extra_s"] == 20.0
    assert stage_figures([ours, stock | {"verify_per_req": 3.0}]) == {"startup_extra_s": 20.0}


def test_kernel_figures_take_the_slower_kind_of_data() -> None:
    """Catches the easy case reported for the hard one."""
    rank = [
        {"n": n, "data": data, "replay_us": us, "vllm_replay_us": 60.0}
        for n, data, us in [(64, "curves", 3.0), (64, "equal", 4.0), (512, "curves", 9.0)]
    ]
    envelope = [{"n": 512, "replay_us": 6.0}, {"n": 512, "us": 5.0}]
    path = [{"n": 256, "replay_us": 50.0}]
    records = [
        {"bench": name, "rows": rows}
        for name, rows in (("rank", rank), ("envelope", envelope), ("pre_draft", path))
    ]
    found = kernel_figures({"records": records})
    assert found["rank_us"] == {"64": 4.0, "512": 9.0}
    assert found["rank_speedup"] == pytest.approx(6.67)
    assert (found["envelope_us"], found["pre_draft_us"]) == (6.0, {"256": 50.0})
    with pytest.raises(ValueError, match="no row of pre_draft with n = 256"):
        kernel_figures({"records": [*records[:2], {"bench": "pre_draft", "rows": []}]})


def test_what_nobody_measured_stays_null_or_as_it_was() -> None:
    """Catches an invented figure and a lost one."""
    record = merged({"tp2": {"steps": 5}}, None, None, [])
    assert record == {**EMPTY, "tp2": {"steps": 5}, "provenance": {}}
