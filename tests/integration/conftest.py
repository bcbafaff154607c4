"""Fixtures of the engine tests: every engine run is made once for the whole session."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import run_job


@pytest.fixture(scope="session")
def engine_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`engine_job(name, **task)`: the result of a job, shared by the session's test processes."""
    base: Path = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "engine-jobs"
    folder.mkdir(exist_ok=True)

    def result_of(name: str, **task: Any) -> dict[str, Any]:
        text = json.dumps([name, task], sort_keys=True)
        kept = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps(run_job(name, task)), encoding="utf-8")
        result: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return result

    return result_of
