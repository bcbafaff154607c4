"""User reports on how long each request's draft is: reports 18, 20, 21 and 22."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from reports_harness import (
    K,
    StepLog,
    counters,
    generate,
    greedy,
    in_engine,
    once,
    run_job,
    wide_drafter,
)

pytestmark = pytest.mark.engine

WIDE = 15
COPY = ["9" * length for length in (36, 40, 44, 48)]
HEX = ["f3c0a91d7e5b8246", "0b9e4d17c2f8a635", "7a1ce9f5830d6b42", "d48e02b6915fa7c3"]
THREE = ["def merge(data, key):\n    ", "class Path:\n    def load(self):\n        ", "x = [1, 2]"]
ENDS = (1, 2, 16)  # tokens that requests may emit


def job(task: dict[str, Any]) -> dict[str, Any]:
    """Draft lengths on an engine whose tokens cost something, and on one with K = 15."""
    found: dict[str, Any] = {"target": in_engine(None, _texts)}
    found["joint"] = in_engine("joint", _joint)
    with tempfile.TemporaryDirectory() as folder:
        wide = {
            "drafter": wide_drafter(Path(folder) / "drafter", WIDE),
            "tokens": WIDE,
            "batchwise_schedule": [[512, WIDE]],
        }
        found["wide"] = in_engine("batchwise", _ends, wide, max_num_batched_tokens=400)
    return found


def _texts(llm: Any) -> dict[str, Any]:
    three = generate(llm, THREE, greedy(40))
    return {"three": three, "ends": generate(llm, THREE, [greedy(n) for n in ENDS])}


def _ends(llm: Any) -> dict[str, Any]:
    log = StepLog(llm)
    return {"ends": generate(llm, THREE, [greedy(n) for n in ENDS]), "rows": log.rows}


def _joint(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    log, found = StepLog(llm), {}
    # 18: the same number of tokens, all at once; what is random cannot be drafted well.
    hard = [SamplingParams(temperature=1, max_tokens=60, ignore_eos=True, seed=i) for i in range(4)]
    llm.generate(COPY + HEX, [greedy(60)] * 4 + hard, use_tqdm=False)
    names = sorted({row["request"] for row in log.rows}, key=int)
    found["by_request"] = [
        [[row["step"], row["d"]] for row in log.of(name) if row["left"] > K] for name in names
    ]
    # 20: the second of three requests opts out.
    log.clear()
    params = [greedy(40) for _ in THREE]
    params[1] = greedy(40, extra_args={"forespark": {"enabled": False}})
    found["three"] = generate(llm, THREE, params)
    names = sorted({row["request"] for row in log.rows}, key=int)
    found["opted_out"] = [log.of(name) for name in names]
    found["batches"] = list(log.batches)
    log.clear()
    found["ends"] = generate(llm, THREE, [greedy(n) for n in ENDS])
    found["rows"] = list(log.rows)
    # 22: ForeSpark's counters against what was seen from inside.
    log.clear()
    before = counters(llm)
    # The last two wait for a place, and their prompts come in chunks beside the others' drafts.
    prompts = THREE * 4 + ["x = [1, 2, 3]\n" * 30] * 2
    generate(llm, prompts, [greedy(8), greedy(8), *[greedy(40)] * 12])
    after = counters(llm)
    found["counted"] = {
        name.removeprefix("forespark:").removesuffix("_tokens"): after[name] - before[name]
        for name in after
        if name.startswith("forespark:") and isinstance(after[name], int | float)
    }
    found["counted_rows"] = list(log.rows)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "lengths", lambda: run_job("test_reports_lengths:job"))


def test_report_18_one_batch_holds_long_and_short_drafts(found: dict[str, Any]) -> None:
    """Catches a draft length chosen per batch, or scores that do not tell easy from hard."""
    easy, hard = found["joint"]["by_request"][:4], found["joint"]["by_request"][4:]
    # The steps that all eight shared, once a first draft had told them apart.
    last = min(drafts[-1][0] for drafts in easy + hard)
    lengths = [[d for step, d in drafts if 3 <= step <= last] for drafts in easy + hard]
    assert min(map(len, lengths)) >= 3
    easy_mean, hard_mean = (
        mean(d for drafts in some for d in drafts) for some in (lengths[:4], lengths[4:])
    )
    assert easy_mean > hard_mean + 2


def test_report_20_an_opted_out_request_is_left_alone(found: dict[str, Any]) -> None:
    """Catches an opt-out that drafts anyway, changes the batch, or costs the others theirs."""
    first, out, third = found["joint"]["opted_out"]
    assert all(row["d"] == row["verified"] == 0 and row["emitted"] == 1 for row in out)
    assert len(out) == 40
    assert mean(row["d"] for row in first) > 1 and mean(row["d"] for row in third) > 1
    # The batch keeps its shape: it holds the request in every step until the others have finished.
    assert found["joint"]["batches"].count(3) >= min(len(first), len(third)) - 2
    assert found["joint"]["three"] == found["target"]["three"]


@pytest.mark.parametrize("run", ["joint", "wide"])
def test_report_21_no_draft_beyond_what_may_be_emitted(found: dict[str, Any], run: str) -> None:
    """Catches drafts paid for tokens that a request can no longer emit."""
    by_end: dict[str, list[dict[str, Any]]] = {}
    for row in found[run]["rows"]:
        by_end.setdefault(row["request"], []).append(row)
    one, two, sixteen = (by_end[name] for name in sorted(by_end, key=int))
    # After the first token the three have 0, 1 and 15 left to emit.
    assert [rows[0]["left"] for rows in (one, two, sixteen)] == [0, 1, 15]
    assert max(row["d"] for row in one) == 0 and max(row["d"] for row in two) <= 1
    limit = WIDE if run == "wide" else K
    for row in one + two + sixteen:
        assert row["d"] <= max(0, min(row["left"] - 1, limit))
    assert max(row["d"] for row in sixteen) == min(14, limit)
    assert found[run]["ends"] == found["target"]["ends"]


def test_report_22_drafted_verified_and_accepted_are_counted_apart(found: dict[str, Any]) -> None:
    """Catches counters that mix drafted with verified tokens, or leave out the bonus token."""
    counted, rows = found["joint"]["counted"], found["joint"]["counted_rows"]
    emitted = sum(row["emitted"] for row in rows)
    assert counted["drafted"] == sum(row["d"] for row in rows)
    assert counted["verified"] == sum(row["verified"] for row in rows)
    assert counted["accepted"] == sum(row["emitted"] - 1 for row in rows)
    assert counted["emitted"] == emitted == 2 * 8 + 12 * 40
    assert counted["request_steps"] == len(rows)
    assert counted["drafted"] > counted["verified"] > counted["accepted"] > 0
    length = counted["emitted"] / counted["request_steps"]
    assert length == pytest.approx(1 + counted["accepted"] / counted["request_steps"])
