"""What a fit is worth on drafts it has not seen: ECE and Brier before and after, and a picture."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from forespark.calibration.drafts import Recorded
from forespark.calibration.fits import FEW, Fit
from forespark.calibration.measures import brier, ece, ece_floor, reliability, sigmoid
from forespark.calibration.origin import Origin
from forespark.training.saving import replacing

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # "before" / "after": survival, outcome


def cells(trace: Recorded, fitted: Fit) -> dict[tuple[int, int], Curves]:
    """Pre-draft survival S[d, j] [m] and 1[A_d >= j] of every cell of the fitted rows."""
    found = {}
    for d in fitted.lengths:
        logits, _, accepted = trace.at_length(d)
        row = fitted.row(d)
        before = sigmoid(logits).cumprod(axis=1)
        after = sigmoid(logits * fitted.scale[row] + fitted.bias[row]).cumprod(axis=1)
        for j in range(1, d + 1):
            outcome = accepted >= j
            found[d, j] = {
                "before": (before[:, j - 1], outcome),
                "after": (after[:, j - 1], outcome),
            }
    return found


def positions(trace: Recorded, fitted: Fit) -> list[Curves]:
    """Post-draft survival S~[j] [m] and 1[A_K >= j] of full drafts, j = 1..K."""
    most = trace.origin.num_speculative_tokens
    _, logits, accepted = trace.at_length(most)
    before = sigmoid(logits).cumprod(axis=1)
    after = sigmoid(logits / fitted.temperature).cumprod(axis=1)
    return [
        {"before": (before[:, j], accepted > j), "after": (after[:, j], accepted > j)}
        for j in range(most)
    ]


def quality(trace: Recorded, fitted: Fit) -> dict[str, Any]:
    """The record of a fit on held-out drafts (cells with at least FEW of them reaching j)."""
    accepted = {d: trace.at_length(d).accepted for d in fitted.lengths}
    table = {}
    for (d, j), curves in cells(trace, fitted).items():
        reached = int((accepted[d] >= j - 1).sum())
        if reached >= FEW:
            table[f"{d},{j}"] = _both(curves) | {"drafts": reached}
    post = [_both(curves) for curves in positions(trace, fitted)]
    names = ("ece_before", "ece_after", "ece_floor", "brier_before", "brier_after")
    summary = {name: _mean([cell[name] for cell in table.values()]) for name in names}
    return summary | {
        "cells": len(table),
        "cells_improved": sum(c["ece_after"] < c["ece_before"] for c in table.values()),
        "held_out_drafts": accepted[trace.origin.num_speculative_tokens].size,
        "held_out_by_length": {str(d): held.size for d, held in accepted.items()},
        "post_draft": {name: [row[name] for row in post] for name in names},
        "entries_leaning_on_a_neighbour": fitted.leaning,
        "by_cell": table,
    }


def check_better(record: dict[str, Any]) -> None:
    """ValueError when the fit is worse than none on held-out drafts, or cannot be judged."""
    if not record["cells"]:
        raise ValueError(
            f"calibration: no (d, j) has {FEW} held-out drafts to judge it on; nothing was "
            "written, collect more drafts"
        )
    post = record["post_draft"]
    for name, before, after in (
        ("pre-draft ECE", record["ece_before"], record["ece_after"]),
        ("pre-draft Brier score", record["brier_before"], record["brier_after"]),
        ("post-draft ECE", _mean(post["ece_before"]), _mean(post["ece_after"])),
    ):
        # Written so that a NaN is refused too.
        if not after <= before:
            raise ValueError(
                f"calibration: held-out {name} would rise from {before:.4f} to {after:.4f}; "
                "nothing was written, collect more drafts"
            )


def provenance(arguments: list[str], trace: Path, origin: Origin) -> dict[str, Any]:
    """Where a record is from: command, hashes of trace and checkpoint, versions."""
    return {
        "command": " ".join([Path(arguments[0]).name, *arguments[1:]]),
        "trace_sha256": hashlib.sha256(trace.read_bytes()).hexdigest(),
        "num_speculative_tokens": origin.num_speculative_tokens,
        "directional": origin.directional,
        "drafter_sha256": origin.drafter,
        "estimators_sha256": origin.estimators,
        "versions": {
            name: metadata.version(name) for name in ("forespark", "numpy", "scikit-learn")
        },
    }  # fmt: skip


def check_report(file: Path) -> None:
    """ValueError or OSError for a name that no report can be written to; makes its folder."""
    if file.suffix != ".json":
        raise ValueError(f"report: {file} must end in .json; the picture takes .png")
    file.parent.mkdir(parents=True, exist_ok=True)


def save_report(record: dict[str, Any], trace: Recorded, fitted: Fit, file: Path) -> None:
    """Write `file` (JSON) and a picture beside it. Raises OSError when they cannot be written."""
    most = trace.origin.num_speculative_tokens
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    title = f"{record['held_out_drafts']} held-out positions, K = {most}"
    draw(trace, fitted, file.with_suffix(".png"), title)


def draw(trace: Recorded, fitted: Fit, file: Path, title: str) -> None:
    """Reliability before and after: the full block's S[K, j], and S~[j]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = trace.origin.num_speculative_tokens
    pre, post = cells(trace, fitted), positions(trace, fitted)
    shown = sorted({1, 2, 4, most} & set(range(1, most + 1)))
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 9), constrained_layout=True)
    for column, when in enumerate(("before", "after")):
        for row, (name, curves) in enumerate(
            (
                ("pre-draft S[K, j]", {j: pre[most, j] for j in shown}),
                ("post-draft S~[j]", {j: post[j - 1] for j in shown}),
            )
        ):
            axis = axes[row, column]
            axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
            for j, both in curves.items():
                _, mean, hit = reliability(*both[when])
                axis.plot(mean, hit, "o-", markersize=3, label=f"j = {j}")
            axis.set(title=f"{name}, {when}", xlabel="predicted", ylabel="accepted")
            axis.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=90, format="png")
    pyplot.close(figure)


def _both(curves: Curves) -> dict[str, float]:
    return {
        f"{name}_{when}": measure(*curves[when])
        for name, measure in (("ece", ece), ("brier", brier))
        for when in ("before", "after")
    } | {"ece_floor": ece_floor(curves["after"][0])}


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
