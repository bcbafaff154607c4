"""`forespark bench host`: what it reports, and that its bound is one."""

import json
import sys

import pytest
from forespark.benchmarks import host_decision
from forespark.benchmarks.host_gap import goodput_bound, joint_gap, selective_gap

from forespark.scheduler.exhaustive import exhaustive_plan
from forespark.scheduler.selection import SelectionModel


@pytest.mark.parametrize("num_reqs", [1, 4, 40])
def test_the_bound_is_above_the_optimum_and_close_to_it(num_reqs):
    """Would catch a bound below what exists (a gap of 0 means nothing then), or a useless one."""
    case = host_decision.synthetic_step(num_reqs, 3), *host_decision.synthetic_tables(3)
    best = exhaustive_plan(*case).goodput
    assert best * (1 - 1e-12) <= goodput_bound(*case) <= best * (1 + 1e-4)


def test_small_batches_lose_nothing():
    """Would catch a search, or an objective of the benchmark, that misses the best plan."""
    model = SelectionModel()
    for case in host_decision.small_cases(12):
        assert joint_gap(*case) <= 1e-12
        assert selective_gap(*case, model) <= 1e-4


def test_the_report_holds_the_committed_figures(monkeypatch, capsys):
    """Would catch a figure that the evidence file asks for and the benchmark dropped."""
    flags = ["--repeats", "2", "--batches", "6", "--num-reqs", "3", "5"]
    monkeypatch.setattr(sys, "argv", ["forespark bench host", *flags])
    host_decision.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["host_us"]) == {"3", "5"}
    assert report["host_sort_ratio"] > 0
    assert 0 <= report["gap_mean"] <= report["gap_max"] <= 5e-3
