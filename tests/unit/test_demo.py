"""The demo's own logic: conversion, streaming, counters, ties, settings and set-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from forespark.config import ForeSparkConfig
from forespark.demo import bootstrap, run
from forespark.demo.chat import Answer, all_top_or_tied, collect, counters
from forespark.demo.convert import file_sha256, is_complete, tensor_name, undo_rotary_order
from forespark.demo.server import Server, ServerError

DRAFTER = Path(__file__).parents[1] / "assets" / "tiny-pair" / "drafter"


def test_rotary_order_is_undone() -> None:
    """Catches q and k rows left in GGUF's interleaved order: fluent nonsense, no error."""
    heads, half, columns = 3, 4, 5
    wanted = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    # GGUF stores row r of the first half next to row r of the second half.
    interleaved = wanted.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(-1, columns)
    assert (undo_rotary_order(interleaved, heads) == wanted).all()


def test_tensor_names() -> None:
    """Catches a tensor filed under another layer's or module's name."""
    assert tensor_name("blk.12.attn_output.weight") == "model.layers.12.self_attn.o_proj.weight"
    assert tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ValueError, match="unexpected tensor blk.0.ssm_a"):
        tensor_name("blk.0.ssm_a.weight")


def test_a_cut_conversion_is_not_reused(tmp_path: Path) -> None:
    """Catches a damaged cached model being served again and again."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert not is_complete(tmp_path)
    digest = file_sha256(tmp_path / "model.safetensors")
    record = {"schema": 1, "sha256": {"model.safetensors": digest}}
    (tmp_path / "converted.json").write_text(json.dumps(record))
    assert is_complete(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weight")
    assert not is_complete(tmp_path)
    (tmp_path / "converted.json").write_text('{"schema": 1')
    assert not is_complete(tmp_path)


def event(content: str, ids: list[int], **more: Any) -> str:
    choice = {"delta": {"content": content}, "token_ids": ids}
    return "data: " + json.dumps({"choices": [choice], **more})


def test_stream_is_counted_in_tokens_not_in_chunks() -> None:
    """Catches a speed that counts chunks: with speculation a chunk carries several tokens."""
    lines = [
        event("", [], prompt_token_ids=[7, 8]),
        event("a", [1]),
        event("bcd", [2, 3, 4]),
        "",
        event("e", [5]),
        "data: [DONE]",
    ]
    shown: list[str] = []
    clock = iter([10.0, 11.0, 12.0])
    answer = collect(lines, shown.append, lambda: next(clock))
    assert (answer.text, "".join(shown)) == ("abcde", "abcde")
    assert (answer.prompt_ids, answer.token_ids) == ((7, 8), (1, 2, 3, 4, 5))
    assert answer.tokens_per_s == pytest.approx(2.0)


def test_an_error_in_the_stream_is_an_error() -> None:
    """Catches a server that dies in the middle looking like a short answer."""
    with pytest.raises(ValueError, match="stopped answering"):
        collect([event("a", [1]), 'data: {"error": {"message": "x"}}'], lambda _: None, lambda: 0.0)


PAGE = """# HELP forespark:steps_total steps
forespark:steps_total{engine="0",model_name="m"} 4.0
forespark:drafted_tokens_total{engine="0"} 40.0
forespark:drafted_tokens_total{engine="1"} 2.0
forespark:verified_tokens_total{engine="0"} 20.0
forespark:accepted_tokens_total{engine="0"} 8.0
forespark:emitted_tokens_total{engine="0"} 12.0
vllm:num_requests_running 1.0
"""


def test_counters_become_means_per_step() -> None:
    """Catches counters of several engines overwriting each other, and the warm-up being counted."""
    after = counters(PAGE, "forespark:")
    assert after["forespark:drafted_tokens_total"] == 42.0
    assert "vllm:num_requests_running" not in after
    totals = run.step_totals({"forespark:steps_total": 2.0}, after)
    assert totals.steps == 2.0
    assert totals.per_step(totals.drafted_tokens) == 21.0


def test_missing_counters_are_said_not_faked() -> None:
    """Catches a demo that reports zeros when ForeSpark is not active in the server."""
    with pytest.raises(run.DemoError, match="forespark:steps_total.*not active"):
        run.step_totals({}, {})
    after = counters(PAGE, "forespark:")
    with pytest.raises(run.DemoError, match="did not move"):
        run.step_totals(after, after)


def row(own: int, logprob: float, rank: int, best: float) -> dict[str, Any]:
    rows = {str(own): {"logprob": logprob, "rank": rank}}
    return rows if rank == 1 else {**rows, "9": {"logprob": best, "rank": 1}}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1, -0.1, 1, -0.1)], True),
        ([row(1, -0.70001, 2, -0.7)], True),
        ([row(1, -0.9, 2, -0.7)], False),
        ([row(1, -0.7, 3, -0.7)], False),
        ([row(1, -0.1, 1, -0.1), row(1, -5.0, 2, -0.1)], False),
    ],
)
def test_only_a_tie_excuses_a_difference(rows: list[dict[str, Any]], expected: bool) -> None:
    """Catches a wrong token being waved through as rounding."""
    assert all_top_or_tied(rows, [1] * len(rows)) is expected


def test_closing_line_has_the_promised_keys() -> None:
    """Catches a renamed key in the line that scripts read."""
    answer = Answer("text", (1,), (1, 2, 3), 1.0, 1)
    totals = run.StepTotals(2, 30, 10, 4, 6)
    line = run.summary(True, totals, answer, answer)
    assert line == {
        "identical": True,
        "acceptance_length": 3.0,
        "mean_draft_len": 15.0,
        "mean_verify_len": 5.0,
        "tokens": 3,
        "tokens_per_s": 2.0,
        "tokens_per_s_target": 2.0,
    }


def test_shipped_settings_and_other_drafters(tmp_path: Path) -> None:
    """Catches shipped settings that the schema refuses, and --drafter being ignored."""
    shipped = yaml.safe_load((run.ASSETS / "forespark.yaml").read_text())
    assert ForeSparkConfig.from_any(shipped).scheduler.policy == "joint"
    changed = run.settings_file(DRAFTER, "full", tmp_path)
    config = ForeSparkConfig.from_any(changed)
    assert config.model == str(DRAFTER)
    assert config.scheduler.policy == "full"
    with pytest.raises(ValueError, match="scheduler.policy"):
        run.settings_file(DRAFTER, "ful", tmp_path)


def test_a_server_that_dies_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a demo that waits five minutes for a server that ended at once."""
    monkeypatch.setattr(
        "forespark.demo.server.vllm_command", lambda: ["sh", "-c", "echo reason; exit 3"]
    )
    with Server(tmp_path, [], tmp_path / "log.txt") as server:
        with pytest.raises(ServerError, match="reason"):
            server.wait_ready()


def test_set_up_is_done_once(tmp_path: Path) -> None:
    """Catches a set-up that runs again each time, or never again after pyproject.toml changed."""
    assert not bootstrap.is_current(tmp_path)
    (tmp_path / bootstrap.STAMP).write_text(json.dumps({"identity": bootstrap.identity()}))
    assert bootstrap.is_current(tmp_path)
    (tmp_path / bootstrap.STAMP).write_text(json.dumps({"identity": "older"}))
    assert not bootstrap.is_current(tmp_path)


def test_a_failing_step_shows_why_after_its_fallback(tmp_path: Path) -> None:
    """Catches an installation that fails with nothing but an exit status."""
    log = tmp_path / "log.txt"
    broken = ["sh", "-c", "echo no such wheel; exit 1"]
    bootstrap.run_step("1/1", bootstrap.Step("torch", broken, 1, ["true"]), log)
    with pytest.raises(bootstrap.StepFailed, match="no such wheel"):
        bootstrap.run_step("1/1", bootstrap.Step("torch", broken, 1, broken), log)


def test_progress_never_claims_to_be_done() -> None:
    """Catches a bar that sits at 100 % while the step is still running."""
    assert "." in bootstrap.bar(1e6, 1.0)
