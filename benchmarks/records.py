"""Raw records of a results folder as one kind of row, whatever benchmark wrote them.

A record of fixed loads (`closed_loop.py`, `run.py`) holds counters over its window; one of
`compare.py` holds means of a step. Latency artifacts, service levels, predictors, step profiles,
oracle and simulator checks are told apart by their keys. A file of no known form is named, never
skipped silently.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DECODE = "decode"
# Keys that a record of this kind has; the first kind that fits is taken.
KINDS = {
    "loads": ("runs",),
    "slo": ("methods", "ttft_ms"),
    "latency": ("draft", "verify"),
    "stages": ("rows", "provenance"),
    "calibration": ("ece_before", "ece_after"),
    "predictor": ("pre_draft", "drafts"),
    "oracle": ("oracle",),
    "simulator": ("simulator",),
    "inflate": ("inflate",),
}


@dataclass(frozen=True)
class About:
    """What was measured: rows of different models, machines or settings are never mixed."""

    workload: str
    model: str
    device: str
    tokens: int | None  # K
    temperature: float

    def line(self, loads: Iterable[int], commits: Iterable[str]) -> str:
        """Model, machine, settings, loads and commits on one line."""
        shown = ", ".join(str(load) for load in sorted(set(loads)))
        return (
            f"{self.workload}: {self.model}, {self.device}, K = {self.tokens or '?'}, "
            f"temperature {self.temperature:g}, load {shown}, "
            f"commit {', '.join(sorted(set(commits))) or 'unknown'}"
        )


@dataclass(frozen=True)
class Run:
    """One method at one load once. Tokens are means of a step, None where nobody counted."""

    policy: str
    load: int
    output_throughput: float  # tokens/s
    interactivity: float  # tokens/s of the median user
    step_ms: float | None = None
    drafted: float | None = None
    verified: float | None = None
    accepted: float | None = None
    emitted: float | None = None
    category: str | None = None
    commit: str = "unknown"
    source: str = ""


@dataclass
class Group:
    """All runs that may be compared with each other."""

    about: About
    runs: list[Run]

    @property
    def title(self) -> str:
        return self.about.line((r.load for r in self.runs), (r.commit for r in self.runs))

    def policies(self) -> dict[str, list[Run]]:
        """Runs by policy, in ascending load."""
        found: dict[str, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.load):
            found.setdefault(run.policy, []).append(run)
        return found


@dataclass
class Results:
    """Everything that a results folder holds."""

    groups: list[Group] = field(default_factory=list)
    others: dict[str, list[tuple[str, dict[str, Any]]]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)

    def first(self, kind: str) -> dict[str, Any] | None:
        """The last record of this kind by file name, None without any."""
        found = self.others.get(kind)
        return found[-1][1] if found else None


def load_results(files: Iterable[Path]) -> Results:
    """Read every file. Unreadable or unknown ones are listed with the reason."""
    results = Results()
    rows: dict[About, list[Run]] = {}
    for file in sorted(files):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            results.unused.append(f"{file.name}: cannot be read ({error})")
            continue
        kind = kind_of(record)
        if kind is None:
            results.unused.append(f"{file.name}: no benchmark record")
        elif kind != "loads":
            results.others.setdefault(kind, []).append((file.name, record))
        else:
            try:
                for about, run in runs_of(record, file.name):
                    rows.setdefault(about, []).append(run)
            except (KeyError, TypeError, ValueError) as error:
                results.unused.append(f"{file.name}: incomplete ({type(error).__name__}: {error})")
    for about, runs in rows.items():
        kept, left_out = one_commit_each(runs)
        results.groups.append(Group(about, kept))
        results.unused += left_out
    return results


def kind_of(record: Any) -> str | None:
    """Which benchmark wrote a record; None for something else."""
    if not isinstance(record, dict):
        return None
    return next((k for k, keys in KINDS.items() if all(key in record for key in keys)), None)


def runs_of(record: Mapping[str, Any], source: str) -> Iterator[tuple[About, Run]]:
    """Rows of one record of fixed loads. KeyError where a run lacks its figures."""
    about, commit = described(record)
    for run in record["runs"]:
        tpot = run.get("median_tpot_ms")
        yield (
            about,
            Run(
                run["policy"],
                int(run["load"]),
                float(run["output_throughput"]),
                1e3 / tpot if tpot else float(run["tokens_per_user"]),
                **step_means(run),
                category=run.get("category"),
                commit=commit,
                source=source,
            ),
        )


def step_means(run: Mapping[str, Any]) -> dict[str, float | None]:
    """Tokens and ms of a mean step; None where the method keeps no counters."""
    names = ("drafted", "verified", "accepted", "emitted")
    if "counters" not in run:
        return {name: run.get(name) for name in (*names, "step_ms")}
    seen = {key.removeprefix("forespark:"): value for key, value in run["counters"].items()}
    steps = seen.get("steps") or 0
    if not steps:
        return dict.fromkeys((*names, "step_ms"))
    means: dict[str, float | None] = {name: seen[f"{name}_tokens"] / steps for name in names}
    return means | {"step_ms": 1e3 * run["duration"] / steps}


def described(record: Mapping[str, Any]) -> tuple[About, str]:
    """What a record was measured on, and its commit; of `compare` from the title."""
    if "provenance" not in record:
        return _from_title(str(record.get("title", "")))
    seen = record["provenance"]
    said = str(seen.get("command", ""))
    tokens = record.get("tokens") or _found(r"--tokens[ =](\d+)", said) or 15
    return (
        About(
            record.get("workload", DECODE),
            seen.get("target", "unknown model"),
            seen.get("device", "unknown device"),
            int(tokens),
            float(record.get("temperature", 0.0)),
        ),
        str(seen.get("commit", "unknown")),
    )


def _from_title(title: str) -> tuple[About, str]:
    tokens = _found(r"K = (\d+)", title)
    about = About(
        DECODE,
        title.split(",")[0] or "unknown model",
        _found(r"\b([A-Z]\d{2,3}\w*)\b", title) or "unknown device",
        int(tokens) if tokens else None,
        float(_found(r"temperature ([\d.]+)", title) or 0.0),
    )
    return about, _found(r"commit (\w+)", title) or "unknown"


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match.group(1) if match else None


def one_commit_each(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Per policy only the runs of one commit, the one with the most; and what that leaves out."""
    kept: list[Run] = []
    left_out: list[str] = []
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        counts = Counter(run.commit for run in mine)
        chosen = max(counts, key=lambda commit: counts[commit])
        kept += [run for run in mine if run.commit == chosen]
        left_out += [
            f"{policy}: {count} runs of commit {commit} ({chosen} has more or as many)"
            for commit, count in counts.items()
            if commit != chosen
        ]
    return kept, left_out
