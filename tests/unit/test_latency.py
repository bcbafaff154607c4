"""Latency artifacts: what is written is read back, and nothing else is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forespark.core import LatencyTable
from forespark.scheduler.latency import load_artifact, save_artifact

IDENTITY = {"model": "m", "device": "cpu", "tensor_parallel_size": 1, "num_speculative_tokens": 7}
DRAFT = LatencyTable([2, 8, 32], [1.0, 1.5, 3.0], 0)
VERIFY = LatencyTable([1, 16, 64], [4.0, 5.0, 9.0], 16)


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "latency.json"
    save_artifact(path, DRAFT, VERIFY, IDENTITY)
    if changes:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_tables_survive_the_file(tmp_path: Path) -> None:
    """Catches a stage swapped for the other, or a captured limit that gets lost."""
    draft, verify = load_artifact(written(tmp_path), IDENTITY)
    assert draft.ms.tolist() == DRAFT.ms.tolist() and verify.sizes.tolist() == [1, 16, 64]
    assert (draft.captured_limit, verify.captured_limit) == (0, 16)
    assert [file.name for file in tmp_path.iterdir()] == ["latency.json"]


@pytest.mark.parametrize("key", sorted(IDENTITY))
def test_report_11_another_identity_is_refused(tmp_path: Path, key: str) -> None:
    """Catches prices of another model, machine, TP size or K being reused."""
    with pytest.raises(ValueError, match=f"latency.artifact.*{key}") as refusal:
        load_artifact(written(tmp_path), {**IDENTITY, key: "other"})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 99},
        {"draft": None},
        {"verify": {"sizes": [1, 2], "ms": [2.0, 1.0], "captured_limit": 0}},
        {"draft": {"sizes": [1], "ms": [float("nan")], "captured_limit": 0}},
        {"verify": {"sizes": [], "ms": [], "captured_limit": 0}},
    ],
)
def test_a_damaged_artifact_is_one_clear_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Catches a table that decreases, is empty or holds NaN and prices steps all the same."""
    with pytest.raises(ValueError, match="latency.artifact") as refusal:
        load_artifact(written(tmp_path, **changes), IDENTITY)
    assert "\n" not in str(refusal.value)


def test_a_truncated_artifact_is_one_clear_line(tmp_path: Path) -> None:
    """Catches a half-written file stopping the server with a traceback of the JSON parser."""
    path = written(tmp_path)
    path.write_text(path.read_text()[:60])
    with pytest.raises(ValueError, match="latency.artifact.*cannot be read") as refusal:
        load_artifact(path, IDENTITY)
    assert "\n" not in str(refusal.value)
