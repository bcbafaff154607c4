"""What a fit is worth on drafts it has not seen: ECE and Brier before and after, and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from forespark.calibration.fits import FEW, Fit
from forespark.calibration.measures import brier, ece, reliability, sigmoid
from forespark.calibration.traces import DraftTrace

from forespark.estimators.pre_draft import row_start

Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # "before" / "after": survival, outcome


def cells(trace: DraftTrace, fitted: Fit) -> dict[tuple[int, int], Curves]:
    """Pre-draft survival S[d, j] [n] and 1[A_d >= j] of every cell of the triangle."""
    found = {}
    for d in range(1, trace.num_speculative_tokens + 1):
        row = slice(row_start(d), row_start(d) + d)
        logits, accepted = trace.pre_logits[:, row], trace.accepted[:, d]
        before = sigmoid(logits).cumprod(axis=1)
        after = sigmoid(logits * fitted.scale[row] + fitted.bias[row]).cumprod(axis=1)
        for j in range(1, d + 1):
            outcome = accepted >= j
            found[d, j] = {
                "before": (before[:, j - 1], outcome),
                "after": (after[:, j - 1], outcome),
            }
    return found


def positions(trace: DraftTrace, fitted: Fit) -> list[Curves]:
    """Post-draft survival S~[j] [n] and 1[A_K >= j] of full drafts, j = 1..K."""
    most = trace.num_speculative_tokens
    logits = trace.post_logits[:, row_start(most) :]
    before = sigmoid(logits).cumprod(axis=1)
    after = sigmoid(logits / fitted.temperature).cumprod(axis=1)
    return [
        {
            "before": (before[:, j], trace.accepted[:, most] > j),
            "after": (after[:, j], trace.accepted[:, most] > j),
        }
        for j in range(most)
    ]


def quality(trace: DraftTrace, fitted: Fit) -> dict[str, Any]:
    """The record of a fit on held-out drafts (cells with at least FEW of them reaching j)."""
    triangle = {
        key: curves
        for key, curves in cells(trace, fitted).items()
        if int((trace.accepted[:, key[0]] >= key[1] - 1).sum()) >= FEW
    }
    table = {
        f"{d},{j}": _both(curves) | {"drafts": int((trace.accepted[:, d] >= j - 1).sum())}
        for (d, j), curves in triangle.items()
    }
    post = [_both(curves) for curves in positions(trace, fitted)]
    summary = {
        f"{measure}_{when}": _mean([cell[f"{measure}_{when}"] for cell in table.values()])
        for measure in ("ece", "brier")
        for when in ("before", "after")
    }
    return summary | {
        "cells": len(table),
        "cells_improved": sum(c["ece_after"] < c["ece_before"] for c in table.values()),
        "held_out_drafts": trace.num_contexts,
        "post_draft": {
            f"{measure}_{when}": [row[f"{measure}_{when}"] for row in post]
            for measure in ("ece", "brier")
            for when in ("before", "after")
        },
        "entries_leaning_on_a_neighbour": fitted.leaning,
        "by_cell": table,
    }


def check_better(record: dict[str, Any]) -> None:
    """ValueError when the fit is worse than none on held-out drafts."""
    post = record["post_draft"]
    for name, before, after in (
        ("pre-draft ECE", record["ece_before"], record["ece_after"]),
        ("pre-draft Brier score", record["brier_before"], record["brier_after"]),
        ("post-draft ECE", _mean(post["ece_before"]), _mean(post["ece_after"])),
    ):
        if after > before:
            raise ValueError(
                f"calibration: held-out {name} would rise from {before:.4f} to {after:.4f}; "
                "nothing was written, collect more drafts"
            )


def draw(trace: DraftTrace, fitted: Fit, file: Path, title: str) -> None:
    """Reliability before and after: the full block's S[K, j], and S~[j]."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = trace.num_speculative_tokens
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
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def _both(curves: Curves) -> dict[str, float]:
    return {
        f"{name}_{when}": measure(*curves[when])
        for name, measure in (("ece", ece), ("brier", brier))
        for when in ("before", "after")
    }


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
