"""What each step did, for the metrics and the trace: plain numbers, one step late."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from forespark.core import Candidate, Decision
from forespark.drafter.planner import DraftRecord
from forespark.metrics import MetricsWriter, StepStats
from forespark.scheduler.trace import Actual, StepArrays, TraceWriter


class Observer:
    """Rank 0 of a worker group. `observe` gets the record of a draft and its host copy.

    The copy of draft k also holds the outcome of the verification that ran just before it, which is
    that of draft k - 1.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        metrics: MetricsWriter | None,
        trace: TraceWriter | None,
        trace_arrays: bool,
    ) -> None:
        self._steps = num_speculative_tokens
        self._metrics = metrics
        self._trace = trace
        self._trace_arrays = trace_arrays
        self._before: tuple[DraftRecord, dict[str, np.ndarray]] | None = None

    def observe(self, record: DraftRecord, arrays: dict[str, np.ndarray]) -> None:
        """Account for the draft `record` and for the verification that preceded it."""
        arrays = {name: array.copy() for name, array in arrays.items()}
        sampled, rejected = arrays["num_sampled"], arrays["num_rejected"]
        emits = sampled > 0
        accepted = (sampled - 1)[emits]
        verified = accepted + rejected[emits]
        before = self._before
        consecutive = before is not None and before[0].index + 1 == record.index
        step_ms = (
            (record.launched_at - before[0].launched_at) * 1e3
            if before is not None and consecutive
            else math.nan
        )
        lengths = arrays["draft_lens"]
        eligible = record.limits > 0
        decision = final_decision(before[0]) if before is not None and consecutive else None
        if self._metrics is not None:
            chosen = None if decision is None else decision.chosen
            # Policies without prices predict nothing: their plan counts guaranteed tokens only.
            priced = chosen is not None and math.isfinite(chosen.predicted_ms)
            # Times are compared where both are of the same work: a prefill's or a pause's is not.
            timed = priced and record.steady
            self._metrics.observe(
                StepStats(
                    num_reqs=int(emits.sum()),
                    drafted=int(lengths.sum()),
                    verified=int(verified.sum()),
                    accepted=int(accepted.sum()),
                    emitted=int(sampled[emits].sum()),
                    draft_budget=record.drafted,
                    verify_budget=int(verified.sum()),
                    predicted_tokens=chosen.predicted_tokens if priced else math.nan,
                    predicted_ms=chosen.predicted_ms if timed else math.nan,
                    actual_ms=step_ms if timed else math.nan,
                    guard=record.decision.guard,
                    draft_len_counts=np.bincount(lengths[eligible], minlength=self._steps + 1),
                    verified_by_pos=_at_least(verified, self._steps),
                    accepted_by_pos=_at_least(accepted, self._steps),
                    reached_by_pos=_at_least(np.minimum(verified, accepted + 1), self._steps),
                )
            )
        if self._trace is not None and decision is not None and before is not None:
            drafted_before = before[0]
            self._trace.write(
                drafted_before.index,
                decision,
                Actual(
                    accepted_tokens=int(accepted.sum()),
                    emitted_tokens=int(sampled[emits].sum()),
                    step_ms=step_ms,
                ),
                self._arrays(drafted_before, before[1], arrays),
                at=time.time(),
            )
        self._before = (record, arrays)

    def _arrays(
        self, record: DraftRecord, drafted: dict[str, np.ndarray], outcome: dict[str, np.ndarray]
    ) -> StepArrays | None:
        if not self._trace_arrays:
            return None
        scores = drafted["scores"][record.slots]
        rewards = np.concatenate((np.zeros((len(scores), 1)), scores.cumsum(axis=1)), axis=1)
        verify_lens = outcome["num_sampled"] - 1 + outcome["num_rejected"]
        same_batch = len(verify_lens) == len(record.slots)
        return StepArrays(
            rewards=rewards.tolist(),
            scores=scores.tolist(),
            survival=drafted["survival"][record.slots].tolist(),
            draft_lens=drafted["draft_lens"].tolist(),
            verify_lens=verify_lens.clip(min=0).tolist() if same_batch else None,
        )

    def set_trimming(self, active: bool) -> None:
        """Whether the latency tables let any budget look expensive."""
        if self._metrics is not None:
            self._metrics.set_trimming(active)

    def close(self) -> None:
        """Flush and close the trace and the metrics."""
        for sink in (self._trace, self._metrics):
            if sink is not None:
                sink.close()


def final_decision(record: DraftRecord) -> Decision:
    """The decision as it ran: D and its guard from the plan, B and the price from the re-plan."""
    if record.verify is None:
        nothing_left: Candidate = record.decision.chosen
        return replace(record.decision, chosen=nothing_left)
    verify = record.verify
    return replace(
        record.decision, chosen=verify.chosen, num_non_draft_tokens=verify.num_non_draft_tokens
    )


def _at_least(counts: np.ndarray, steps: int) -> np.ndarray:
    """int64 [K]: how many of `counts` reach position j = 1..K."""
    return (counts[:, None] >= np.arange(1, steps + 1)[None, :]).sum(axis=0)
