"""The held-out acceptance curve over training, and the cost of the estimators per step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forespark.training.evaluate import autocast_for
from forespark.training.history import read_lines, write_lines
from forespark.training.loader import TrainLoader
from forespark.training.model import ForeSparkDraftModel
from forespark.training.rows import Row
from forespark.training.target import Target
from forespark.training.trace import record, walk

_TIMED_STEPS = 3  # rounds over all draft lengths


class CurveRecorder:
    """Measures the walk's acceptance length at `points` evenly spread moments of the training."""

    def __init__(
        self, path: Path, model: ForeSparkDraftModel, target: Target, rows: list[Row], points: int
    ) -> None:
        self.path, self.model, self.target, self.rows = path, model, target, rows
        self.points = points
        earlier = read_lines(path)
        if path.exists():  # the next line must not go behind one that a kill cut short
            write_lines(path, earlier)
        self.taken = len(earlier)

    def maybe(self, progress: float, step: int, minutes: float) -> str | None:
        """Measure when the next point is due; the line to report, or None."""
        if not self.rows or not self.points or progress * self.points < self.taken:
            return None
        self.taken += 1
        length = self.acceptance_length()
        point = {"minutes": round(minutes, 2), "step": step, "acceptance_length": length}
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(point) + "\n")
        return f"curve: {minutes:.1f} min, step {step}, acceptance length {length:.3f}"

    def acceptance_length(self) -> float:
        """Mean emitted tokens a draft, the bonus token included."""
        self.model.eval()
        try:
            trace = record(
                self.model,
                self.target,
                self.rows,
                self.model.config.num_speculative_tokens,
                amp=autocast_for(self.target.device),
            )
        finally:
            self.model.train()
        return 1 + float(trace.accepted[walk(trace)].mean())


def time_estimators(
    model: ForeSparkDraftModel,
    loader: TrainLoader,
    call_kwargs: dict[str, Any],
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Seconds of forward and backward with both estimators, without, and their ratio.

    Batches are the same ones, in alternation, over whole cycles of draft lengths.
    """
    device = model.fc.weight.device
    plain = call_kwargs | {"lambda_pre": 0.0, "lambda_post": 0.0}
    spent = {"with": 0.0, "without": 0.0}
    block = model.config.num_speculative_tokens
    batches = loader.batch_sampler._generate_batches(0)[: _TIMED_STEPS * block]
    for number, (step, documents) in enumerate(batches):
        batch = loader.make(step, documents)
        for name, arguments in (("with", call_kwargs), ("without", plain)):
            _synchronize(device)
            begun = time.perf_counter()
            with autocast_for(device)():
                loss = model(**batch, **arguments)[1]
            loss.backward()
            _synchronize(device)
            if number >= block or len(batches) <= block:  # the first cycle warms up
                spent[name] += time.perf_counter() - begun
            model.zero_grad(set_to_none=True)
            for parameter in model.pre_draft.parameters():
                parameter.grad = None
    ratio = spent["with"] / max(1e-9, spent["without"])
    say(f"timing: a step costs {ratio:.3f} of one without estimators")
    return {"seconds_with": spent["with"], "seconds_without": spent["without"], "ratio": ratio}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
