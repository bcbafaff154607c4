"""Evaluation of a checkpoint on held-out prompts: acceptance and both estimators.

Every estimator figure is on drafts whose whole block lies inside the text, so that acceptance is
never cut short by the end of an answer. Calibrated figures are cross-fitted: fitted on one half of
the documents, measured on the other, and pooled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from forespark.calibration.fits import fit_scale_bias, fit_temperatures
from forespark.calibration.measures import (
    auroc,
    brier,
    ece,
    sigmoid,
)
from forespark.training.model import ForeSparkDraftModel
from forespark.training.recipe import EvaluateConfig
from forespark.training.rows import Row
from forespark.training.target import Target
from forespark.training.trace import Amp, Trace, record, walk

Say = Callable[[str], None]


def evaluate(
    model: ForeSparkDraftModel,
    target: Target,
    rows: list[Row],
    config: EvaluateConfig,
    say: Say = print,
) -> tuple[dict[str, Any], Trace]:
    """The evaluation record, and the trace of the walk's full-block drafts for the pictures."""
    rows = rows[: config.max_documents]
    model = model.to(target.device).eval()
    amp = autocast_for(target.device)
    block = model.config.num_speculative_tokens
    every = record(model, target, rows, block, amp=amp, anchors=config.anchors)
    steps = every.select(walk(every))
    say(f"evaluate: {len(steps.document)} drafts of {block} on {len(rows)} documents")
    result: dict[str, Any] = {"schema": 1, "num_speculative_tokens": block, "documents": len(rows)}
    result |= acceptance(steps)
    result["pre_draft"] = pre_draft_quality(steps)
    result["post_draft"] = post_draft_quality(steps)
    lengths = config.lengths or list(range(1, block + 1))
    grid = {}
    for length in lengths:
        trace = every
        if length < block and not model.config.directional:
            trace = record(
                model, target, rows, length,
                amp=amp, anchors=config.anchors, stride=config.length_stride,
            )  # fmt: skip
        elif length < block:
            continue
        grid[str(length)] = entry_quality(trace)
        say(f"evaluate: length {length}, {len(trace.document)} drafts")
    result["pre_draft"]["entries"] = grid
    return result, steps


def autocast_for(device: torch.device) -> Amp:
    """bfloat16 on a GPU, as served; full precision on a CPU."""
    if device.type == "cuda":
        return functools.partial(torch.autocast, "cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext


def acceptance(steps: Trace) -> dict[str, Any]:
    """Acceptance length and per-position rates of the walk, as vLLM counts them."""
    accepted = steps.accepted
    reached = np.stack([accepted >= j for j in range(steps.draft_len + 1)], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        conditional = reached[:, 1:].sum(0) / reached[:, :-1].sum(0)
    return {
        "drafts": len(accepted),
        "acceptance_length": 1 + float(accepted.mean()),
        "survival": [float(x) for x in reached[:, 1:].mean(0)],
        "conditional_acceptance": [None if np.isnan(x) else float(x) for x in conditional],
    }


def uncut(trace: Trace) -> Trace:
    """Drafts whose whole block lies inside the text."""
    return trace.select(trace.exists.all(axis=1))


def halves(trace: Trace) -> list[tuple[np.ndarray, np.ndarray]]:
    """(fit rows, measured rows) of both directions of a split by document."""
    even = trace.document % 2 == 0
    return [
        (np.flatnonzero(even), np.flatnonzero(~even)),
        (np.flatnonzero(~even), np.flatnonzero(even)),
    ]


def pre_draft_quality(steps: Trace) -> dict[str, Any]:
    """|predicted - accepted| of full-block drafts, against the two baselines (section 6.4)."""
    previous = np.full(len(steps.document), -1.0)
    same = steps.document[1:] == steps.document[:-1]
    previous[1:][same] = steps.accepted[:-1][same]
    keep = steps.exists.all(axis=1) & (previous >= 0)
    trace, previous = steps.select(keep), previous[keep]
    accepted = trace.accepted.astype(np.float64)
    if len(accepted) < 2:
        return {"drafts": len(accepted)}
    raw = sigmoid(trace.pre_logits).cumprod(axis=1)
    curve = np.zeros_like(raw)
    mean = np.zeros(len(accepted))
    for fit, measured in halves(trace):
        curve[measured] = survival_curve(trace.select(measured), fit_entries(trace.select(fit)))
        mean[measured] = accepted[fit].mean() if len(fit) else accepted.mean()
    # The median minimises the absolute error; the mean is what the scheduler adds up.
    median = (curve >= 0.5).sum(axis=1).astype(np.float64)
    return {
        "drafts": len(accepted),
        "prediction": "median of the calibrated curve",
        **_errors(median, accepted),
        "expected": _errors(curve.sum(axis=1), accepted),
        "raw": _errors((raw >= 0.5).sum(axis=1), accepted),
        "raw_expected": _errors(raw.sum(axis=1), accepted),
        "previous_step": _errors(previous, accepted),
        "position_mean": _errors(mean, accepted),
        "error_histogram": _histogram(np.abs(median - accepted), trace.draft_len),
        "previous_step_histogram": _histogram(np.abs(previous - accepted), trace.draft_len),
    }


def _errors(predicted: np.ndarray, accepted: np.ndarray) -> dict[str, float]:
    error = np.abs(predicted - accepted)
    return {"mae": float(error.mean()), "within_one": float((error <= 1).mean())}


def _histogram(error: np.ndarray, block: int) -> list[float]:
    """Share of drafts with error in [i - 0.5, i + 0.5), i = 0..K."""
    counts = np.bincount(np.minimum(np.rint(error).astype(int), block), minlength=block + 1)
    return [float(x) for x in counts / counts.sum()]


def fit_entries(trace: Trace) -> list[tuple[float, float]]:
    """a, b of each position of the trace's draft length, on drafts accepted up to there."""
    return [
        fit_scale_bias(trace.pre_logits[alive, j], trace.match[alive, j])
        for j, alive in enumerate(alive_rows(trace))
    ]


def alive_rows(trace: Trace) -> list[np.ndarray]:
    """Per position j: bool [n], the first j - 1 tokens were accepted and the text goes to j."""
    accepted = trace.accepted
    return [(accepted >= j) & trace.exists[:, j] for j in range(trace.draft_len)]


def survival_curve(trace: Trace, fitted: list[tuple[float, float]]) -> np.ndarray:
    """S [n, d] of the calibrated pre-draft estimator."""
    scale, bias = np.array(fitted).T
    return sigmoid(trace.pre_logits * scale + bias).cumprod(axis=1)


def entry_quality(trace: Trace) -> dict[str, Any]:
    """Brier and ECE of S[d, j] for j = 1..d at one draft length, cross-fitted, and raw."""
    trace = uncut(trace)
    accepted = trace.accepted
    raw = sigmoid(trace.pre_logits).cumprod(axis=1)
    fitted = np.zeros_like(raw)
    for fit, measured in halves(trace):
        if len(fit) and len(measured):
            part = trace.select(measured)
            fitted[measured] = survival_curve(part, fit_entries(trace.select(fit)))
    outcomes = [accepted >= j for j in range(1, trace.draft_len + 1)]
    return {
        "drafts": len(accepted),
        "brier": [brier(fitted[:, j], hit) for j, hit in enumerate(outcomes)],
        "ece": [ece(fitted[:, j], hit) for j, hit in enumerate(outcomes)],
        "brier_raw": [brier(raw[:, j], hit) for j, hit in enumerate(outcomes)],
        "ece_raw": [ece(raw[:, j], hit) for j, hit in enumerate(outcomes)],
    }


def post_draft_quality(steps: Trace) -> dict[str, Any]:
    """AUROC per position against the drafter's own probability; ECE and Brier of S~ per j."""
    trace = uncut(steps)
    survived = np.stack([trace.accepted >= j for j in range(1, trace.draft_len + 1)], axis=1)
    raw = sigmoid(trace.post_logits).cumprod(axis=1)
    fitted = np.zeros_like(raw)
    for fit, measured in halves(trace):
        if len(fit) and len(measured):
            theta = fit_temperatures(trace.post_logits[fit], trace.accepted[fit])
            fitted[measured] = sigmoid(trace.post_logits[measured] / theta).cumprod(axis=1)
    alive = alive_rows(trace)
    columns = range(trace.draft_len)
    return {
        "drafts": len(trace.document),
        "auroc": [auroc(trace.post_logits[a, j], trace.match[a, j]) for j, a in enumerate(alive)],
        "auroc_drafter": [
            auroc(trace.drafter_prob[a, j], trace.match[a, j]) for j, a in enumerate(alive)
        ],
        "samples": [int(a.sum()) for a in alive],
        "ece": [ece(fitted[:, j], survived[:, j]) for j in columns],
        "brier": [brier(fitted[:, j], survived[:, j]) for j in columns],
        "ece_raw": [ece(raw[:, j], survived[:, j]) for j in columns],
        "brier_raw": [brier(raw[:, j], survived[:, j]) for j in columns],
    }
