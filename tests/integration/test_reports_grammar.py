"""User reports on structured output beside drafts: reports 16 and 30 (see also the HTTP tests)."""

from __future__ import annotations

from typing import Any

import pytest
from reports_harness import (
    CLIFF,
    StepLog,
    counters,
    greedy,
    in_engine,
    once,
    run_job,
    runner_of,
)

pytestmark = pytest.mark.engine

RULE = r"[^e]{60,90}"  # most drafts keep to it and some do not
SMALL = {"num_gpu_blocks_override": 44, "max_model_len": 256, "max_num_seqs": 30}


def job(task: dict[str, Any]) -> dict[str, Any]:
    """Grammar answers of the target alone, of the scheduler, and of a scheduler that trims all."""
    return {
        "target": in_engine(None, _both, **SMALL, max_num_batched_tokens=512),
        "joint": in_engine("joint", _objects, **SMALL, max_num_batched_tokens=512),
        "cliff": in_engine("joint", _chunk, {"prices": CLIFF}),
    }


def _both(llm: Any) -> dict[str, Any]:
    return {**_objects(llm), **_chunk(llm)}


def _objects(llm: Any) -> dict[str, Any]:
    """30 JSON objects at once with a cache that holds a third of them."""
    from vllm.sampling_params import StructuredOutputsParams

    prompts = [f'Write item {i} as JSON.\n{{"name": "item", "id": ' for i in range(30)]
    shape = greedy(48, structured_outputs=StructuredOutputsParams(json_object=True))
    outputs = llm.generate(prompts, shape, use_tqdm=False)
    return {
        "objects": [list(o.outputs[0].token_ids) for o in outputs],
        "reasons": [o.outputs[0].finish_reason for o in outputs],
        "preempted": counters(llm)["vllm:num_preemptions"],
    }


def _chunk(llm: Any) -> dict[str, Any]:
    """Two grammar requests decode; then a prompt of 40 tokens comes into the same step."""
    from vllm.sampling_params import StructuredOutputsParams

    rule = greedy(40, structured_outputs=StructuredOutputsParams(regex=RULE), ignore_eos=False)
    core, texts = llm.llm_engine, {}
    log = StepLog(llm) if runner_of(llm).speculator is not None else None
    core.add_request("first", "def load(data):\n    ", rule)
    core.add_request("second", "x = [1, 2, 3]\n", rule)
    late: Any = {"prompt_token_ids": llm.get_tokenizer()("import os\n" * 30).input_ids[:40]}
    emitted = {"first": 0, "second": 0}
    while core.has_unfinished_requests():
        if late is not None and min(emitted.values()) >= 6:
            core.add_request("late", late, greedy(12))
            late = None
        for output in core.step():
            emitted[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
    return {"chunk": texts, "steps": [] if log is None else log.steps}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "grammar", lambda: run_job("test_reports_grammar:job"))


def test_report_16_nothing_verified_beside_a_prefill_chunk(found: dict[str, Any]) -> None:
    """Catches grammar mask rows that are keyed by scheduled drafts when none is verified."""
    beside = [step for step in found["cliff"]["steps"] if step["N"] == 2 + 40]
    assert [(step["B"], step["with_drafts"]) for step in beside] == [(0, 2)]
    assert beside[0]["D"] > 0
    assert any(step["B"] > 0 for step in found["cliff"]["steps"])
    assert found["cliff"]["chunk"] == found["target"]["chunk"]


def test_report_30_json_objects_survive_preemption(found: dict[str, Any]) -> None:
    """Catches a crash, or a wrong token, when a draft breaks the grammar or outlives preemption."""
    joint, target = found["joint"], found["target"]
    assert joint["preempted"] > 0
    assert set(joint["reasons"]) <= {"stop", "length"} and len(joint["reasons"]) == 30
    assert joint["objects"] == target["objects"]
