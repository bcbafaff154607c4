"""Runs the real engine in a process of its own: `run(task)` starts this file, which prints JSON.

A task is a dict: `scenario` names a function of `scenarios.py`, `policy` None for the target alone,
and whatever else the scenario reads. A process per engine keeps engines from sharing anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "assets" / "tiny-pair"
MARK = "RESULT "

# (tokens, ms): drafting and verifying cost something, so that D and B move between 0 and full.
PRICED = {
    "draft": [[2, 1.0], [8, 1.2], [16, 1.6], [32, 2.4], [64, 4.0], [128, 7.0]],
    "verify": [[1, 4.0], [8, 4.3], [16, 5.0], [32, 6.6], [64, 10.0], [128, 17.0], [256, 32.0]],
}
FREE = {
    "draft": [[2, 0.001], [128, 0.002]],
    "verify": [[1, 4.0], [256, 4.1]],
}
DEAR = {
    "draft": [[2, 500.0], [128, 900.0]],
    "verify": [[1, 4.0], [256, 4.1]],
}
# Drafting is nearly free and verification is not: full drafts, about half of them verified.
TRIMMED = {
    "draft": [[2, 0.01], [8192, 0.02]],
    "verify": [[1, 4.0], [128, 5.0], [256, 6.0], [512, 9.0], [1024, 16.0], [4096, 60.0]],
}


def run(task: dict[str, Any], timeout: float = 600.0) -> dict[str, Any]:
    """The scenario's result; raises AssertionError with the end of the log when it failed."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
        # One thread an engine, on any core: two test processes then share two cores well.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "scenarios.py")],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    log = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0 and lines, f"engine process ended with {done.returncode}:\n{log}"
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return result


def prompts(count: int, seed: int = 0) -> list[str]:
    """Code-shaped prompts of different lengths, as the tiny pair was trained on."""
    import random

    rng = random.Random(seed)
    names = "median mean parse load dump split merge walk visit encode decode copy".split()
    shapes = (
        "Write the function `{0}({1})`.",
        "def {0}({1}):\n    ",
        "class {2}:\n    def {0}(self, {1}):\n        ",
        "What does `{0}` return?",
        "import os\n\ndef {0}({1}, default=None):\n    if {1} is None:\n        return ",
    )
    args = "data text path items node key value".split()
    return [
        rng.choice(shapes).format(rng.choice(names), rng.choice(args), rng.choice(names).title())
        for _ in range(count)
    ]
