"""The evaluation page: one PNG with acceptance, estimator errors and reliability."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from forespark.calibration.measures import reliability, sigmoid
from forespark.training.evaluate import alive_rows, uncut
from forespark.training.trace import Trace


def draw(result: dict[str, Any], steps: Trace, curve: list[dict[str, Any]], path: Path) -> None:
    """Draw the page of one evaluation; `curve` is the acceptance over training minutes."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.5), constrained_layout=True)
    _acceptance(axes[0, 0], result)
    _errors(axes[0, 1], result["pre_draft"])
    _auroc(axes[0, 2], result["post_draft"])
    trace = uncut(steps)
    accepted = trace.accepted
    survival = sigmoid(trace.pre_logits).cumprod(axis=1)
    _reliability(
        axes[1, 0],
        "pre-draft survival, uncalibrated",
        [(survival[:, j], accepted > j, f"j = {j + 1}") for j in _shown(trace.draft_len)],
    )
    alive = alive_rows(trace)
    _reliability(
        axes[1, 1],
        "post-draft acceptance given predecessors, uncalibrated",
        [
            (sigmoid(trace.post_logits[alive[j], j]), trace.match[alive[j], j], f"j = {j + 1}")
            for j in _shown(trace.draft_len)
        ],
    )
    _curve(axes[1, 2], curve)
    title = f"acceptance length {result['acceptance_length']:.3f} over {result['drafts']} drafts"
    figure.suptitle(f"{result.get('checkpoint', '')}: {title}, K = {trace.draft_len}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _shown(block: int) -> list[int]:
    return sorted({0, 1, min(3, block - 1), block // 2})


def _acceptance(axis: Any, result: dict[str, Any]) -> None:
    x = np.arange(1, len(result["survival"]) + 1)
    axis.plot(x, result["survival"], "o-", label="reached (survival)")
    conditional = [np.nan if v is None else v for v in result["conditional_acceptance"]]
    axis.plot(x, conditional, "s--", label="given all before")
    axis.set(title="acceptance per position", xlabel="position j", ylim=(0, 1))
    axis.legend()


def _errors(axis: Any, pre: dict[str, Any]) -> None:
    if "error_histogram" not in pre:
        axis.set(title="too few drafts for estimator errors")
        return
    x = np.arange(len(pre["error_histogram"]))
    axis.bar(x - 0.2, pre["error_histogram"], 0.4, label=f"pre-draft, MAE {pre['mae']:.2f}")
    label = f"previous step, MAE {pre['previous_step']['mae']:.2f}"
    axis.bar(x + 0.2, pre["previous_step_histogram"], 0.4, label=label)
    axis.set(title="|predicted - accepted| of full-block drafts", xlabel="tokens", ylabel="share")
    axis.legend()


def _auroc(axis: Any, post: dict[str, Any]) -> None:
    x = np.arange(1, len(post["auroc"]) + 1)
    for key, style, label in (
        ("auroc", "o-", "post-draft estimator"),
        ("auroc_drafter", "s--", "drafter's own probability"),
    ):
        axis.plot(x, [np.nan if v is None else v for v in post[key]], style, label=label)
    axis.set(title="AUROC per position, given all before", xlabel="position j", ylim=(0.4, 1))
    axis.legend()


def _reliability(axis: Any, title: str, series: list[tuple[np.ndarray, np.ndarray, str]]) -> None:
    axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    for probability, outcome, label in series:
        if len(outcome):
            count, mean, hit = reliability(probability, outcome)
            shown = count >= 20
            axis.plot(mean[shown], hit[shown], "o-", markersize=3, label=label)
    axis.set(title=title, xlabel="predicted", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
    axis.legend()


def _curve(axis: Any, curve: list[dict[str, Any]]) -> None:
    axis.set(title="held-out acceptance length over training", xlabel="minutes of training")
    if curve:
        axis.plot([p["minutes"] for p in curve], [p["acceptance_length"] for p in curve], "o-")
