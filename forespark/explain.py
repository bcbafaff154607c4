"""Read a recorded step back: why this many drafted and verified tokens, in words and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forespark.scheduler.joint import GUARD_FULL, GUARD_NONE
from forespark.scheduler.trace import TracedPlan, TraceRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GUARDS = {
    GUARD_NONE: "speculating would not beat decoding without it by the minimum gain",
    GUARD_FULL: "a shorter draft would not beat full blocks by the minimum gain",
}
MAX_PANELS = 6  # requests drawn, so that the picture stays readable


def explain_step(records: Sequence[TraceRecord], step: int) -> str:
    """Plain sentences on the decision of `step`: its budgets, every candidate's price, the guard.

    Raises ValueError when the trace does not hold the step.
    """
    record = find_step(records, step)
    lines = [_headline(record), *_reason(record), "", "Prices of the candidates:"]
    plans = (record.chosen, *([record.runner_up] if record.runner_up else []), *record.alternatives)
    width = max(len(plan.name) for plan in plans)
    lines += [f"  {_price(plan, width)}" for plan in plans]
    lines += [f"Note: {note}." for note in record.notes]
    return "\n".join([*lines, *_actual(record)])


def find_step(records: Sequence[TraceRecord], step: int) -> TraceRecord:
    """The last record of `step` (a re-planned step is recorded again)."""
    for record in reversed(records):
        if record.step == step:
            return record
    held = f"steps {records[0].step} to {records[-1].step}" if records else "no steps"
    raise ValueError(f"step {step}: not in the trace, which holds {held}")


def _headline(record: TraceRecord) -> str:
    return (
        f"Step {record.step} ({record.policy}): {record.n} requests and {record.N} non-draft "
        f"tokens. Drafted D = {record.D} tokens and verified B = {record.B} of them."
    )


def _reason(record: TraceRecord) -> list[str]:
    lines = []
    if record.guard is not None:
        meaning = GUARDS.get(record.guard, "a rule overrode the highest predicted goodput")
        lines.append(f"The guard {record.guard} fired: {meaning}.")
    if record.D == 0:
        lines.append("Nothing was drafted, so the drafter was not launched and cost nothing.")
    elif record.B < record.D:
        lines.append(
            f"{record.D - record.B} drafted tokens are spare: the post-draft estimate picks which "
            f"{record.B} to verify."
        )
    goodput, other = record.chosen.goodput, record.runner_up
    if goodput and other is not None and other.goodput:
        gain = goodput / other.goodput - 1.0
        verb = "beats" if gain >= 0 else "is below"
        lines.append(
            f"Its predicted {goodput:.3f} tokens/ms {verb} the next best plan "
            f"(D = {other.D}, B = {other.B}) by {abs(gain):.2%}."
        )
    elif goodput is None:
        lines.append("No latency profile was loaded, so the plan has no price.")
    return lines


def _price(plan: TracedPlan, width: int) -> str:
    head = f"{plan.name:<{width}}  D = {plan.D:<5} B = {plan.B:<5}"
    if plan.ms is None or plan.draft_ms is None or plan.goodput is None:
        return f"{head} {plan.tokens:8.2f} tokens, no price"
    return (
        f"{head} {plan.tokens:8.2f} tokens / ({plan.draft_ms:.3f} ms draft + "
        f"{plan.ms - plan.draft_ms:.3f} ms verify) = {plan.goodput:.3f} tokens/ms"
    )


def _actual(record: TraceRecord) -> list[str]:
    actual = record.actual
    if actual is None:
        return []
    lines = []
    if actual.accepted_tokens is not None and record.B:
        share = actual.accepted_tokens / record.B
        lines.append(f"Accepted {actual.accepted_tokens} of {record.B} verified ({share:.0%}).")
    if actual.emitted_tokens is not None:
        lines.append(
            f"Emitted {actual.emitted_tokens} tokens, predicted {record.predicted_tokens:.1f}."
        )
    if actual.step_ms is not None and record.predicted_ms:
        error = actual.step_ms / record.predicted_ms - 1.0
        lines.append(
            f"The step took {actual.step_ms:.3f} ms, predicted {record.predicted_ms:.3f} "
            f"({error:+.1%})."
        )
    return lines


def draw_step(record: TraceRecord, path: str | Path) -> None:
    """PNG of one recorded step: per request its reward, envelope, survival and chosen lengths.

    Draws the first `MAX_PANELS` requests. Needs matplotlib, and a record written with `rewards`
    and `scores`; raises ValueError without those arrays.
    """
    if record.rewards is None or record.scores is None:
        raise ValueError(
            f"step {record.step}: the trace has no rewards and scores to draw; "
            "record it with the per-request arrays switched on"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = min(len(record.rewards), MAX_PANELS)
    columns = min(shown, 3)
    rows = -(-shown // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for request, axes in enumerate(grid):
        if request < shown:
            _panel(axes, record, request)
        else:
            axes.set_axis_off()
    grid[0].legend(fontsize=7, loc="upper left")
    dropped = len(record.rewards) - shown
    more = f" ({dropped} more requests not drawn)" if dropped else ""
    figure.suptitle(f"step {record.step}, {record.policy}: D = {record.D}, B = {record.B}{more}")
    figure.savefig(path, format="png", dpi=120)


def _panel(axes: Axes, record: TraceRecord, request: int) -> None:
    assert record.rewards is not None and record.scores is not None
    reward, score = record.rewards[request], record.scores[request]
    envelope = [reward[0]]
    for gain in score:
        envelope.append(envelope[-1] + gain)
    lengths = range(len(reward))
    axes.plot(lengths, envelope, color="tab:blue", label="envelope F(d)")
    axes.plot(lengths, reward, "o", color="tab:gray", markersize=3, label="reward R(d)")
    if record.survival is not None:
        survival = record.survival[request]
        axes.plot(range(1, len(survival) + 1), survival, ":", color="tab:green", label="survival")
    marks = (("drafted", record.draft_lens, "tab:orange"), ("verified", record.verify_lens, "k"))
    for label, lens, color in marks:
        if lens is not None:
            style = "-" if label == "drafted" else "--"
            axes.axvline(lens[request], color=color, linestyle=style, label=f"{label}")
    axes.set_title(f"request {request}", fontsize=9)
    axes.set_xlabel("tokens", fontsize=8)
    axes.set_ylabel("expected accepted tokens", fontsize=8)
    axes.set_ylim(bottom=0)
