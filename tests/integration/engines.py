"""The engine of a job: the tiny pair in float32 under one policy, with made-up step costs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness import PAIR, PRICED, K
from made_up_prices import GRAPH_TOKENS, price_artifact

PRICE_POLICIES = ("adaptive_verification", "single_curve", "joint")


def engine(task: dict[str, Any], pair: Path = PAIR, **options: Any) -> Any:
    """An LLM in this process. `task` holds `policy` and, if not the defaults, `tokens` (K),
    `prices`, `fixed_cost`, `scheduler` and `ranks` (tensor parallel); with `graphs` (true or false)
    it runs in bfloat16 on a GPU. `options` go to vLLM."""
    from vllm import LLM

    defaults = {"max_model_len": 512, "max_num_seqs": 12, "max_num_batched_tokens": 192}
    defaults |= {"tensor_parallel_size": task.get("ranks", 1)}
    defaults |= {"enforce_eager": not task.get("graphs", False), "dtype": _dtype(task)}
    if task.get("graphs", False):
        defaults |= {"compilation_config": {"max_cudagraph_capture_size": GRAPH_TOKENS}}
    return LLM(
        str(pair / "target"),
        seed=0,
        block_size=32,
        speculative_config=_speculative(task, pair),
        disable_log_stats=False,
        **(defaults | options),
    )


def runner_of(llm: Any) -> Any:
    """The model runner of an LLM in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def _speculative(task: dict[str, Any], pair: Path) -> dict[str, Any] | None:
    policy, tokens = task["policy"], task.get("tokens", K)
    base = {"model": str(pair / "drafter"), "num_speculative_tokens": tokens}
    if policy is None:
        return None
    if policy == "stock":
        extra = task.get("speculative", {})
        return {"method": "dflash", "draft_sample_method": "probabilistic", **base, **extra}
    config = {"method": "forespark", "scheduler": {"policy": policy, **task.get("scheduler", {})}}
    if policy in PRICE_POLICIES:
        prices = task.get("prices", PRICED)
        path = price_artifact(
            Path(tempfile.mkdtemp()) / "latency.json",
            prices,
            pair,
            pair / "drafter",
            tokens,
            _dtype(task),
            task.get("ranks", 1),
            task.get("graphs", False),
        )
        config["latency"] = {
            "artifact": str(path),
            "fixed_cost": task.get("fixed_cost", "none"),
        }
    return config | base


def _dtype(task: dict[str, Any]) -> str:
    return "bfloat16" if "graphs" in task else "float32"
