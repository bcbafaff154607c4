"""Traces of decisions, and reading them back in words and as a picture."""

import json
import math

import numpy as np
import pytest

from forespark.core import Candidate, Decision, LatencyTable, Plan, StepInputs
from forespark.explain import draw_step, explain_step
from forespark.scheduler.joint import plan_joint
from forespark.scheduler.policies import make_policy
from forespark.scheduler.trace import Actual, StepArrays, TraceWriter, read_trace

DRAFT = LatencyTable(np.array([12, 16]), np.array([1.0, 1.2]), 16)
VERIFY = LatencyTable(np.array([4, 16]), np.array([9.0, 10.0]), 16)
SCORES = 0.7 ** np.arange(1, 16, dtype=np.float32)[None, :]
STEP = StepInputs(SCORES, np.array([15]), 1, 1)


def write(path, *steps, **more):
    with TraceWriter(path) as trace:
        for step, decision in enumerate(steps):
            trace.write(step, decision, at=1000.0 + step, **more)


def test_a_record_holds_the_whole_decision(tmp_path):
    """Would catch a trace from which the choice cannot be explained."""
    decision = plan_joint(STEP, DRAFT, VERIFY, 0.04)
    write(tmp_path / "t.jsonl", decision, actual=Actual(accepted_tokens=3, step_ms=11.0))
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
    raw = json.loads(line)
    assert raw["schema"] == 1 and (raw["D"], raw["B"], raw["N"], raw["n"]) == (15, 15, 1, 1)
    (record,) = read_trace(tmp_path / "t.jsonl")
    assert record.time == 1000.0
    assert record.policy == "joint" and record.guard == "min_gain_over_full_block"
    assert record.predicted_ms == pytest.approx(decision.chosen.predicted_ms)
    assert record.runner_up.D == decision.runner_up.plan.draft_budget
    assert [plan.name for plan in record.alternatives] == ["no speculation", "full block"]
    assert record.actual.accepted_tokens == 3 and record.actual.draft_ms is None


def test_lines_are_readable_while_the_writer_is_open_and_are_appended(tmp_path):
    """Would catch a buffer that hides the last steps of a running or crashed server."""
    decision = plan_joint(STEP, DRAFT, VERIFY, 0.0)
    write(tmp_path / "t.jsonl", decision)
    with TraceWriter(tmp_path / "t.jsonl") as trace:
        trace.write(7, decision)
        assert [record.step for record in read_trace(tmp_path / "t.jsonl")] == [0, 7]


def test_a_truncated_last_line_is_skipped_with_a_clear_message(tmp_path):
    """Would catch losing a whole trace because the server was killed in the middle of a line."""
    path = tmp_path / "t.jsonl"
    write(path, plan_joint(STEP, DRAFT, VERIFY, 0.0), plan_joint(STEP, DRAFT, VERIFY, 0.0))
    path.write_text(path.read_text()[:-30])
    with pytest.warns(UserWarning, match="line 2 is cut off .* read the 1 complete steps"):
        assert len(read_trace(path)) == 1


def test_damage_elsewhere_is_an_error_with_its_line(tmp_path):
    """Would catch a corrupt trace being read as a shorter one."""
    path = tmp_path / "t.jsonl"
    write(path, plan_joint(STEP, DRAFT, VERIFY, 0.0))
    good = path.read_text()
    path.write_text("{oops\n" + good)
    with pytest.raises(ValueError, match="line 1: not a trace record"):
        read_trace(path)
    path.write_text(good.replace('"schema": 1', '"schema": 99'))
    with pytest.raises(ValueError, match="schema 99; this version reads schema 1"):
        read_trace(path)


def test_a_decision_without_a_price_survives_the_round_trip(tmp_path):
    """Would catch NaN in JSON, which other readers refuse."""
    decision = make_policy("full").plan(STEP)
    assert math.isnan(decision.chosen.predicted_ms)
    write(tmp_path / "t.jsonl", decision)
    assert "NaN" not in (tmp_path / "t.jsonl").read_text()
    records = read_trace(tmp_path / "t.jsonl")
    assert records[0].predicted_ms is None
    assert "No latency profile" in explain_step(records, 0)


def test_explanation_states_budgets_prices_and_guard(tmp_path):
    """Would catch an explanation that leaves out why the best-priced plan was not taken."""
    write(
        tmp_path / "t.jsonl",
        plan_joint(STEP, DRAFT, VERIFY, 0.04),
        plan_joint(STEP, DRAFT, VERIFY, 0.0),
        actual=Actual(accepted_tokens=3, emitted_tokens=4, step_ms=11.2),
    )
    records = read_trace(tmp_path / "t.jsonl")
    text = explain_step(records, 0)
    for part in (
        "Drafted D = 15 tokens and verified B = 15",
        "min_gain_over_full_block fired: a shorter draft would not beat full blocks",
        "is below the next best plan (D = 11, B = 11)",
        "no speculation",
        "1.200 ms draft + 10.000 ms verify",
        "Accepted 3 of 15 verified (20%)",
        "The step took 11.200 ms, predicted 11.200 (+0.0%)",
    ):
        assert part in text
    assert "beats the next best plan" in explain_step(records, 1)


def test_explanation_of_a_step_that_drafts_nothing():
    """Would catch a division by B = 0, and words that suggest the drafter ran."""
    from forespark.scheduler.trace import TraceRecord

    decision = Decision("off", Candidate(Plan(0, 0), 1.0, 9.0), notes=("a note",))
    record = TraceRecord.of(3, 0.0, decision, Actual(accepted_tokens=0), StepArrays())
    text = explain_step([record], 3)
    assert "the drafter was not launched" in text and "Note: a note." in text
    assert "Accepted" not in text


def test_a_missing_step_says_which_steps_there_are(tmp_path):
    """Would catch a bare KeyError for a step outside the trace."""
    write(tmp_path / "t.jsonl", plan_joint(STEP, DRAFT, VERIFY, 0.0))
    with pytest.raises(ValueError, match="step 9: not in the trace, which holds steps 0 to 0"):
        explain_step(read_trace(tmp_path / "t.jsonl"), 9)
    with pytest.raises(ValueError, match="no steps"):
        explain_step([], 0)


def test_a_step_is_drawn_from_its_recorded_arrays(tmp_path):
    """Would catch a picture that needs the engine, a display, or one fixed batch size."""
    pytest.importorskip("matplotlib")
    n = 8
    scores = np.tile(SCORES, (n, 1))
    arrays = StepArrays(
        rewards=np.pad(scores.cumsum(axis=1), ((0, 0), (1, 0))).tolist(),
        scores=scores.tolist(),
        survival=np.where(np.arange(15) > 10, -np.inf, scores).tolist(),
        draft_lens=[15, 11, 3, 0, 1, 2, 3, 4],
        verify_lens=[15, 3, 1, 0, 1, 1, 1, 1],
    )
    write(tmp_path / "t.jsonl", plan_joint(STEP, DRAFT, VERIFY, 0.0), arrays=arrays)
    (record,) = read_trace(tmp_path / "t.jsonl")
    assert record.draft_lens == arrays.draft_lens
    draw_step(record, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_drawing_without_arrays_says_what_to_record(tmp_path):
    """Would catch an unexplained TypeError on a trace without per-request arrays."""
    write(tmp_path / "t.jsonl", plan_joint(STEP, DRAFT, VERIFY, 0.0))
    with pytest.raises(ValueError, match="no rewards and scores"):
        draw_step(read_trace(tmp_path / "t.jsonl")[0], tmp_path / "step.png")
