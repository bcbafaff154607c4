"""`forespark calibrate`: drafts at every length, and the fit that the server loads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

calibrate_app = typer.Typer(
    no_args_is_help=True,
    help="Make the estimators' survival trustworthy: collect drafts, fit, check on others.",
    add_completion=False,
)

_FEWEST = 1000  # contexts on each side of the split


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(1)


@calibrate_app.command()
def collect(
    target: Annotated[Path, typer.Option(help="The target's folder.")],
    drafter: Annotated[Path, typer.Option(help="The drafter's folder, with estimators.")],
    prompts: Annotated[Path, typer.Option(help="Any prompt file the trainer accepts.")],
    out: Annotated[Path, typer.Option(help="Trace to write (.npz).")],
    documents: Annotated[int, typer.Option(min=2)] = 256,
    tokens: Annotated[int, typer.Option(min=32, help="Of an answer, at most.")] = 256,
    stride: Annotated[
        int, typer.Option(min=1, help="Positions apart: 1 to simulate, more to calibrate.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what there is.")] = None,
) -> None:
    """Draft 1..K tokens at every position of the target's greedy answers."""
    from forespark.calibration.collect import collect as run

    try:
        run(
            target, drafter, prompts, out, documents, tokens, device, stride=stride, say=typer.echo
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@calibrate_app.command("fit")
def fit_command(
    trace: Annotated[Path, typer.Argument(help="Trace of `collect`.")],
    checkpoint: Annotated[Path, typer.Option(help="Drafter whose calibration is written.")],
    report: Annotated[
        Path | None, typer.Option(help="JSON of held-out quality; a PNG is put beside it.")
    ] = None,
) -> None:
    """Fit on every other answer, measure on the rest, and write what helps."""
    import torch
    from forespark.calibration.fits import fit
    from forespark.calibration.report import check_better, draw, quality
    from forespark.calibration.traces import DraftTrace

    from forespark.estimators.checkpoint import drafter_sha256, save_calibration

    try:
        held = DraftTrace.load(trace)
        held.check_drafter(drafter_sha256(checkpoint))
        even = held.document % 2 == 0
        fitted_on, held_out = held.select(even), held.select(~even)
        for name, part in (("fit", fitted_on), ("measure", held_out)):
            if part.num_contexts < _FEWEST:
                raise ValueError(
                    f"trace: {trace} has {part.num_contexts} positions to {name} on; collect at "
                    f"least {_FEWEST} on each side (more or longer answers)"
                )
        fitted = fit(fitted_on)
        record = {"fit_drafts": fitted_on.num_contexts} | quality(held_out, fitted)
        check_better(record)
        save_calibration(
            checkpoint,
            scale=torch.from_numpy(fitted.scale),
            bias=torch.from_numpy(fitted.bias),
            temperature=torch.from_numpy(fitted.temperature),
        )
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    if report is not None:
        record["provenance"] = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "drafter_sha256": held.drafter,
            "num_speculative_tokens": held.num_speculative_tokens,
        }
        temporary = report.with_name(f".{report.name}.tmp")
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, report)
        title = f"{held_out.num_contexts} held-out positions, K = {held.num_speculative_tokens}"
        draw(held_out, fitted, report.with_suffix(".png"), title)
    typer.echo(
        f"pre-draft ECE {record['ece_before']:.4f} -> {record['ece_after']:.4f} on "
        f"{record['held_out_drafts']} held-out positions, better in {record['cells_improved']} of "
        f"{record['cells']} cells"
    )
