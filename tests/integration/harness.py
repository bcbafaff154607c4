"""Starts engine processes for the tests and builds their prompts.

`run_job(name, task)` runs a function of `engine_jobs.py` in a process of its own and returns the
JSON it prints, so that no engine shares anything with another test.
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
K = 7
PACKED = ("batchwise", "adaptive_verification", "single_curve", "joint")
TIMEOUT = 900.0
# The full numbers: every prompt one at a time, 2,000 steps a run, 200,000 tokens a policy.
LONG = os.environ.get("FORESPARK_LONG") == "1"
PROMPTS = 64
TOKENS = 64

# Step costs, (tokens, ms). Drafting and verifying cost something: D and B move from 0 to full.
PRICED = {
    "draft": [[2, 1.0], [8, 1.2], [16, 1.6], [32, 2.4], [64, 4.0], [128, 7.0]],
    "verify": [[1, 4.0], [8, 4.3], [16, 5.0], [32, 6.6], [64, 10.0], [128, 17.0], [256, 32.0]],
}
FREE = {"draft": [[2, 0.001], [128, 0.002]], "verify": [[1, 4.0], [256, 4.1]]}
DEAR = {"draft": [[2, 500.0], [128, 900.0]], "verify": [[1, 4.0], [256, 4.1]]}

# What each run of the real engine is given, by the name that the tests use.
RUNS: dict[str, dict[str, Any]] = {
    "target": {"policy": None},
    "off": {"policy": "off"},
    "stock": {"policy": "stock"},
    "full": {"policy": "full"},
    "batchwise": {
        "policy": "batchwise",
        "scheduler": {"batchwise_schedule": [[2, 7], [8, 4], [512, 2]]},
    },
    "adaptive_verification": {"policy": "adaptive_verification", "prices": PRICED},
    "single_curve": {"policy": "single_curve", "prices": PRICED},
    "joint": {"policy": "joint", "prices": PRICED},
    "joint_free": {"policy": "joint", "prices": FREE},
    "joint_dear": {"policy": "joint", "prices": DEAR},
    "joint_floor": {"policy": "joint", "prices": PRICED, "scheduler": {"min_draft_len": 2}},
    "joint_corrected": {
        "policy": "joint",
        "prices": PRICED,
        "scheduler": {"correction": "learned"},
    },
    "joint_host": {"policy": "joint", "prices": PRICED, "scheduler": {"split": "host"}},
}


def run_job(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """The job's result; AssertionError with the end of its log when the process failed."""
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
        [sys.executable, str(HERE / "engine_jobs.py"), name],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    log = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0 and lines, f"{name} ended with {done.returncode}:\n{log}"
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return result


def code_prompts(count: int, longest: int = 6) -> list[str]:
    """Consecutive lines of the standard library's source, 1 to `longest` of them, none repeated."""
    import heapq
    import json.decoder
    import textwrap

    lines = [
        line
        for module in (textwrap, heapq, json.decoder)
        for line in Path(module.__file__).read_text(encoding="utf-8").splitlines()
        if line.strip() and len(line) < 90
    ]
    prompts, start = [], 0
    for index in range(count):
        taken = 1 + index % longest
        prompts.append("\n".join(lines[start : start + taken]))
        start += taken
    assert start <= len(lines)
    return prompts


def mixed_prompts(count: int) -> list[str]:
    """Short prompts, and every sixth longer than one step's tokens: a prefill in chunks."""
    short, long = code_prompts(count), code_prompts(count // 6 + 1, longest=12)
    return [
        prompt if index % 6 else (prompt + "\n" + long[index // 6] * 2)[:800]
        for index, prompt in enumerate(short)
    ]


def lossless_task(run: str) -> dict[str, Any]:
    """64 prompts of 64 tokens (some shorter in the mixed batches) for the run of that name."""
    whole = LONG or run == "target"
    few = 8 if run in ("joint_free", "joint_dear", "joint_floor") else 16
    return {
        **RUNS[run],
        "prompts": mixed_prompts(PROMPTS),
        "max_tokens": TOKENS,
        "lengths": [TOKENS - 9 * (index % 5 == 4) for index in range(PROMPTS)],
        "alone": PROMPTS if whole else few,
    }
