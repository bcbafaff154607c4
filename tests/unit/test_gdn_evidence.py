"""The committed figures of the Gated DeltaNet kernels."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "kernels" / "gdn_evidence.py"


def test_every_id_has_a_key_and_nothing_is_invented() -> None:
    """Catches figures of one id under another, errors that are not the worst, guessed cells."""
    gdn_evidence = run_path(str(FILE))["gdn_evidence"]
    rows = [
        {"n": 1, "w": 16, "verify_us": 150.0, "commit_us": 40.0, "speedup": 1.5, "out_error": 1e-3},
        {"n": 64, "w": 16, "speedup": 3.5, "share_of_peak": 0.8, "out_error": 2e-3},
    ]
    found = gdn_evidence({"rows": rows, "baseline": "theirs"})
    assert list(found) == ["E2", "E3", "K1", "K2", "K3", "K4", "K5", "K6", "M1"]
    assert found["E2"]["figure"] == {"out_error": 2e-3}
    assert found["K1"]["figure"] == {"n1_w16": 150.0} and found["K2"]["figure"] == {"n1_w16": 40.0}
    assert found["K3"] == {
        "figure": {"n1_w16": 1.5}, "baseline": "theirs", "launch": "default tiles, CUDA graph",
    }  # fmt: skip
    assert found["K4"]["figure"] == {"n64_w16": 3.5}
    assert found["K5"]["figure"] == {"n64_w16": pytest.approx(0.8)}
    assert found["E3"] is found["K6"] is None
    assert found["M1"]["figure"]["bytes"] < 85e6
    assert gdn_evidence({"rows": [], "baseline": "theirs"})["K4"] is None
