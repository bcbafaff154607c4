"""User reports whose output must be the target's own: reports 1, 25, 26, 27, 29 and 34."""

from __future__ import annotations

import heapq
import json.decoder
import textwrap
from pathlib import Path
from typing import Any

import pytest
from reports_harness import StepLog, counters, generate, greedy, in_engine, once, run_job, runner_of

pytestmark = pytest.mark.engine

Runs = dict[str, dict[str, Any]]
TRIMMED = ("adaptive_verification", "joint")
SOME = [
    "def merge(data, key):\n    ",
    "class Path:\n    def load(self, path):\n        ",
    "import os\n\ndef walk(node, default=None):\n    ",
    "for item in items:\n    ",
]
SHARED = "x = [1, 2, 3]\nfor value in x:\n    print(value)\n" * 12  # more than 3 blocks of 32
PAIR_OF_PROMPTS = [SHARED + "def mean(x):\n    ", SHARED + "class Mean:\n    "]


def job(task: dict[str, Any]) -> Runs:
    """The answers of every engine to the same requests."""
    runs: Runs = {}
    for name in ("target", "full", *TRIMMED):
        policy = None if name == "target" else name
        runs[name] = in_engine(policy, _options, max_num_seqs=8, enable_prefix_caching=True)
    for name in ("cached", "uncached"):
        caching = name == "cached"
        runs[name] = in_engine("joint", _twice, max_model_len=2048, enable_prefix_caching=caching)
    return runs


def _options(llm: Any) -> dict[str, Any]:
    log = StepLog(llm) if runner_of(llm).speculator is not None else None
    seen: dict[str, Any] = {}
    # 25: a stop token where the target says it early, which min_tokens has to hold back.
    free = generate(llm, SOME[:1], greedy(12))[0]
    early = {"stop_token_ids": [free[2]], "ignore_eos": False}
    seen["early"] = generate(llm, SOME[:1], greedy(40, **early))[0]
    seen["min_tokens"] = generate(llm, SOME[:1], greedy(40, min_tokens=5, **early))[0]
    # 26
    seen["plain"] = generate(llm, SOME, greedy(64))
    seen["penalty"] = generate(llm, SOME, greedy(64, repetition_penalty=1.3))
    # 27: the first finishes early, the third must avoid what it would have said.
    lengths = [4, 30, 30, 30]
    seen["free"] = generate(llm, SOME, [greedy(n) for n in lengths])
    words = sorted({llm.get_tokenizer().decode([t]).strip() for t in seen["free"][2][4:12]} - {""})
    filtered = [greedy(n) for n in lengths]
    filtered[2] = greedy(30, bad_words=words)
    seen["bad_words"] = generate(llm, SOME, filtered)
    seen["words"] = words
    # 29
    for key, options in (
        ("logprobs", {"logprobs": 5}),
        ("scored", {"logprob_token_ids": [100, 200]}),
    ):
        answer = llm.generate(SOME[1:2], greedy(6, **options), use_tqdm=False)[0].outputs[0]
        seen[key] = {
            "ids": list(answer.token_ids),
            "places": [
                {str(token): round(p.logprob, 3) for token, p in place.items()}
                for place in answer.logprobs
            ],
        }
    if log is not None:
        seen["trimmed"] = sum(row["verified"] < 7 for row in log.rows[1:])
    # 34
    seen["serial"] = [generate(llm, [prompt], greedy(32))[0] for prompt in PAIR_OF_PROMPTS]
    seen["at_once"] = generate(llm, PAIR_OF_PROMPTS * 4, greedy(32))
    return seen


def _twice(llm: Any) -> dict[str, Any]:
    """Long prompts, each sent twice: the second is restored from the cache where there is one."""
    log, runs = StepLog(llm), []
    for module, length in ((json.decoder, 400), (heapq, 400), (textwrap, 1500)):
        text = Path(module.__file__).read_text(encoding="utf-8")
        ids = llm.get_tokenizer()(text).input_ids[:length]
        for _ in range(2):
            log.clear()
            hits = counters(llm)["vllm:prefix_cache_hits"]
            answer = generate(llm, [{"prompt_token_ids": ids}], greedy(48))[0]
            runs.append(
                {
                    "ids": answer,
                    "first_scores": log.rows[0]["scores"],
                    "steps": len(log.rows),
                    "restored": counters(llm)["vllm:prefix_cache_hits"] - hits,
                    "prompt": len(ids),
                }
            )
    return {"runs": runs}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return once(tmp_path_factory, "text", lambda: run_job("test_reports_text:job"))


def test_report_1_acceptance_with_a_restored_prompt(runs: Runs) -> None:
    """Catches drafter context or features missing for rows restored from the prefix cache."""
    cached, uncached = runs["cached"]["runs"], runs["uncached"]["runs"]
    assert [run["ids"] for run in cached] == [run["ids"] for run in uncached]
    second, without = cached[1::2], uncached[1::2]
    # All but the prompt's last whole block.
    assert all(run["restored"] >= run["prompt"] // 32 * 32 - 32 for run in second)
    assert all(run["restored"] == 0 for run in uncached)
    for here, there in zip(second, without, strict=True):
        assert here["first_scores"] == pytest.approx(there["first_scores"], abs=1e-3)
    steps = [sum(run["steps"] for run in some) for some in (second, without)]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)  # the same tokens in as many steps
    assert steps[1] < 0.6 * 3 * 48  # and drafts were accepted


@pytest.mark.parametrize("policy", ["full", *TRIMMED])
def test_report_25_min_tokens_masks_the_right_rows(runs: Runs, policy: str) -> None:
    """Catches min_tokens masking the stop token one draft row too many or too few."""
    target = runs["target"]
    assert len(target["early"]) <= 3 and len(target["min_tokens"]) >= 5
    for key in ("early", "min_tokens"):
        assert runs[policy][key] == target[key]


@pytest.mark.parametrize("policy", ["full", *TRIMMED])
def test_report_26_penalties_count_each_token_once(runs: Runs, policy: str) -> None:
    """Catches penalties that draft rows ignore, or that count the last sampled token twice."""
    assert runs["target"]["penalty"] != runs["target"]["plain"]
    assert runs[policy]["penalty"] == runs["target"]["penalty"]
    assert runs[policy]["plain"] == runs["target"]["plain"]
    assert policy == "full" or runs[policy]["trimmed"] > 20


@pytest.mark.parametrize("policy", ["full", *TRIMMED])
def test_report_27_bad_words_filter_their_request_only(runs: Runs, policy: str) -> None:
    """Catches bad_words applied to another request once the batch was reordered."""
    target = runs["target"]
    assert target["bad_words"][2] != target["free"][2]
    assert [target["bad_words"][i] for i in (0, 1, 3)] == [target["free"][i] for i in (0, 1, 3)]
    assert runs[policy]["words"] == target["words"]
    assert runs[policy]["bad_words"] == target["bad_words"]


@pytest.mark.parametrize("policy", ["full", *TRIMMED])
@pytest.mark.parametrize("key", ["logprobs", "scored"])
def test_report_29_one_logprob_entry_per_token(runs: Runs, policy: str, key: str) -> None:
    """Catches logprobs of discarded draft rows that leak, or belong to another token."""
    answer, target = runs[policy][key], runs["target"][key]
    assert len(answer["ids"]) == len(answer["places"]) == 6
    assert answer["ids"] == target["ids"]
    for token, place, expected in zip(
        answer["ids"], answer["places"], target["places"], strict=True
    ):
        assert str(token) in place
        assert place == pytest.approx(expected, abs=5e-3)
    if key == "scored":
        assert all({"100", "200"} <= set(place) for place in answer["places"])


@pytest.mark.parametrize("policy", ["full", *TRIMMED])
def test_report_34_a_shared_prefix_is_never_overwritten(runs: Runs, policy: str) -> None:
    """Catches a draft without a block of its own that writes into another request's prefix."""
    assert runs[policy]["serial"] == runs["target"]["serial"]
    assert runs[policy]["at_once"] == runs["target"]["serial"] * 4
