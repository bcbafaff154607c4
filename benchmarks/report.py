"""`forespark bench report`: every figure, one HTML page and the committed figures from raw runs.

Reads the JSON records of a folder; writes `index.html` (self-contained), `report.json` and a PNG a
figure into `--out`, and the committed figures, null where no run exists, into `--evidence`.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forespark.benchmarks.evidence import evidence, latency_tables
from forespark.benchmarks.figures import FIGURES, slo
from forespark.benchmarks.records import Results, load_results
from forespark.training.saving import replacing

STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:2px 10px}"


def draw(file: Path, title: str, paint: Callable[[Any], bool]) -> bool:
    """One PNG; False, and no file, when there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    drawn = paint(axes)
    if drawn:
        axes.set_title(title, fontsize=8, wrap=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(file, dpi=110)
    pyplot.close(figure)
    return drawn


def draw_all(results: Results, folder: Path) -> list[tuple[Path, str]]:
    """Every figure that the records allow: (file, title)."""
    tables = latency_tables(results)
    made = []
    for number, group in enumerate(results.groups):
        for name, paint in FIGURES.items():
            file = folder / f"{group.about.workload}-{number}-{name}.png"
            if draw(file, group.title, lambda axes, p=paint, g=group: p(axes, g, tables)):
                made.append((file, f"{name}: {group.title}"))
    for source, record in results.others.get("slo", []):
        seen = record.get("provenance", {})
        title = (
            f"{seen.get('target', 'unknown model')}, {seen.get('device', 'unknown device')}, "
            f"Poisson arrivals, TTFT {record['ttft_ms']:g} ms, TPOT {record['tpot_ms']:g} ms, "
            f"commit {seen.get('commit', 'unknown')} ({source})"
        )
        file = folder / f"slo-{Path(source).stem}.png"
        if draw(file, title, lambda axes, r=record: slo(axes, r)):
            made.append((file, f"attainment: {title}"))
    return made


def predictors(results: Results) -> dict[str, Any]:
    """Predictor quality as its own records say it."""
    found: dict[str, Any] = {}
    for source, record in results.others.get("predictor", []):
        seen = record["pre_draft"]
        found[source] = {key: seen.get(key) for key in ("mae", "within_one", "previous_step")}
    for source, record in results.others.get("calibration", []):
        keys = ("ece_before", "ece_after", "brier_before", "brier_after")
        found[source] = {key: record.get(key) for key in keys}
    return found


def page(
    figures: list[tuple[Path, str]],
    found: dict[str, Any],
    quality: dict[str, Any],
    unused: list[str],
) -> str:
    """The HTML page, pictures inside."""
    rows = "".join(
        f"<tr><td>{part}</td><td>{key}</td><td>{'no run' if value is None else value}</td></tr>"
        for part, values in found.items()
        for key, value in values.items()
    )
    images = "".join(
        f"<h3>{html.escape(title)}</h3><img alt='{html.escape(title, quote=True)}' "
        f"src='data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}'>"
        for file, title in figures
    )
    left = "".join(f"<li>{html.escape(line)}</li>" for line in unused) or "<li>nothing</li>"
    return (
        f"<!doctype html><meta charset=utf-8><title>ForeSpark benchmarks</title>"
        f"<style>{STYLE}</style><h1>ForeSpark benchmarks</h1><table>{rows}</table>{images}"
        f"<h2>Predictor quality</h2><pre>{html.escape(json.dumps(quality, indent=1))}</pre>"
        f"<h2>Not used</h2><ul>{left}</ul>\n"
    )


def report(folder: Path, out: Path, committed: Path, device: str, ours: str) -> dict[str, Any]:
    """Write everything; the committed figures. ValueError for a folder without a record."""
    if not folder.is_dir():
        raise ValueError(f"--results: {folder} is no folder; give one with records of runs")
    mine = {committed.resolve(), (out / "report.json").resolve()}
    results = load_results(f for f in folder.glob("*.json") if f.resolve() not in mine)
    if not results.groups and not results.others:
        why = "; ".join(results.unused) or "it holds no JSON"
        raise ValueError(f"--results: {folder} has no usable record ({why})")
    out.mkdir(parents=True, exist_ok=True)
    found = evidence(results, device, ours)
    figures, quality = draw_all(results, out), predictors(results)
    record = {
        "evidence": found,
        "figures": {file.name: title for file, title in figures},
        "predictors": quality,
        "groups": [asdict(group) for group in results.groups],
        "unused": results.unused,
    }
    for file, content in ((out / "report.json", record), (committed, found)):
        _write(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
    _write(out / "index.html", page(figures, found, quality, results.unused))
    return found


def _write(file: Path, text: str) -> None:
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/report"))
    parser.add_argument("--evidence", type=Path, default=Path("docs/results/bench-h200.json"))
    parser.add_argument("--device", default="H200", help="part of the device's name that counts")
    parser.add_argument("--ours", default="joint")
    args = parser.parse_args()
    print(json.dumps(report(args.results, args.out, args.evidence, args.device, args.ours)))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
