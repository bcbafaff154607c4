"""The multi-turn benchmark's output file: what may be continued, and loads that cannot run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from forespark.benchmarks.e2e import _arguments, main, new_record
from forespark.benchmarks.held import held_record


def asked(out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    base = ["e2e", "--target", "t", "--drafter", "d", "--prompts", "p.jsonl", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*base, *more])


def test_a_file_of_other_settings_is_never_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches sampled runs appended to greedy ones, and finished runs overwritten."""
    out = tmp_path / "run.json"
    asked(out, monkeypatch)
    record = held_record(out, new_record(_arguments()))
    record["runs"].append({"policy": "joint"})
    out.write_text(json.dumps(record))
    assert held_record(out, new_record(_arguments()))["runs"] == [{"policy": "joint"}]
    asked(out, monkeypatch, "--temperature", "1", "--tokens", "7")
    with pytest.raises(ValueError, match="runs of another tokens, temperature; rename it"):
        held_record(out, new_record(_arguments()))


def test_loads_beyond_the_engine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a load that would wait in the queue and be measured as slow decoding."""
    asked(tmp_path / "run.json", monkeypatch, "--loads", "8,512")
    with pytest.raises(ValueError, match=r"--loads: \[512\] must be 1..256"):
        main()
