"""The nouns of one decoding step, as frozen records (symbols of the README glossary).

Nothing here imports vLLM or needs a GPU. The step reads
estimate -> schedule -> draft -> distribute -> verify, and each arrow is one of these records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True)
class LatencyTable:
    """Step latency by token count: a step function over captured sizes, interpolated above them.

    `sizes` (int64 [m], ascending, >= 1) are measured token counts and `ms` (float64 [m], positive,
    non-decreasing) their latency in milliseconds. Up to `captured_limit` a count is padded to the
    next measured size, so it costs what that size costs; above it nothing pads and the cost is
    interpolated linearly. Past the largest size the last slope continues; where that slope is zero
    or unknown (one size) the price grows in proportion to the tokens, because an unmeasured shape
    that looks free is the costlier mistake. Zero tokens cost nothing: the stage is not launched.

    Raises ValueError when the arrays are empty, of different length, not finite, not positive,
    not ascending or decreasing.
    """

    sizes: IntArray  # [m] tokens
    ms: FloatArray  # [m] milliseconds
    captured_limit: int  # tokens
    source: str = "measured"  # where the figures come from, for messages and traces

    def __post_init__(self) -> None:
        sizes = np.asarray(self.sizes, dtype=np.int64)
        ms = np.asarray(self.ms, dtype=np.float64)
        if sizes.ndim != 1 or sizes.size == 0 or sizes.shape != ms.shape:
            raise ValueError(
                f"latency table: {sizes.size} sizes for {ms.size} latencies; "
                "give one latency (ms) for each size, at least one"
            )
        if not np.isfinite(ms).all() or (ms <= 0).any():
            raise ValueError("latency table: latencies must be finite and > 0 ms")
        if sizes[0] < 1 or (np.diff(sizes) <= 0).any():
            raise ValueError("latency table: sizes must be ascending and >= 1 token")
        if (np.diff(ms) < 0).any():
            at = int(np.flatnonzero(np.diff(ms) < 0)[0])
            raise ValueError(
                f"latency table: {ms[at + 1]:.4g} ms at {sizes[at + 1]} tokens is less than "
                f"{ms[at]:.4g} ms at {sizes[at]}; latencies must not decrease with size"
            )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "ms", ms)

    @cached_property
    def is_flat(self) -> bool:
        """True when every size costs the same, so that no budget can look expensive."""
        return bool(self.ms[0] == self.ms[-1])

    def at(self, tokens: IntArray | int) -> FloatArray:
        """Latency in ms of `tokens` (scalar or int array of any shape; same shape out)."""
        count = np.asarray(tokens, dtype=np.int64)
        last = self.sizes.size - 1
        stepped = self.ms[np.minimum(np.searchsorted(self.sizes, count, side="left"), last)]
        smooth_from = np.flatnonzero(self.sizes > self.captured_limit)
        if smooth_from.size:
            # The first size past the captured ones starts its own regime: below it is a graph.
            above = slice(int(smooth_from[0]), None)
            line = np.interp(count, self.sizes[above], self.ms[above])
            stepped = np.where(count > self.captured_limit, line, stepped)
        slope = 0.0
        if last > 0:
            slope = (self.ms[-1] - self.ms[-2]) / (self.sizes[-1] - self.sizes[-2])
        if slope <= 0:
            slope = self.ms[-1] / self.sizes[-1]
        beyond = self.ms[-1] + slope * (count - self.sizes[-1])
        stepped = np.where(count > self.sizes[-1], beyond, stepped)
        return np.where(count <= 0, 0.0, stepped)

    def dense(self, max_tokens: int) -> FloatArray:
        """float64 [>= max_tokens + 1], read-only: `at` of 0, 1, 2, ... tokens, kept between calls.

        The host prices every budget of a step as one slice of it, without a search.
        """
        held: FloatArray | None = self.__dict__.get("_dense")
        if held is None or held.size <= max_tokens:
            held = self.at(np.arange(max(1024, 2 * (max_tokens + 1))))
            held.setflags(write=False)
            object.__setattr__(self, "_dense", held)
        return held


@dataclass(frozen=True)
class StepInputs:
    """What the host knows when it decides a step: last step's scores and this step's batch."""

    scores: FloatArray  # [n, K] survival scores g of the previous step, non-increasing in a row
    draft_limits: IntArray  # [n] longest draft each request may take now, 0..K
    num_emit: int  # requests that sample a token this step
    num_non_draft_tokens: int  # N: anchors plus prefill tokens of the verification step
    min_draft_len: int = 0  # drafted tokens every eligible request gets while D > 0
    fixed_ms: float = 0.0  # what a step of this size was seen to cost beyond the tables


@dataclass(frozen=True)
class VerifyInputs:
    """What the host knows when it re-plans B: the draft is launched, the verification is not.

    `scores` are whatever source the policy names (last step's g, or post-draft survival with -inf
    where nothing was drafted); rows are the requests still present.
    """

    scores: FloatArray  # [n, K] non-increasing in a row
    draft_limits: IntArray  # [n] most drafted tokens each present request can hold, 0..K
    num_emit: int  # requests that sample a token this step
    num_non_draft_tokens: int  # N of the verification step as it will run
    draft_budget: int  # D drafted, also for requests that left since
    num_drafted_reqs: int  # anchor rows of the launched draft, so it ran D + this many tokens
    verify_cap: int  # drafted tokens still present: B never exceeds it
    min_draft_len: int = 0  # the floor the draft was planned with
    fixed_ms: float = 0.0  # what a step of this size was seen to cost beyond the tables


@dataclass(frozen=True)
class Plan:
    """The budgets of a step: `draft_budget` D tokens drafted, `verify_budget` B <= D verified."""

    draft_budget: int
    verify_budget: int

    def __post_init__(self) -> None:
        if not 0 <= self.verify_budget <= self.draft_budget:
            raise ValueError(
                f"plan: verify_budget {self.verify_budget} must lie in 0..draft_budget "
                f"({self.draft_budget})"
            )


@dataclass(frozen=True)
class Candidate:
    """One priced plan: expected emitted tokens over predicted milliseconds."""

    plan: Plan
    predicted_tokens: float
    predicted_ms: float  # drafting, verification and fixed cost; NaN without a profile
    draft_ms: float = 0.0  # the drafting part of predicted_ms

    @property
    def goodput(self) -> float:
        """Expected emitted tokens per millisecond; 0 for a step that runs nothing."""
        return self.predicted_tokens / self.predicted_ms if self.predicted_ms else 0.0


@dataclass(frozen=True)
class Decision:
    """The plan of a step and why: its price, the best plan it beat, and the guard that fired."""

    policy: str
    chosen: Candidate
    runner_up: Candidate | None = None
    guard: str | None = None  # name of the rule that overrode the argmax, if any
    num_reqs: int = 0
    num_non_draft_tokens: int = 0
    notes: tuple[str, ...] = field(default=())
    alternatives: tuple[tuple[str, Candidate], ...] = ()  # (name, price) of the plans compared
    max_draft_len: int | None = None  # cap on every draft of the step; None: the request's limit

    @property
    def plan(self) -> Plan:
        return self.chosen.plan
