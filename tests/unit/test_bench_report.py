"""The report: what is compared with what, committed keys, and records that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forespark.benchmarks.records import Run, load_results, one_commit_each
from forespark.benchmarks.report import report

KEYS = {
    "decode": {"best_ratio", "min_ratio", "vs_adaptive_verification", "draft_time_reduction_256",
               "oracle_share"},
    "e2e": {"best_ratio"}, "slo": {"capacity_ratio"}, "temperature_1": {"best_ratio"},
    "inflate": {"token_agreement", "speed_ratio"}, "simulator": {"max_error"},
}  # fmt: skip


def record(policy: str, speed: float, **extra: object) -> dict[str, object]:
    steps = {"forespark:steps": 0 if policy == "off" else 10.0}
    tokens = {f"forespark:{n}_tokens": 40.0 for n in ("drafted", "verified", "accepted", "emitted")}
    runs = [
        {"policy": policy, "load": n, "output_throughput": speed * (1 + n / 8),
         "tokens_per_user": speed * (1 + n / 8) / n, "duration": 1.0, "counters": steps | tokens}
        for n in (1, 2, 4)
    ]  # fmt: skip
    seen = {"target": "t", "device": "NVIDIA H200", "commit": "abc", "command": "x --tokens 7"}
    return {"method": policy, "provenance": seen, "runs": runs, **extra}


def made(folder: Path, records: dict[str, object]) -> dict[str, dict[str, float | None]]:
    for name, held in records.items():
        (folder / f"{name}.json").write_text(json.dumps(held))
    return report(folder, folder / "out", folder / "bench.json", "H200", "joint")


def test_exactly_the_committed_keys_and_null_without_a_run(tmp_path: Path) -> None:
    """Catches a key that is renamed or missing, and a figure made up where nothing ran."""
    found = made(tmp_path, {"a": record("joint", 100), "b": record("joint", 1, temperature=1.0)})
    assert {part: set(values) for part, values in found.items()} == KEYS
    assert all(value is None for values in found.values() for value in values.values())
    assert json.loads((tmp_path / "bench.json").read_text()) == found


def test_temperatures_are_never_mixed(tmp_path: Path) -> None:
    """Catches greedy and sampled runs in one curve: each ratio has its own baseline."""
    found = made(tmp_path, {
        "a": record("joint", 120), "b": record("off", 100),
        "c": record("joint", 130, temperature=1.0), "d": record("off", 100, temperature=1.0),
    })  # fmt: skip
    assert 1.0 < found["decode"]["best_ratio"] < found["temperature_1"]["best_ratio"]  # type: ignore[operator]
    text = (tmp_path / "out" / "index.html").read_text()
    assert "t, NVIDIA H200, K = 7, temperature 1, load 1, 2, 4, commit abc" in text
    assert text.count("data:image/png") == len(list((tmp_path / "out").glob("*.png"))) > 0


def test_other_machines_and_broken_files(tmp_path: Path) -> None:
    """Catches a laptop's figures committed as an H200's, and files skipped without a word."""
    cpu = record("joint", 100)
    cpu["provenance"]["device"] = "cpu"  # type: ignore[index]
    (tmp_path / "cut.json").write_text('{"runs": [')
    found = made(tmp_path, {"a": cpu, "b": record("off", 1), "half": {"runs": [{"policy": "x"}]}})
    assert found["decode"]["best_ratio"] is None
    unused = load_results(tmp_path.glob("*.json")).unused
    assert any(line.startswith("cut.json: cannot be read") for line in unused)
    assert any(line.startswith("half.json: incomplete") for line in unused)


def test_commits_are_not_repeats_of_each_other() -> None:
    """Catches an old run averaged with a new one as if it were noise."""
    runs = [Run("joint", n, 1.0, 1.0, commit=c) for n, c in ((1, "old"), (1, "new"), (2, "new"))]
    kept, left = one_commit_each(runs)
    assert {run.commit for run in kept} == {"new"} and "1 runs of commit old" in left[0]


def test_nothing_to_report_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no usable record"):
        made(tmp_path, {})
    with pytest.raises(ValueError, match="is no folder"):
        report(tmp_path / "none", tmp_path, tmp_path / "b.json", "H200", "joint")
