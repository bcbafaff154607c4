"""Totals of every step, written in the worker process and read by whoever answers a scrape.

The two processes share one small file of float64 totals: a header that names the layout, the
policy and K, the names of the guards seen, then the totals. One process writes, any process on the
host reads; nothing waits, because totals only grow and a reader copies them in one piece.
`forespark/metrics_collector.py` turns the file into Prometheus metrics.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forespark import __version__
from forespark.core import IntArray

LAYOUT = 1
"""Changes with the meaning or order of the totals; a reader of another layout refuses the file."""

BUDGET_BUCKETS = (0, *(2**power for power in range(15)))
"""Upper bounds (tokens) of the budget histograms; one bucket more holds what lies above."""

STATS_KEY = "forespark_stats"
"""Key of the file's path in `VllmConfig.additional_config`, beside the settings."""

OTHER_GUARD = "other"
_SCALARS = (
    "steps",
    "request_steps",
    "drafted_tokens",
    "verified_tokens",
    "accepted_tokens",
    "emitted_tokens",
    "predicted_tokens",
    "emitted_tokens_with_prediction",
    "predicted_ms",
    "measured_ms",
    "draft_budget_sum",
    "verify_budget_sum",
    "draft_length_sum",
    "trimming_active",
)
_HEADER_BYTES = 1024
_GUARDS = 16
_GUARD_BYTES = 64
_TOTALS_OFFSET = _HEADER_BYTES + _GUARDS * _GUARD_BYTES
_AT = {name: slot for slot, name in enumerate(_SCALARS)}

Totals = npt.NDArray[np.float64]
Counts = IntArray | list[int]


@dataclass(frozen=True)
class StepStats:
    """One step: the verification that just finished, and the draft launched behind it.

    Of the verification: `num_reqs`, `verified`, `accepted`, `emitted` (accepted plus the bonus or
    corrected token of each request), `verify_budget`, the predictions and the time. Of the draft:
    `drafted`, `draft_budget`, `draft_len_counts`, `guard`. A draft is verified one step later, so
    accepted <= verified <= drafted holds for the totals. Zero everywhere is a legal step.
    """

    num_reqs: int  # requests that sampled in this verification
    drafted: int  # tokens
    verified: int  # tokens
    accepted: int  # tokens
    emitted: int  # tokens
    draft_budget: int  # D, tokens
    verify_budget: int  # B, tokens
    predicted_tokens: float = math.nan  # emitted tokens the plan expected; NaN: no prediction
    predicted_ms: float = math.nan  # NaN: no prediction
    actual_ms: float = math.nan  # NaN: not measured
    guard: str | None = None  # guard that overrode the plan
    draft_len_counts: Counts | None = None  # [K + 1] requests drafting 0..K tokens
    accepted_by_pos: Counts | None = None  # [K] accepted tokens by 0-based draft position
    verified_by_pos: Counts | None = None  # [K] verified tokens by 0-based draft position
    reached_by_pos: Counts | None = None  # [K] verified tokens whose predecessors were all kept


@dataclass(frozen=True)
class Stats:
    """A consistent copy of the totals; all numbers are sums since the file was made."""

    policy: str
    num_speculative_tokens: int  # K
    version: str  # of the ForeSpark that writes
    scalars: dict[str, float]  # by name, see `_SCALARS`
    guard_hits: dict[str, int]
    draft_length: IntArray  # [K + 1] requests by draft length, not cumulative
    draft_budget: IntArray  # [len(BUDGET_BUCKETS) + 1] steps by D, not cumulative
    verify_budget: IntArray  # [len(BUDGET_BUCKETS) + 1] steps by B, not cumulative
    verified_by_pos: IntArray  # [K]
    accepted_by_pos: IntArray  # [K]
    reached_by_pos: IntArray  # [K]


def _layout(num_speculative_tokens: int) -> tuple[dict[str, slice], int]:
    """Where each array of totals lies for this K, and the size of the file in bytes."""
    buckets = len(BUDGET_BUCKETS) + 1
    sizes = {
        "scalars": len(_SCALARS),
        "guards": _GUARDS,
        "draft_length": num_speculative_tokens + 1,
        "draft_budget": buckets,
        "verify_budget": buckets,
        "verified_by_pos": num_speculative_tokens,
        "accepted_by_pos": num_speculative_tokens,
        "reached_by_pos": num_speculative_tokens,
    }
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = slice(start, start + size)
        start += size
    return parts, _TOTALS_OFFSET + 8 * start


def stats_path(additional_config: object) -> str | None:
    """The stats file of an engine, from `VllmConfig.additional_config`; None without one."""
    if not isinstance(additional_config, Mapping):
        return None
    path = additional_config.get(STATS_KEY)
    return path if isinstance(path, str) else None


def create_stats_file(path: str | Path, policy: str, num_speculative_tokens: int) -> None:
    """Make `path` a stats file of zeros; a file already there is replaced as a whole."""
    header = {
        "format": "forespark-stats",
        "layout": LAYOUT,
        "policy": policy,
        "num_speculative_tokens": num_speculative_tokens,
        "version": __version__,
    }
    content = bytearray(_layout(num_speculative_tokens)[1])
    text = json.dumps(header).encode()
    content[: len(text)] = text
    unfinished = Path(f"{path}.{os.getpid()}")
    unfinished.touch(mode=0o600)
    unfinished.write_bytes(content)
    unfinished.replace(path)


def _read_header(content: bytes, path: str | Path) -> tuple[str, str, int]:
    """Policy, version and K of a stats file; ValueError, one line, when it is another's."""
    try:
        header = json.loads(content[:_HEADER_BYTES].rstrip(b"\0"))
        found = header["format"], header["layout"]
        tokens = int(header["num_speculative_tokens"])
        policy, version = str(header["policy"]), str(header["version"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: is not a ForeSpark stats file; restart the server") from None
    if found != ("forespark-stats", LAYOUT):
        raise ValueError(
            f"{path}: has layout {found[1]} of {found[0]}, this version reads layout {LAYOUT}; "
            "use one ForeSpark version for the server and its workers"
        )
    size = _layout(tokens)[1]
    if len(content) != size:
        raise ValueError(
            f"{path}: holds {len(content)} bytes, K = {tokens} needs {size}; restart the server"
        )
    return policy, version, tokens


def read_stats(path: str | Path) -> Stats:
    """The totals now. ValueError, one line, for a file of another layout; OSError without one."""
    content = Path(path).read_bytes()
    policy, version, tokens = _read_header(content, path)
    totals = np.frombuffer(content, np.float64, offset=_TOTALS_OFFSET)
    parts = {name: totals[part] for name, part in _layout(tokens)[0].items()}
    counts = {name: part.astype(np.int64) for name, part in parts.items() if name != "scalars"}
    names = _guard_names(content)
    return Stats(
        policy=policy,
        num_speculative_tokens=tokens,
        version=version,
        scalars=dict(zip(_SCALARS, parts["scalars"].tolist(), strict=True)),
        guard_hits=dict(zip(names, counts.pop("guards").tolist(), strict=False)),
        **counts,
    )


def _guard_names(content: bytes) -> list[str]:
    table = content[_HEADER_BYTES:_TOTALS_OFFSET]
    rows = (table[at : at + _GUARD_BYTES] for at in range(0, len(table), _GUARD_BYTES))
    return [row.rstrip(b"\0").decode(errors="replace") for row in rows if row[0]]


class MetricsWriter:
    """Adds each step to the stats file. One writer for a file; use it from one thread.

    Continues the totals of a file that exists and makes one that does not. Raises ValueError, one
    line, when the file was made for another policy, K or layout.
    """

    def __init__(self, path: str | Path, policy: str, num_speculative_tokens: int) -> None:
        self.path = Path(path)
        if not self.path.exists() or self.path.stat().st_size == 0:
            create_stats_file(self.path, policy, num_speculative_tokens)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        found_policy, _, found_tokens = _read_header(self._map[:], path)
        found = found_policy, found_tokens
        if found != (policy, num_speculative_tokens):
            self._map.close()
            raise ValueError(
                f"{path}: is of policy {found[0]} with K = {found[1]}, the worker runs policy "
                f"{policy} with K = {num_speculative_tokens}; give each engine its own file"
            )
        self._shared: Totals = np.frombuffer(self._map, np.float64, offset=_TOTALS_OFFSET)
        # Added up here and published in one copy: a reader never sees half a step's totals added.
        self._totals = self._shared.copy()
        parts, _ = _layout(num_speculative_tokens)
        self._part = {name: self._totals[part] for name, part in parts.items()}
        self._guard_slots = {name: i for i, name in enumerate(_guard_names(self._map[:]))}
        self._closed = False

    def observe(self, step: StepStats) -> None:
        """Add one step to the totals (a few microseconds)."""
        # What is compared with a prediction is summed over the steps that have one.
        predicted = not math.isnan(step.predicted_tokens)
        timed = not (math.isnan(step.predicted_ms) or math.isnan(step.actual_ms))
        lengths = step.draft_len_counts
        length_sum = 0 if lengths is None else int(np.dot(lengths, np.arange(len(lengths))))
        self._part["scalars"][:-1] += (
            1,
            step.num_reqs,
            step.drafted,
            step.verified,
            step.accepted,
            step.emitted,
            step.predicted_tokens if predicted else 0.0,
            step.emitted if predicted else 0,
            step.predicted_ms if timed else 0.0,
            step.actual_ms if timed else 0.0,
            step.draft_budget,
            step.verify_budget,
            length_sum,
        )
        self._part["draft_budget"][budget_bucket(step.draft_budget)] += 1
        self._part["verify_budget"][budget_bucket(step.verify_budget)] += 1
        for name, counts in (
            ("draft_length", lengths),
            ("verified_by_pos", step.verified_by_pos),
            ("accepted_by_pos", step.accepted_by_pos),
            ("reached_by_pos", step.reached_by_pos),
        ):
            if counts is not None:
                self._part[name] += counts
        if step.guard is not None:
            self._part["guards"][self._guard_slot(step.guard)] += 1
        self._publish()

    def set_trimming(self, active: bool) -> None:
        """Whether verification can be trimmed: false when every size costs the same."""
        self._totals[_AT["trimming_active"]] = float(active)
        self._publish()

    def close(self) -> None:
        """Unmap the file, which stays for readers; calling it again does nothing."""
        if not self._closed:
            self._closed = True
            # The mapping cannot be closed while an array looks into it.
            self._shared = np.empty(0)
            self._map.close()

    def _publish(self) -> None:
        self._shared[:] = self._totals

    def _guard_slot(self, guard: str) -> int:
        name = guard.encode()[:_GUARD_BYTES].decode(errors="ignore")
        if name not in self._guard_slots and len(self._guard_slots) >= _GUARDS - 1:
            name = OTHER_GUARD
        slot = self._guard_slots.setdefault(name, len(self._guard_slots))
        at = _HEADER_BYTES + slot * _GUARD_BYTES
        self._map[at : at + _GUARD_BYTES] = name.encode().ljust(_GUARD_BYTES, b"\0")
        return slot


def budget_bucket(tokens: int) -> int:
    """Index of the budget histogram's bucket: the first bound that is >= `tokens`."""
    bucket = (tokens - 1).bit_length() + 1 if tokens > 0 else 0
    return min(bucket, len(BUDGET_BUCKETS))
