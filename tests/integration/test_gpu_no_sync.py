"""No host synchronisation inside a step: vLLM's own check raises where a call waits for the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"


def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:
    """Catches `.item()`, a blocking copy or an implicit wait in plan, split, draft, distribute."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "runs.json"
    lines = [json.dumps({"prompt": f"def function_{i}(first, second):"}) for i in range(64)]
    prompts.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "forespark.benchmarks.closed_loop",
            "--target", str(PAIR / "target"), "--drafter", str(PAIR / "drafter"),
            "--tokens", "7", "--max-model-len", "1024", "--max-num-batched-tokens", "2048",
            "--max-num-seqs", "64", "--policies", "joint,adaptive_verification,batchwise:2",
            "--loads", "1,16,64", "--warm-up", "1", "--seconds", "2",
            "--prompts", str(prompts), "--out", str(out),
        ],
        env={**os.environ, "VLLM_GPU_SYNC_CHECK": "error", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 9
    assert all(run["counters"]["forespark:drafted_tokens"] > 0 for run in runs)
