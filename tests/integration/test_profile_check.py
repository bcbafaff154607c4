"""`forespark profile check` on the tiny pair, with the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import PAIR

pytestmark = pytest.mark.engine


@pytest.mark.timeout(400)
def test_prices_are_held_against_steps(tmp_path: Path) -> None:
    """Catches steps that are not seen, a prediction off by a whole stage, and figures that nobody
    measured: on a shared CPU the bounds are generous."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "check.json"
    prompts.write_text("".join(json.dumps({"prompt": f"def load({n}):"}) + "\n" for n in "abcdef"))
    done = subprocess.run(
        [sys.executable, "-m", "forespark.cli", "profile", "check",
         "--target", str(PAIR / "target"), "--drafter", str(PAIR / "drafter"), "--tokens", "7",
         "--loads", "4", "--seconds", "2", "--warm-up", "1", "--prompts", str(prompts),
         "--max-tokens", "48", "--dtype", "float32", "--max-model-len", "256",
         "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--enforce-eager",
         "--out", str(out)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert set(record["median_abs_error"]) == {"4"}
    assert all(0 < share < 0.9 for share in record["median_abs_error"].values())
    assert all(steps >= 20 for steps in record["steps"].values())
    assert all(0.3 < ratio < 3 for ratio in record["standing_ratio"].values())
    assert 0 < record["startup_extra_s"] < 60 and 0 < record["load_s"] < 1
    assert record["provenance"]["device"] and record["policy"] == "joint"
