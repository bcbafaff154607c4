"""Real engines for the user-report tests (`test_reports_*.py`).

A job is a function of a test module that takes a dict and returns JSON. It runs once a session, in
a process of its own (`python reports_harness.py MODULE:FUNCTION`), with as many engines one after
the other as it needs: starting a process costs more than starting a tiny engine.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_prices import price_artifact

HERE = Path(__file__).resolve().parent
PAIR = HERE.parent / "assets" / "tiny-pair"
MARK = "RESULT "
K = 7

# (tokens, ms). Drafting and verifying cost something, so that D and B move between 0 and full.
PRICED = {
    "draft": [[2, 0.8], [8, 1.0], [16, 1.4], [32, 2.2], [64, 3.8], [128, 7.0]],
    "verify": [[1, 4.0], [8, 4.3], [16, 5.0], [32, 6.6], [64, 10.0], [128, 17.0], [256, 32.0]],
}
# No token looks expensive: nothing to trim.
FLAT = {"draft": [[2, 1.0], [128, 1.0]], "verify": [[1, 5.0], [256, 5.0]]}
# Verification is free up to 42 tokens and out of the question above.
CLIFF = {
    "draft": [[2, 0.01], [128, 0.02]],
    "verify": [[1, 4.0], [42, 4.1], [43, 900.0], [256, 9000.0]],
}

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    # One thread an engine, on any core: two test processes then share two cores well.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """`make()`, made once for all processes of a test session."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = base / f"reports-{name}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(make()), encoding="utf-8")
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def run_job(job: str, **task: Any) -> dict[str, Any]:
    """The result of `MODULE:FUNCTION`; AssertionError with the end of its log when it failed."""
    done = subprocess.run(
        [sys.executable, str(HERE / "reports_harness.py"), job],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    log = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0 and lines, f"{job} ended with {done.returncode}:\n{log}"
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return result


def settings(
    policy: str | None,
    folder: Path,
    prices: dict[str, Any] = PRICED,
    drafter: Path = PAIR / "drafter",
    tokens: int = K,
    **scheduler: Any,
) -> dict[str, Any] | None:
    """The speculative config of a policy; `stock` is vLLM's own method, None the target alone."""
    if policy is None:
        return None
    base: dict[str, Any] = {"model": str(drafter), "num_speculative_tokens": tokens}
    if policy == "stock":
        # Probabilistic is what ForeSpark asks of the stock speculator too.
        return {"method": "dflash", "draft_sample_method": "probabilistic", **base}
    if policy in ("adaptive_verification", "single_curve", "joint"):
        path = price_artifact(folder / "latency.json", prices, PAIR, drafter, tokens)
        base["latency"] = {"artifact": str(path), "fixed_cost": "none"}
    return {"method": "forespark", "scheduler": {"policy": policy, **scheduler}, **base}


ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
    "max_model_len": 512,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 192,
    "block_size": 32,
}


def in_engine(
    policy: str | None,
    use: Callable[[Any], Any],
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """`use(llm)` of an engine of the tiny pair; `config` are further arguments of `settings`.

    No reference to the engine may outlive the call: its end takes the process groups along, and the
    next engine of the process needs its own.
    """
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(PAIR / "target"),
            speculative_config=settings(policy, Path(folder), **(config or {})),
            disable_log_stats=False,
            **{**ENGINE, **options},
        )
        result = use(llm)
        del llm
    gc.collect()
    return result


def runner_of(llm: Any) -> Any:
    """The model runner inside an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def greedy(tokens: int, **options: Any) -> Any:
    """Greedy sampling of `tokens` tokens, past the end of the text unless asked otherwise."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **options})


def generate(llm: Any, prompts: list[Any], params: Any) -> list[list[int]]:
    """Token ids of the answers."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def counters(llm: Any) -> dict[str, Any]:
    """Every metric of the engine by name, labels appended."""
    return {
        "/".join([m.name, *m.labels.values()])
        if m.name.endswith("by_position")
        else m.name: getattr(m, "value", None)
        for m in llm.get_metrics()
    }


def wide_drafter(folder: Path, tokens: int) -> Path:
    """The tiny drafter claiming a longer block: it drafts badly beyond K, and it drafts."""
    shutil.copytree(PAIR / "drafter", folder, ignore=shutil.ignore_patterns("estimators"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["block_size"] = tokens + 1
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


class StepLog:
    """Every draft and every verification of a worker, as plain numbers."""

    def __init__(self, llm: Any) -> None:
        self.rows: list[dict[str, Any]] = []  # a request in a step that sampled it a token
        self.steps: list[dict[str, Any]] = []  # a verification that had drafts scheduled
        self.batches: list[int] = []  # requests in the batch of each draft
        self._runner = runner = runner_of(llm)
        self._propose = runner.speculator.propose
        runner.speculator.propose = self._logged_propose
        if runner.adaptive_verification is not None:
            self._get_num_tokens = runner.adaptive_verification.get_num_tokens
            runner.adaptive_verification.get_num_tokens = self._logged_num_tokens

    def _logged_propose(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self._propose(batch, *args, **kwargs)
        states, speculator = self._runner.req_states, self._runner.speculator
        self.batches.append(batch.num_reqs)
        scores = getattr(speculator, "slot_scores", None)
        for index, name in enumerate(batch.req_ids):
            slot = int(batch.idx_mapping[index])
            if not int(args[4][index]):
                continue
            total = int(states.total_len.gpu[slot])
            draft = [token for token in tokens[index].tolist() if token >= 0]
            self.rows.append(
                {
                    "request": name.split("-")[0],
                    "step": len(self.batches),
                    "left": int(states.max_seq_len[slot]) - total,
                    "draft": draft,
                    "d": len(draft),
                    "emitted": int(args[4][index]),
                    "verified": int(args[4][index]) - 1 + int(args[5][index]),
                    "scores": None if scores is None else scores[slot].tolist(),
                }
            )
        return tokens

    def _logged_num_tokens(self, tokens: dict[str, int], drafts: dict[str, Any]) -> int:
        total = int(self._get_num_tokens(tokens, drafts))
        scheduled = sum(map(len, drafts.values()))
        plain = sum(tokens.values()) - scheduled
        drafted = self._runner.speculator.planner.last.drafted
        self.steps.append(
            {"N": plain, "B": total - plain, "D": drafted, "with_drafts": len(drafts)}
        )
        return total

    def of(self, request: str) -> list[dict[str, Any]]:
        """The rows of one request."""
        return [row for row in self.rows if row["request"] == request]

    def clear(self) -> None:
        """Forget what was seen."""
        for seen in (self.rows, self.steps, self.batches):
            seen.clear()


if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    answer = getattr(importlib.import_module(module), function)(json.loads(sys.stdin.read()))
    print(MARK + json.dumps(answer))
