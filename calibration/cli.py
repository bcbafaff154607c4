"""`forespark calibrate`: drafts at every length, and the fit that the server loads."""

from __future__ import annotations

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
    out: Annotated[
        Path, typer.Option(help="Trace to write: .parquet, or .npz as the simulator reads.")
    ],
    documents: Annotated[int, typer.Option(min=2)] = 256,
    tokens: Annotated[int, typer.Option(min=32, help="Of an answer, at most.")] = 256,
    stride: Annotated[
        int, typer.Option(min=1, help="Positions apart: 1 to simulate, more to calibrate.")
    ] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what there is.")] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Through vLLM: one run at every exact length.")
    ] = False,
    loads: Annotated[str, typer.Option(help="With --engine: requests at once, a list.")] = "16",
    dtype: Annotated[str, typer.Option(help="With --engine.")] = "auto",
    max_model_len: Annotated[int, typer.Option(min=64, help="With --engine.")] = 2048,
    max_num_batched_tokens: Annotated[int, typer.Option(min=64, help="With --engine.")] = 8192,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="With --engine.")] = False,
) -> None:
    """Draft 1..K tokens at every position of the target's greedy answers.

    With --engine vLLM drafts and verifies, position by position as when serving (.parquet).
    """
    from forespark.calibration.collect import collect as run

    try:
        if engine:
            from forespark.engine_collect import collect as run_engine

            options = {
                "dtype": dtype,
                "max_model_len": max_model_len,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enforce_eager": enforce_eager,
            }
            counts = [int(load) for load in loads.split(",")]
            run_engine(
                target, drafter, prompts, out, documents, tokens, counts, options, say=typer.echo
            )
            return
        run(
            target, drafter, prompts, out, documents, tokens, device, stride=stride, say=typer.echo
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@calibrate_app.command("fit")
def fit_command(
    trace: Annotated[Path, typer.Argument(help="Trace of `collect` (.parquet or .npz).")],
    checkpoint: Annotated[Path, typer.Option(help="Drafter whose estimators are calibrated.")],
    out: Annotated[
        Path | None, typer.Option(help="A calibrated copy here; the drafter itself by default.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="JSON of held-out quality; a PNG is put beside it.")
    ] = None,
    single_curve: Annotated[
        bool, typer.Option("--single-curve", help="Only row K, all that policy reads.")
    ] = False,
) -> None:
    """Fit on every other answer, measure on the rest, and write what helps."""
    from forespark.calibration.apply import apply, check_free
    from forespark.calibration.fits import FEW, Variant, fit, lengths_needed
    from forespark.calibration.origin import Origin
    from forespark.calibration.report import (
        check_better,
        check_report,
        provenance,
        quality,
        save_report,
    )
    from forespark.calibration.trace_file import load_trace

    try:
        if out is not None and out.resolve() != checkpoint.resolve():
            check_free(out)
        if report is not None:
            check_report(report)
        origin = Origin.of_checkpoint(checkpoint)
        held = load_trace(trace)
        held.origin.check(origin)
        variant = Variant.SINGLE_CURVE if single_curve else Variant.TRIANGLE
        if origin.directional:
            variant = Variant.DIRECTIONAL
        fitted_on, held_out = held.halves()
        drafts = {}
        for name, part in (("fit", fitted_on), ("measure", held_out)):
            for d in lengths_needed(origin.num_speculative_tokens, variant):
                drafts[name, d] = part.at_length(d).accepted.size
                if drafts[name, d] < _FEWEST:
                    raise ValueError(
                        f"trace: {trace} has {drafts[name, d]} drafts of length {d} to {name} on; "
                        f"collect at least {_FEWEST} on each side (more or longer answers)"
                    )
        fitted = fit(fitted_on, variant)
        most = origin.num_speculative_tokens
        record = {"schema": 1, "variant": variant.value, "fit_drafts": drafts["fit", most]}
        record |= quality(held_out, fitted)
        check_better(record)
        record["provenance"] = provenance(sys.argv, trace, origin)
        apply(fitted, checkpoint, out)
        if report is not None:
            save_report(record, held_out, fitted, report)
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    if not held.origin.estimators:
        typer.echo(f"note: {trace} does not say which estimators it is of; collect again", err=True)
    typer.echo(
        f"pre-draft ECE {record['ece_before']:.4f} -> {record['ece_after']:.4f} (chance alone: "
        f"{record['ece_floor']:.4f}) on {record['held_out_drafts']} held-out positions, better in "
        f"{record['cells_improved']} of {record['cells']} cells"
    )
    typer.echo(
        f"{fitted.leaning} of {sum(lengths_needed(most, variant))} entries had fewer than {FEW} "
        "drafts and lean on a neighbour"
    )
    if variant is Variant.SINGLE_CURVE:
        typer.echo(f"rows 1..{most - 1} are uncalibrated now: serve it with the single curve only")


@calibrate_app.command(
    "batchwise",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def batchwise_command(context: typer.Context) -> None:
    """Run every draft length at every load and write the fastest as a schedule (--help: how)."""
    from forespark.benchmarks.batchwise import main

    try:
        main(context.args)
    except (OSError, RuntimeError, ValueError) as error:
        raise _fail(error) from None
