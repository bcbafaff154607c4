"""The demo itself: convert, serve with ForeSpark, serve the target alone, compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from forespark.config import ForeSparkConfig
from forespark.demo.chat import (
    Answer,
    all_top_or_tied,
    chat,
    read_counters,
    target_ranks,
)
from forespark.demo.convert import ensure_smollm2
from forespark.demo.server import Server, ServerError

ASSETS = Path(__file__).parents[1] / "assets" / "smollm2"
PROMPT = "Write a Python function that reverses a string."
WARM_UP = "Say hello."
WARM_UP_TOKENS = 24
EXPECTED_START_S = 60.0
# float32 so that "same text" can be exact: bfloat16 rounds many of this small model's logits alike.
OPTIONS = [
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "4",
]
COUNTERS = ("steps", "drafted_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens")


class DemoError(RuntimeError):
    """The demo cannot show what it promises; one line says why."""


@dataclass(frozen=True)
class StepTotals:
    """Totals over the steps of one answer."""

    steps: float
    drafted_tokens: float
    verified_tokens: float
    accepted_tokens: float
    emitted_tokens: float

    def per_step(self, total: float) -> float:
        """A total divided by the number of steps."""
        return total / self.steps


def step_totals(before: Mapping[str, float], after: Mapping[str, float]) -> StepTotals:
    """What the `forespark:` counters gained; DemoError when the server does not report them."""
    gained = {}
    for name in COUNTERS:
        series = f"forespark:{name}_total"
        if series not in after:
            raise DemoError(
                f"the server does not report {series}, so ForeSpark is not active in it; "
                "run `forespark doctor`"
            )
        gained[name] = after[series] - before.get(series, 0.0)
    if gained["steps"] <= 0:
        raise DemoError("forespark:steps_total did not move: no step was decided by ForeSpark")
    return StepTotals(**gained)


def settings_file(drafter: Path | None, policy: str | None, folder: Path) -> Path:
    """The shipped settings, or a copy in `folder` with another drafter or policy."""
    shipped = ASSETS / "forespark.yaml"
    if drafter is None and not (ASSETS / "drafter").is_dir():
        raise DemoError(f"no drafter in {ASSETS / 'drafter'}; name one with --drafter PATH")
    if drafter is None and policy is None:
        return shipped
    settings: dict[str, Any] = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    settings["model"] = str((drafter or ASSETS / "drafter").resolve())
    if policy is not None:
        settings["scheduler"] = {"policy": policy}
    ForeSparkConfig.from_any(settings)
    folder.mkdir(parents=True, exist_ok=True)
    changed = folder / "forespark.yaml"
    changed.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return changed


def summary(
    identical: bool, totals: StepTotals, fast: Answer, alone: Answer
) -> dict[str, bool | int | float]:
    """The closing JSON line."""
    return {
        "identical": identical,
        "acceptance_length": round(totals.per_step(totals.emitted_tokens), 3),
        "mean_draft_len": round(totals.per_step(totals.drafted_tokens), 3),
        "mean_verify_len": round(totals.per_step(totals.verified_tokens), 3),
        "tokens": len(fast.token_ids),
        "tokens_per_s": round(fast.tokens_per_s, 2),
        "tokens_per_s_target": round(alone.tokens_per_s, 2),
    }


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def _convert(console: Console, folder: Path) -> Path:
    with _progress(console) as progress:
        task = progress.add_task("model: convert SmolLM2-135M-Instruct", total=1)

        def step(done: int, total: int) -> None:
            # The last tenth is the tokenizer and writing.
            progress.update(task, completed=0.9 * done / total)

        ensure_smollm2(folder, step)
        progress.update(task, completed=1)
    return folder


def _wait(console: Console, server: Server, what: str) -> None:
    with _progress(console) as progress:
        task = progress.add_task(f"server: start {what}", total=1)
        server.wait_ready(
            lambda s: progress.update(task, completed=min(0.99, s / EXPECTED_START_S))
        )
        progress.update(task, completed=1)


def _answer(console: Console, server: Server, what: str, prompt: str, max_tokens: int) -> Answer:
    console.rule(what, align="left")
    answer = chat(
        server.url,
        prompt,
        max_tokens,
        lambda piece: console.print(piece, end="", markup=False, highlight=False, soft_wrap=True),
    )
    console.print()
    return answer


def _table(totals: StepTotals, fast: Answer, alone: Answer) -> Table:
    table = Table(title="one answer", title_justify="left")
    for heading in ("", "total", "per step"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in ("drafted_tokens", "verified_tokens", "accepted_tokens", "emitted_tokens"):
        total = getattr(totals, name)
        label = name.replace("_tokens", "")
        table.add_row(label, f"{total:.0f}", f"{totals.per_step(total):.2f}")
    table.add_row("steps", f"{totals.steps:.0f}", "")
    table.add_row("tokens/s with ForeSpark", f"{fast.tokens_per_s:.1f}", "")
    table.add_row("tokens/s target alone", f"{alone.tokens_per_s:.1f}", "")
    return table


def run_demo(
    *,
    drafter: Path | None,
    policy: str | None,
    prompt: str | None,
    max_tokens: int,
    cache: Path,
) -> None:
    """Run everything and print the closing JSON line; DemoError or ServerError on failure."""
    console = Console()
    question = prompt or PROMPT
    settings = settings_file(drafter, policy, cache / "demo")
    model = _convert(console, (cache / "smollm2").resolve())

    speculative = [*OPTIONS, "--speculative-config", str(settings)]
    with Server(model, speculative, cache / "demo" / "forespark.log") as server:
        _wait(console, server, "with ForeSpark")
        chat(server.url, WARM_UP, WARM_UP_TOKENS)
        before = read_counters(server.url, "forespark:")
        console.print(f"[bold]{question}[/]")
        fast = _answer(console, server, "with ForeSpark", question, max_tokens)
        totals = step_totals(before, read_counters(server.url, "forespark:"))

    with Server(model, OPTIONS, cache / "demo" / "target.log") as server:
        _wait(console, server, "the target alone")
        chat(server.url, WARM_UP, WARM_UP_TOKENS)
        alone = _answer(console, server, "target alone", question, max_tokens)
        identical = fast.text == alone.text
        if not identical:
            identical = all_top_or_tied(target_ranks(server.url, fast), fast.token_ids)
            console.print(
                "texts differ:", "only at the target's ties" if identical else "NOT a tie"
            )

    console.print(_table(totals, fast, alone))
    print(json.dumps(summary(identical, totals, fast, alone)), flush=True)
    if not identical:
        raise DemoError("the answers differ, and not only where the target itself is tied")


__all__ = ["DemoError", "ServerError", "run_demo"]
