"""`forespark calibrate collect --engine` on the tiny pair: its drafts become a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forespark.calibration.drafts_file import load_drafts
from forespark.calibration.origin import Origin
from harness import LONG, PAIR, code_prompts


@pytest.mark.skipif(not LONG, reason="FORESPARK_LONG=1 runs it: a minute")
@pytest.mark.timeout(400)
def test_the_engine_records_every_length(tmp_path: Path) -> None:
    """Catches a length that is not drafted exactly, drafts that are not wholly verified, and
    parts left behind; z and l must tell accepted drafts from others somewhere."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "trace.parquet"
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in code_prompts(8, 2)))
    done = subprocess.run(
        [sys.executable, "-m", "forespark.cli", "calibrate", "collect", "--engine",
         "--target", str(PAIR / "target"), "--drafter", str(PAIR / "drafter"),
         "--prompts", str(prompts), "--out", str(out), "--documents", "8", "--tokens", "32",
         "--loads", "2,4", "--dtype", "float32", "--max-model-len", "256",
         "--max-num-batched-tokens", "256", "--enforce-eager"],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    trace, origin = load_drafts(out), Origin.of_checkpoint(PAIR / "drafter")
    assert trace.origin == origin
    assert set(trace.length.tolist()) == set(range(1, origin.num_speculative_tokens + 1))
    assert set(trace.load.tolist()) == {2, 4} and 0 <= trace.request.min()
    # An answer walked with drafts of d: the next one stands behind what was accepted.
    for d in (1, 3):
        mine = (trace.length == d) & (trace.request == trace.request[trace.length == d][0])
        position, accepted = trace.position[mine], trace.accepted[mine]
        order = position.argsort()
        assert np.array_equal(np.diff(position[order]), accepted[order][:-1] + 1)
    assert done.stdout.count(" 0 not wholly verified") == origin.num_speculative_tokens
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl", "trace.parquet"]
