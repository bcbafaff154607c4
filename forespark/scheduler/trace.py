"""What each step decided, as JSON lines: one record per step, readable while the server runs."""

from __future__ import annotations

import json
import math
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from forespark.core import Candidate, Decision

SCHEMA = 1


@dataclass(frozen=True)
class TracedPlan:
    """A priced plan in a trace; NaN prices (no profile) are stored as null and read as None."""

    name: str
    D: int
    B: int
    tokens: float
    ms: float | None
    draft_ms: float | None

    @property
    def goodput(self) -> float | None:
        """Expected emitted tokens per millisecond."""
        return self.tokens / self.ms if self.ms else None

    @classmethod
    def of(cls, name: str, candidate: Candidate) -> TracedPlan:
        return cls(
            name,
            candidate.plan.draft_budget,
            candidate.plan.verify_budget,
            round(candidate.predicted_tokens, 4),
            _finite(candidate.predicted_ms),
            _finite(candidate.draft_ms),
        )


@dataclass(frozen=True)
class Actual:
    """What the step really did; every field optional."""

    accepted_tokens: int | None = None
    emitted_tokens: int | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    step_ms: float | None = None


@dataclass(frozen=True)
class StepArrays:
    """Per-request arrays of one step, as nested lists; only recorded when asked for."""

    rewards: list[list[float]] | None = None  # [n][K + 1] R
    scores: list[list[float]] | None = None  # [n][K] g
    survival: list[list[float]] | None = None  # [n][K] survival of the full-length row
    draft_lens: list[int] | None = None  # [n]
    verify_lens: list[int] | None = None  # [n]


@dataclass(frozen=True)
class TraceRecord(StepArrays):
    """One step of a trace file: the decision, its price, and what happened if it is known."""

    step: int = 0
    time: float = 0.0  # seconds since the epoch
    policy: str = ""
    D: int = 0
    B: int = 0
    N: int = 0
    n: int = 0
    predicted_tokens: float = 0.0
    predicted_ms: float | None = None
    draft_ms: float | None = None
    runner_up: TracedPlan | None = None
    alternatives: tuple[TracedPlan, ...] = ()
    guard: str | None = None
    notes: tuple[str, ...] = ()
    actual: Actual | None = None
    schema: int = SCHEMA

    @property
    def chosen(self) -> TracedPlan:
        """The plan that ran."""
        prices = (self.predicted_tokens, self.predicted_ms, self.draft_ms)
        return TracedPlan("chosen", self.D, self.B, *prices)

    @classmethod
    def of(
        cls, step: int, at: float, decision: Decision, actual: Actual | None, arrays: StepArrays
    ) -> TraceRecord:
        """The record of a decision taken at `at` (seconds since the epoch)."""
        chosen, runner_up = decision.chosen, decision.runner_up
        return cls(
            **asdict(arrays),
            step=step,
            time=at,
            policy=decision.policy,
            D=chosen.plan.draft_budget,
            B=chosen.plan.verify_budget,
            N=decision.num_non_draft_tokens,
            n=decision.num_reqs,
            predicted_tokens=round(chosen.predicted_tokens, 4),
            predicted_ms=_finite(chosen.predicted_ms),
            draft_ms=_finite(chosen.draft_ms),
            runner_up=None if runner_up is None else TracedPlan.of("runner-up", runner_up),
            alternatives=tuple(TracedPlan.of(*named) for named in decision.alternatives),
            guard=decision.guard,
            notes=decision.notes,
            actual=actual,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TraceRecord:
        """Raises ValueError for another schema, KeyError or TypeError for malformed fields."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}; this version reads schema {SCHEMA}")
        for required in ("step", "policy", "D", "B", "N", "n"):
            data[required]
        known = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        known["runner_up"] = TracedPlan(**data["runner_up"]) if "runner_up" in data else None
        known["alternatives"] = tuple(TracedPlan(**plan) for plan in data.get("alternatives", ()))
        known["notes"] = tuple(data.get("notes", ()))
        known["actual"] = Actual(**data["actual"]) if "actual" in data else None
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """JSON types only; absent fields are left out."""
        data = {key: value for key, value in asdict(self).items() if value is not None}
        for key in ("rewards", "scores", "survival"):
            if key in data:
                data[key] = [[_short(value) for value in row] for row in data[key]]
        return data


class TraceWriter:
    """Appends one JSON object a line to `path`, flushed at every line. Use as a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")

    def write(
        self,
        step: int,
        decision: Decision,
        actual: Actual | None = None,
        arrays: StepArrays | None = None,
        at: float | None = None,
    ) -> None:
        """Record `decision` of `step`; `at` is seconds since the epoch (default: now)."""
        when = time.time() if at is None else at
        record = TraceRecord.of(step, when, decision, actual, arrays or StepArrays())
        self._file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_trace(path: str | Path) -> list[TraceRecord]:
    """Records in file order. A truncated last line (a server still writing) is skipped with a
    warning; any other unreadable line raises ValueError naming the file and line.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    records: list[TraceRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(TraceRecord.from_json(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                warnings.warn(
                    f"{path}: line {number} is cut off (still being written?); "
                    f"read the {len(records)} complete steps before it",
                    stacklevel=2,
                )
                break
            raise ValueError(f"{path}, line {number}: not a trace record: {error}") from error
    return records


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _short(value: float) -> float:
    """Five decimals; the -inf of a position never drafted is drawn as 0."""
    return round(value, 5) if math.isfinite(value) else 0.0
