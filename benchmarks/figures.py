"""The figures of `forespark bench report`: one function a figure, drawn on axes it is given.

Each returns False when the records hold nothing to draw.
"""

from __future__ import annotations

import statistics
from typing import Any

from forespark.benchmarks.compare import is_baseline
from forespark.benchmarks.evidence import Tables, by_load, curves, draft_ms
from forespark.benchmarks.records import Group


def pareto(axes: Any, group: Group, tables: Tables | None) -> bool:
    """Output tokens/s over interactivity, one line a method; baselines dashed."""
    del tables
    found = curves(group)
    for name, curve in found.items():
        style = "--" if is_baseline(name) else "-"
        axes.plot(curve.interactivity, curve.throughput, style, marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens/s of the median user", ylabel="output tokens/s")
    return bool(found)


def counts(axes: Any, group: Group, tables: Tables | None) -> bool:
    """Drafted, verified and accepted tokens a request and step, over the load."""
    del tables
    drawn = False
    for name, runs in group.policies().items():
        for field, style in (("drafted", "-"), ("verified", "--"), ("accepted", ":")):
            points = _means(runs, lambda run, field=field: _per_request(run, field))
            if points and any(points.values()):
                axes.plot(*zip(*points.items(), strict=True), style, label=f"{name} {field}")
                drawn = True
    axes.set(xscale="log", xlabel="requests", ylabel="tokens a request and step")
    return drawn


def breakdown(axes: Any, group: Group, tables: Tables | None) -> bool:
    """Time per token over the target alone's at the same load: drafting, and all the rest."""
    alone = _means(group.policies().get("off", []), _ms_per_token)
    drawn = False
    for name, runs in group.policies().items():
        whole, drafting = _means(runs, _ms_per_token), _means(runs, lambda r: _drafting(r, tables))
        loads = [load for load in whole if load in alone]
        if not loads:
            continue
        line = axes.plot(loads, [whole[n] / alone[n] for n in loads], "-", marker="o", label=name)
        part = [n for n in loads if drafting.get(n)]
        colour = line[0].get_color()
        axes.plot(part, [drafting[n] / alone[n] for n in part], ":", marker=".", color=colour)
        drawn = True
    axes.set(xscale="log", xlabel="requests", ylabel="time a token / target alone (dots: drafting)")
    return drawn


def premise(axes: Any, group: Group, tables: Tables | None) -> bool:
    """Full blocks with trimmed verification: share of the step spent drafting, of drafts unused."""
    runs = group.policies().get("adaptive_verification", [])
    shares = {
        "drafting share of the step": _means(runs, lambda run: _draft_share(run, tables)),
        "drafted, never verified": _means(runs, _unverified),
    }
    for label, points in shares.items():
        if points:
            axes.plot(*zip(*points.items(), strict=True), marker="o", label=label)
    axes.set(xscale="log", xlabel="requests", ylabel="share", ylim=(0, 1))
    return any(shares.values())


def spread(axes: Any, group: Group, tables: Tables | None) -> bool:
    """(highest - lowest) / mean output tokens/s of the repeats; nothing for single runs."""
    del tables
    drawn = False
    for name, runs in group.policies().items():
        points = {}
        for load, same in by_load(runs).items():
            values = [run.output_throughput for run in same]
            if len(values) > 1 and max(values) > 0:
                points[load] = (max(values) - min(values)) / statistics.fmean(values)
        if points:
            axes.plot(*zip(*points.items(), strict=True), marker="o", label=name)
            drawn = True
    axes.set(xscale="log", xlabel="requests", ylabel="spread of the repeats / mean")
    return drawn


FIGURES = {
    "pareto": pareto,
    "breakdown": breakdown,
    "counts": counts,
    "premise": premise,
    "spread": spread,
}


def slo(axes: Any, record: dict[str, Any]) -> bool:
    """Attainment over the rate, one line a method."""
    drawn = False
    for name, found in record["methods"].items():
        runs = sorted(found["runs"], key=lambda run: run["rate"])
        if runs:
            shares = [run["attainment"]["1.0"] for run in runs]
            axes.plot([run["rate"] for run in runs], shares, marker="o", label=name)
            drawn = True
    axes.axhline(record.get("level", 0.9), color="grey", linewidth=0.8)
    axes.set(xlabel="requests/s", ylabel="share in time", ylim=(0, 1.02))
    return drawn


def _means(runs: list[Any], value: Any) -> dict[int, float]:
    """Mean over the repeats by load, where every value is known."""
    found = {}
    for load, same in by_load(runs).items():
        values = [value(run) for run in same]
        if None not in values:
            found[load] = statistics.fmean(values)
    return found


def _per_request(run: Any, field: str) -> float | None:
    value = getattr(run, field)
    return None if value is None else float(value) / run.load


def _ms_per_token(run: Any) -> float | None:
    return 1e3 / run.output_throughput if run.output_throughput > 0 else None


def _drafting(run: Any, tables: Tables | None) -> float | None:
    ms = draft_ms(run, tables)
    return None if ms is None or not run.emitted else ms / run.emitted


def _draft_share(run: Any, tables: Tables | None) -> float | None:
    ms = draft_ms(run, tables)
    return None if ms is None or not run.step_ms else ms / float(run.step_ms)


def _unverified(run: Any) -> float | None:
    return 1 - run.verified / run.drafted if run.drafted and run.verified is not None else None
