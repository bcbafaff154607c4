"""Every step's price beside what it took: marked in the worker, read when all steps are over.

A step reaches from one draft to the next: the draft's own launch, then the verification of what it
drafted, which is what its plan priced. Only steps that the standing metrics compare are kept:
decode-only, directly behind another such step.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def watch(worker: Any) -> None:
    """Runs in the worker, between runs: note every draft and when it began."""
    speculator = worker.model_runner.speculator
    propose, cuda = speculator.propose, speculator.device.type == "cuda"
    seen: list[tuple[Any, Any]] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        began, before = _now(cuda), speculator.planner.last
        drafted = propose(*args, **kwargs)
        if speculator.planner.last is not before:  # not a dummy step
            seen.append((began, speculator.planner.last))
        return drafted

    speculator.propose = noted
    speculator.step_times = seen


def take(worker: Any) -> list[dict[str, float]]:
    """Runs in the worker: the steps since `watch`, which notes no more.

    Each with `n` requests, `drafted` and `verified` tokens, `predicted_ms` (of which `fixed_ms`
    was learned while serving) and `measured_ms`.
    """
    speculator = worker.model_runner.speculator
    seen = speculator.step_times
    del speculator.propose, speculator.step_times  # the method is the class's again
    if speculator.device.type == "cuda":
        torch.cuda.synchronize(speculator.device)
    return [
        {
            "n": record.verify.num_reqs,
            "drafted": record.drafted,
            "verified": record.verify.plan.verify_budget,
            "predicted_ms": float(record.verify.chosen.predicted_ms),
            "fixed_ms": float(record.fixed_ms),
            "measured_ms": _between(began, ended),
        }
        for (began, record), (ended, after) in zip(seen, seen[1:], strict=False)
        if record.index + 1 == after.index and after.steady
    ]


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(began: Any, ended: Any) -> float:
    """Milliseconds."""
    if isinstance(began, float):
        return float(ended - began) * 1e3
    return float(began.elapsed_time(ended))


def startup(worker: Any) -> dict[str, float | None] | None:
    """Runs in the worker: `startup_extra_s` and `load_s`; None where nothing has a price.

    Seconds that measuring the prices added to the start (null when they were loaded), and seconds
    that loading them from an artifact takes, its identity included.
    """
    from forespark.scheduler.latency import load_artifact, save_artifact
    from forespark.verifier.setup import artifact_identity

    runner = worker.model_runner
    draft, verify = runner.speculator.prices
    if draft is None or verify is None:
        return None
    profiled = verify.source == "start-up profile"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latency.json"
        save_artifact(file, draft, verify, artifact_identity(runner))
        started = time.perf_counter()
        load_artifact(file, artifact_identity(runner))
        loading = time.perf_counter() - started
    return {
        "startup_extra_s": runner.speculator.pricing_s if profiled else None,
        "load_s": loading,
    }


def errors(rows: list[dict[str, float]], load: int) -> dict[str, float]:
    """Shares of the measured time: `median_abs_error`, `p90_abs_error`, `median_error` (signed).

    Also `steps`, and the medians `measured_ms` and `fixed_ms`. Raises ValueError, one line, where
    no step was compared or one has no price.
    """
    if not rows:
        raise ValueError(
            f"--loads: at {load} no decode-only step followed another; give longer answers "
            "(--max-tokens) or more --seconds"
        )
    predicted, measured, fixed = (
        np.array([row[name] for row in rows])
        for name in ("predicted_ms", "measured_ms", "fixed_ms")
    )
    if not np.isfinite(predicted).all():
        raise ValueError(f"--policies: steps at load {load} have no price; use joint")
    share = (predicted - measured) / measured
    return {
        "median_abs_error": float(np.median(np.abs(share))),
        "p90_abs_error": float(np.quantile(np.abs(share), 0.9)),
        "median_error": float(np.median(share)),
        "steps": len(rows),
        "measured_ms": float(np.median(measured)),
        "fixed_ms": float(np.median(fixed)),
    }
