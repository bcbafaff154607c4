"""The figures that `docs/results/bench-h200.json` commits to, from raw records; null without a run.

A figure that needs two methods is taken only where both were measured: nothing is guessed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from forespark.benchmarks.compare import is_baseline
from forespark.benchmarks.matched import Curve, best_of, matched_ratio
from forespark.benchmarks.records import DECODE, Group, Results, Run

from forespark.core import LatencyTable

LARGE = 256  # the load at which drafting time is compared
E2E = "sharegpt-e2e"
DECODES = (DECODE, "sharegpt-decode")
Tables = tuple[LatencyTable, LatencyTable]


def evidence(results: Results, device: str, ours: str = "joint") -> dict[str, Any]:
    """Exactly the committed keys. `device`: part of the name of the machine that counts."""
    decode = chosen(results, DECODES, device, greedy=True)
    e2e = chosen(results, (E2E,), device, greedy=True)
    warm = chosen(results, (*DECODES, E2E), device, greedy=False)
    tables = latency_tables(results)
    best, worst = ratios(decode, ours)
    return {
        "decode": {
            "best_ratio": best,
            "min_ratio": worst,
            "vs_adaptive_verification": ratios(decode, ours, "adaptive_verification")[0],
            "draft_time_reduction_256": draft_time_reduction(decode, tables, ours),
            "oracle_share": _inside(results, "oracle", "oracle_share"),
        },
        "e2e": {"best_ratio": ratios(e2e, ours)[0]},
        "slo": {"capacity_ratio": capacity_ratio(results.first("slo"), ours)},
        "temperature_1": {"best_ratio": ratios(warm, ours)[0]},
        "inflate": {
            "token_agreement": _inside(results, "inflate", "token_agreement"),
            "speed_ratio": _inside(results, "inflate", "speed_ratio"),
        },
        "simulator": {"max_error": _inside(results, "simulator", "max_error")},
    }


def chosen(
    results: Results, workloads: tuple[str, ...], device: str, *, greedy: bool
) -> Group | None:
    """The group with most runs among those that count; the last one of equals."""
    fits = [
        group
        for group in results.groups
        if group.about.workload in workloads
        and device.lower() in group.about.device.lower()
        and (group.about.temperature == 0) == greedy
    ]
    return max(reversed(fits), key=lambda group: len(group.runs)) if fits else None


def curves(group: Group) -> dict[str, Curve]:
    """Each policy's curve, repeats averaged; policies that made no token are left out."""
    found = {}
    for policy, runs in group.policies().items():
        points = [
            (_mean(same, "interactivity"), _mean(same, "output_throughput"))
            for same in by_load(runs).values()
        ]
        if any(x > 0 and y > 0 for x, y in points):
            found[policy] = Curve.of(points)
    return found


def by_load(runs: list[Run]) -> dict[int, list[Run]]:
    """The repeats at every load."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        found.setdefault(run.load, []).append(run)
    return found


def ratios(
    group: Group | None, ours: str, other: str | None = None
) -> tuple[float | None, float | None]:
    """(best, worst) of `ours` over `other`, or over the strongest baseline."""
    found = {} if group is None else curves(group)
    against = [c for name, c in found.items() if (is_baseline(name) if other is None
               else name == other)]  # fmt: skip
    if ours not in found or not against:
        return None, None
    _, ratio = matched_ratio(found[ours], best_of(against))
    if not ratio.size:
        return None, None
    return round(float(ratio.max()), 4), round(float(ratio.min()), 4)


def draft_ms(run: Run, tables: Tables | None) -> float | None:
    """Drafting time of a mean step by the latency table; 0 where nothing is drafted."""
    if run.drafted == 0 or run.policy == "off":
        return 0.0
    if tables is None or run.drafted is None:
        return None
    return float(tables[0].at(round(run.drafted) + run.load))


def draft_time_reduction(group: Group | None, tables: Tables | None, ours: str) -> float | None:
    """Share of the drafting time per token that `ours` saves at 256 requests over full blocks."""
    if group is None:
        return None
    spent = {}
    for policy in (ours, "adaptive_verification"):
        values = [
            ms / run.emitted
            for run in group.policies().get(policy, [])
            if run.load == LARGE and run.emitted and (ms := draft_ms(run, tables)) is not None
        ]
        if not values:
            return None
        spent[policy] = statistics.fmean(values)
    if not spent["adaptive_verification"]:
        return None
    return round(1 - spent[ours] / spent["adaptive_verification"], 4)


def capacity_ratio(record: Mapping[str, Any] | None, ours: str) -> float | None:
    """Requests/s at 90 % attainment over the strongest baseline's, which must be measured.

    Where every measured rate of `ours` attained it, a lower bound.
    """
    methods = {} if record is None else record["methods"]
    mine = methods.get(ours, {}).get("capacity")
    others = [found for name, found in methods.items() if is_baseline(name)]
    if not mine or not others or not all(found.get("capacity_measured") for found in others):
        return None
    return round(float(mine / max(found["capacity"] for found in others)), 4)


def latency_tables(results: Results) -> Tables | None:
    """(T_draft, T_verify) of the folder's latency artifact."""
    record = results.first("latency")
    if record is None:
        return None
    draft, verify = (
        LatencyTable(record[n]["sizes"], record[n]["ms"], record[n]["captured_limit"])
        for n in ("draft", "verify")
    )
    return draft, verify


def _inside(results: Results, kind: str, key: str) -> float | None:
    record = results.first(kind)
    value = None if record is None else record[kind].get(key)
    return None if value is None else round(float(value), 4)


def _mean(runs: list[Run], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs)
