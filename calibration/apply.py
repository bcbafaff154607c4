"""Puts a fit where the server looks for it: `estimators/calibration.json` of a drafter."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from forespark.calibration.fits import Fit
from forespark.calibration.origin import Origin
from forespark.training.saving import replacing

from forespark.estimators.checkpoint import save_calibration


def apply(fitted: Fit, checkpoint: Path, out: Path | None = None) -> Path:
    """Write the fit into the drafter `checkpoint`, or into a calibrated copy of it at `out`.

    Raises ValueError when the server could not load the result or `out` is taken, OSError when it
    cannot be written; what was there before is then unchanged.
    """
    check_fits(fitted, Origin.of_checkpoint(checkpoint))
    if out is None or out.resolve() == checkpoint.resolve():
        _write(fitted, checkpoint)
        return checkpoint
    check_free(out)
    with replacing(out) as temporary:
        shutil.copytree(checkpoint, temporary)
        _write(fitted, temporary)
    return out


def check_free(out: Path) -> None:
    """ValueError when something is in the way of a calibrated copy."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out: {out} exists and is not an empty folder; name a new one")


def check_fits(fitted: Fit, origin: Origin) -> None:
    """ValueError when estimators of this origin cannot use the fit."""
    wanted = {
        "scale": origin.entries,
        "bias": origin.entries,
        "temperature": origin.num_speculative_tokens,
    }
    for name, count in wanted.items():
        values = getattr(fitted, name)
        if values.shape != (count,) or not np.isfinite(values).all():
            raise ValueError(
                f"calibration: {name} is not {count} finite numbers, which these estimators have; "
                "fit with their own trace"
            )
    for name in ("scale", "temperature"):
        if getattr(fitted, name).min() <= 0:
            raise ValueError(
                f"calibration: {name} holds {getattr(fitted, name).min():.3g}; it must be > 0"
            )


def _write(fitted: Fit, folder: Path) -> None:
    save_calibration(
        folder,
        scale=torch.from_numpy(fitted.scale),
        bias=torch.from_numpy(fitted.bias),
        temperature=torch.from_numpy(fitted.temperature),
    )
