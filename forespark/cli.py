"""The `forespark` command. Every sub-command imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="ForeSpark: joint draft and verification scheduling for vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Print the reference of forespark.yaml, or check a file.", invoke_without_command=True
)
app.add_typer(config_app, name="config")

_TRAIN_EXTRA = "install the train extra: pip install forespark[train]"
_PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code=2)


@config_app.callback()
def config_reference(
    context: typer.Context,
    page: Annotated[bool, typer.Option("--page", help="As the page docs/config.md.")] = False,
) -> None:
    """Print the commented reference with every default."""
    if context.invoked_subcommand is None:
        from forespark.config import reference_page, reference_yaml

        typer.echo(reference_page() if page else reference_yaml(), nl=False)


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="A forespark.yaml, or inline JSON.")],
) -> None:
    """Check a file, and the drafter it names when that is a local folder."""
    from forespark.config import ForeSparkConfig
    from forespark.drafter_config import read_drafter

    try:
        config = ForeSparkConfig.from_any(str(file))
        typer.echo(f"policy: {config.scheduler.policy}")
        if config.model is not None and Path(config.model).is_dir():
            facts = read_drafter(Path(config.model))
            tokens = config.num_speculative_tokens or facts.default_tokens
            facts.check_tokens(tokens)
            config.with_tokens(tokens)
            typer.echo(f"drafter: {facts.where}, K = {tokens} of {facts.max_tokens}")
        elif config.model is not None:
            typer.echo(f"drafter: {config.model} (not a folder here: looked up when serving)")
    except ValueError as error:
        raise _fail(error) from None
    typer.echo("ok")


@app.command()
def explain(
    trace: Annotated[Path, typer.Argument(help="JSONL file written by observe.trace.")],
    step: Annotated[int | None, typer.Option(help="Step to explain; the last by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also save a picture (PNG) here.")] = None,
) -> None:
    """Say why a recorded step drafted and verified as many tokens as it did."""
    from forespark.explain import draw_step, explain_step, find_step
    from forespark.scheduler.trace import read_trace

    try:
        records = read_trace(trace)
        if step is None:
            step = records[-1].step if records else 0
        typer.echo(explain_step(records, step))
        if out is not None:
            draw_step(find_step(records, step), out)
            typer.echo(f"picture: {out}")
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@app.command()
def doctor() -> None:
    """Report what the environment has and lacks; the exit status is 1 when something is wrong."""
    from forespark.doctor import examine, show

    findings = examine()
    show(findings)
    raise typer.Exit(code=0 if all(item.ok for item in findings) else 1)


@app.command()
def demo(
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter checkpoint; the shipped one by default.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="scheduler.policy; the shipped one by default.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    cache: Annotated[Path, typer.Option(help="Where the converted model is kept.")] = Path(
        ".cache"
    ),
) -> None:
    """Stream one chat answer with ForeSpark and one without, and compare them."""
    from forespark.demo.run import DemoError, ServerError, run_demo

    try:
        run_demo(drafter=drafter, policy=policy, prompt=prompt, max_tokens=max_tokens, cache=cache)
    except (DemoError, ServerError, ValueError) as error:
        raise _fail(error) from None


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def train(context: typer.Context) -> None:
    """Prepare data, train a drafter with both estimators, evaluate it."""
    try:
        from forespark.training.cli import train_app
    except ImportError as error:
        raise _fail(ImportError(f"train: {error}; {_TRAIN_EXTRA}")) from None
    train_app(args=context.args, prog_name="forespark train")


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def calibrate(context: typer.Context) -> None:
    """Collect drafts and fit the estimators' calibration."""
    try:
        from forespark.calibration.cli import calibrate_app
    except ImportError as error:
        raise _fail(ImportError(f"calibrate: {error}; {_TRAIN_EXTRA}")) from None
    calibrate_app(args=context.args, prog_name="forespark calibrate")


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Benchmarks: `forespark bench` lists them."""
    from forespark.benchmarks.cli import run

    try:
        run(context.args)
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def report(context: typer.Context) -> None:
    """Redraw every figure from docs/results, or from `--results`; same as `bench report`."""
    from forespark.benchmarks.cli import run

    try:
        run(["report", *context.args])
    except (OSError, ValueError) as error:
        raise _fail(error) from None


@app.command(context_settings=_PASS_ALL, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Measure this machine's step latencies and write them as an artifact.

    `step`: device time by stage. `check`: what steps were predicted to take against what they took.
    """
    try:
        if context.args[:1] == ["step"]:
            from forespark.benchmarks import step_profile

            step_profile.main(context.args[1:])
        elif context.args[:1] == ["check"]:
            from forespark.benchmarks import profile_check

            profile_check.main(context.args[1:])
        else:
            from forespark.profile import main

            main(context.args)
    except (OSError, ValueError) as error:
        raise _fail(error) from None


if __name__ == "__main__":
    app()
