"""Where a decoding step's time goes on the device: marks between stages, medians over steps.

`watch` wraps a worker's runner, ForeSpark's or stock vLLM's, so that every stage boundary records
a CUDA event (the clock on a CPU); `take` turns the marks of decode-only steps into milliseconds by
stage and unwraps. A step reaches from one target forward to the next. Nothing waits while steps
run: events are read when all of them are over.

| stage | from |
| --- | --- |
| verify | the target's forward pass |
| sample | LM head, rejection sampling, bookkeeping |
| estimate | the drafter's view of the accepted rows, pre-draft logits |
| envelope | calibrated survival, reward, concave envelope |
| split | D over the requests |
| pack | the packed batch of the draft |
| draft | context keys and values, backbone, heads (stock: the whole proposal) |
| post_draft | survival of what was drafted, start of the copy to the host |
| distribute | B over the drafted tokens |
| other | the rest: preparing the batch, and the device waiting for the host |
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

STAGES = (
    "verify", "sample", "estimate", "envelope", "split", "pack", "draft", "post_draft",
    "distribute", "other",
)  # fmt: skip
DRAFTER = ("estimate", "envelope", "split", "pack", "draft", "post_draft")


@dataclass
class Step:
    """One step's marks: (stage that begins, event or seconds)."""

    num_reqs: int
    num_tokens: int
    decodes: bool  # no prefill row in it
    marks: list[tuple[str, Any]] = field(default_factory=list)


class StageTimer:
    """Stands in for the runner's `step_timing` and records every boundary."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._steps: list[Step] = []
        self._batch: tuple[int, int, bool] = (0, 0, False)

    def mark(self, stage: str) -> None:
        """The stage that begins here; before the first step nothing is kept."""
        if self._steps:
            self._steps[-1].marks.append((stage, self._now()))

    def record_batch(self, input_batch: Any, full_cudagraph: bool) -> None:
        """vLLM's hook: the batch that the next forward pass runs."""
        del full_cudagraph
        self._batch = (input_batch.num_reqs, input_batch.num_tokens, not input_batch.has_prefill)

    def forward_start(self) -> None:
        """vLLM's hook: a step begins."""
        self._steps.append(Step(*self._batch))
        self.mark("verify")

    def forward_end(self) -> None:
        """vLLM's hook; only dummy steps call it."""

    drafter_start = drafter_end = forward_end

    def finish(self) -> list[dict[str, float]]:
        """Milliseconds by stage of every whole decode-only step, with `n`, `tokens`, `step`."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        rows = []
        for step, after in zip(self._steps, self._steps[1:], strict=False):
            if not (step.decodes and after.decodes):
                continue
            marks = [*step.marks, ("", after.marks[0][1])]
            row: dict[str, float] = defaultdict(float)
            for (stage, begin), (_, end) in zip(marks, marks[1:], strict=False):
                row[stage] += self._between(begin, end)
            row["step"] = self._between(marks[0][1], marks[-1][1])
            rows.append({**row, "n": step.num_reqs, "tokens": step.num_tokens})
        return rows

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self._cuda else (end - begin) * 1e3


def watch(worker: Any, verify_per_req: float | None = None) -> None:
    """Runs in the worker, between runs: mark stages from now on.

    With `verify_per_req` every step verifies that many drafted tokens a request, whatever the
    policy or vLLM's own budget says: what makes steps of different methods comparable.
    """
    runner = worker.model_runner
    timer = StageTimer(runner.device)
    undo: list[Callable[[], None]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        own = name in vars(owner)
        before = getattr(owner, name)
        setattr(owner, name, value)
        undo.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))

    def marked(owner: Any, name: str, stage: str, after: str | None) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            timer.mark(stage)
            result = inner(*args, **kwargs)
            if after is not None:
                timer.mark(after)
            return result

        replace(owner, name, call)

    replace(runner, "step_timing", timer)
    marked(runner, "sample_tokens", "sample", "other")
    if runner.speculator is not None:
        ours = hasattr(runner.speculator, "mark")
        marked(runner.speculator, "propose", "estimate" if ours else "draft", "sample")
        if ours:
            replace(runner.speculator, "mark", timer.mark)
    manager = runner.adaptive_verification
    if manager is not None:
        marked(manager, "reallocate_drafts", "distribute", "other")
        if verify_per_req is not None:
            replace(manager, "get_num_tokens", _forced(manager, verify_per_req))
    runner.forespark_watch = (timer, undo)


def _forced(manager: Any, verify_per_req: float) -> Callable[..., int]:
    choose = manager.get_num_tokens

    def get_num_tokens(plain: dict[str, int], drafts: dict[str, list[int]]) -> int:
        total = choose(plain, drafts)
        scheduled, rest, budget = manager._batch_budget
        holders = sum(1 for count in scheduled.values() if count)
        # Nothing can be verified that may not have been drafted.
        planner = getattr(getattr(manager, "speculator", None), "planner", None)
        held = sum(scheduled.values()) if planner is None else planner.present(scheduled)
        forced = min(round(verify_per_req * holders), sum(scheduled.values()), held)
        manager._batch_budget = (scheduled, rest, forced)
        return int(total - budget + forced)

    return get_num_tokens


def take(worker: Any) -> list[dict[str, float]]:
    """Runs in the worker: the rows since `watch`, and no marks from now on."""
    timer, undo = worker.model_runner.forespark_watch
    for restore in reversed(undo):
        restore()
    del worker.model_runner.forespark_watch
    rows: list[dict[str, float]] = timer.finish()
    return rows


def summary(rows: list[dict[str, float]], num_reqs: int) -> dict[str, float]:
    """Medians by stage over the steps of exactly `num_reqs` requests.

    `steps` counts them; `drafter` is the sum of the stages from estimate to post_draft.
    Raises ValueError where no step had that many requests.
    """
    rows = [row for row in rows if row["n"] == num_reqs]
    if not rows:
        raise ValueError(f"stages: no decode-only step of {num_reqs} requests was seen")
    medians = {
        stage: statistics.median(row.get(stage, 0.0) for row in rows)
        for stage in (*STAGES, "step", "tokens")
    }
    drafter = statistics.median(sum(row.get(stage, 0.0) for stage in DRAFTER) for row in rows)
    return {"steps": float(len(rows)), **medians, "drafter": drafter}
