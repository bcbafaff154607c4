"""`forespark train`: prepare, run, evaluate, or all of it inside a time box."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

train_app = typer.Typer(
    no_args_is_help=True,
    help="Train a drafter and its acceptance estimators.",
    add_completion=False,
)

Config = Annotated[Path, typer.Option("--config", help="Recipe (YAML).", exists=True)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Override, as section.key=value; repeatable.")
]
Minutes = Annotated[
    float | None, typer.Option("--minutes", min=0.1, help="End this call after so many minutes.")
]

_EVALUATION_MINUTES = 5.0  # left in the box for `all` to start the evaluation
_SAVE_MINUTES = 0.3  # kept back from the training for its last checkpoint


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _say(started: float) -> Callable[[str], None]:
    def say(message: str) -> None:
        typer.echo(f"[{time.monotonic() - started:5.0f} s] {message}")

    return say


@train_app.command()
def prepare(config: Config, set_: Overrides = None) -> None:
    """Let the target answer the recipe's prompts; reuse a prepared set that matches."""
    with _one_line_errors():
        from forespark.training.prepare import prepare as run_prepare
        from forespark.training.recipe import load_recipe

        run_prepare(load_recipe(config, set_), _say(time.monotonic()))


@train_app.command()
def run(config: Config, set_: Overrides = None, minutes: Minutes = None) -> None:
    """Train from the prepared set; run again to go on after a kill or a full time box."""
    with _one_line_errors():
        from forespark.training.recipe import load_recipe
        from forespark.training.run import train

        train(load_recipe(config, set_), box_minutes=minutes, say=_say(time.monotonic()))


@train_app.command()
def estimators(
    config: Config,
    drafter: Annotated[Path, typer.Option("--drafter", help="Folder of a trained drafter.")],
    set_: Overrides = None,
    minutes: Minutes = None,
    skip_evaluation: Annotated[
        bool, typer.Option("--skip-evaluation", help="Only train; evaluate in a later call.")
    ] = False,
) -> None:
    """Train only both estimators on a frozen drafter, then evaluate; the prepared set is reused."""
    with _one_line_errors():
        from forespark.training.assess import assess
        from forespark.training.frozen import frozen_recipe
        from forespark.training.prepare import prepare as run_prepare
        from forespark.training.recipe import load_recipe
        from forespark.training.run import train

        say = _say(time.monotonic())
        recipe = frozen_recipe(load_recipe(config, set_), drafter)
        run_prepare(recipe, say)
        finished = train(recipe, box_minutes=minutes, say=say)
        gc.collect()
        if not finished:
            say("estimators: training is not finished; run again")
        elif not skip_evaluation:
            assess(recipe, say=say)


@train_app.command()
def evaluate(config: Config, set_: Overrides = None) -> None:
    """Measure the checkpoint on held-out prompts; write one JSON and one PNG page."""
    with _one_line_errors():
        from forespark.training.assess import assess
        from forespark.training.recipe import load_recipe

        assess(load_recipe(config, set_), say=_say(time.monotonic()))


@train_app.command()
def collect(
    source: Annotated[Path, typer.Argument(help="ShareGPT JSON, or the wheel that holds it.")],
    folder: Annotated[Path, typer.Argument(help="Where both prompt files go.")],
    heldout: Annotated[int, typer.Option(min=1)] = 1600,
    train: Annotated[int, typer.Option(min=1)] = 40000,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Prompt file kept out of both; repeatable.")
    ] = None,
) -> None:
    """Make compact training and held-out prompt files, for a machine without network."""
    with _one_line_errors():
        from forespark.training.collect import collect as run_collect

        counts = run_collect(source, folder, heldout=heldout, train=train, excluded=exclude or [])
        _say(time.monotonic())(", ".join(f"{k}: {v}" for k, v in counts.most_common()))


@train_app.command("all")
def everything(
    config: Config,
    set_: Overrides = None,
    minutes: Minutes = None,
    export: Annotated[
        Path | None, typer.Option(help="Also copy what is finished here, in small files.")
    ] = None,
) -> None:
    """Prepare, train and evaluate, as far as the time box goes; run again to go on."""
    started = time.monotonic()
    say = _say(started)

    def left() -> float | None:
        return None if minutes is None else minutes - (time.monotonic() - started) / 60

    with _one_line_errors():
        from forespark.training.assess import assess
        from forespark.training.export import export as copy_out
        from forespark.training.prepare import prepare as run_prepare
        from forespark.training.recipe import load_recipe
        from forespark.training.run import train

        recipe = load_recipe(config, set_)
        run_prepare(recipe, say)
        remaining = left()
        box = None if remaining is None else max(0.05, remaining - _SAVE_MINUTES)
        finished = train(recipe, box_minutes=box, say=say)
        gc.collect()  # the trainer's hooks hold it in a cycle, and with it the GPU's memory
        remaining = left()
        if finished and (remaining is None or remaining >= _EVALUATION_MINUTES):
            assess(recipe, say=say)
        elif finished:
            say(f"all: {remaining:.1f} min left, too few to evaluate; run again")
        else:
            say("all: training is not finished; run again")
        if export is not None:
            copy_out(recipe, export, say)


if __name__ == "__main__":
    train_app()
