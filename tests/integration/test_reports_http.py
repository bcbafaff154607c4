"""User reports over HTTP, on `vllm serve`: reports 5, 22, 28, 29 and 30."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from reports_harness import ENVIRONMENT, PAIR, generate, in_engine, once, run_job, settings

pytestmark = pytest.mark.engine

PROMPT = "def merge(data, key):\n    "
TEXT = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
GREEDY = {**TEXT, "temperature": 0}
NARROW = {**TEXT, "temperature": 1, "top_k": 1, "seed": 7}
NUCLEUS = {**TEXT, "temperature": 1, "top_p": 0.0001, "seed": 7}
SCORED = {**GREEDY, "max_tokens": 6, "logprobs": 5, "logprob_token_ids": [100, 200]}
OBJECT = {"temperature": 0, "max_tokens": 64, "response_format": {"type": "json_object"}}
SPACE = "Write the item as JSON, with a name, a number and a list of keys. " * 2
REFUSED = {"min_p": {"min_p": 0.1}, "logit_bias": {"logit_bias": {"5": 1.0}}}
# A cache of 44 blocks: the 30 objects need more than twice as many.
OPTIONS = """--enforce-eager --dtype float32 --max-model-len 256 --max-num-seqs 30 --block-size 32
--max-num-batched-tokens 512 --num-gpu-blocks-override 44 --seed 0
--per-request-spec-decode-metrics summary --speculative-config"""


def target(task: dict[str, Any]) -> dict[str, Any]:
    """The same requests to the target alone, in process."""
    return {"runs": in_engine(None, _target, max_model_len=256)}


def _target(llm: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    named = {"greedy": GREEDY, "narrow": NARROW, "nucleus": NUCLEUS}
    texts = {}
    for name, fields in named.items():
        params = SamplingParams(**{k: v for k, v in fields.items() if k != "prompt"})
        texts[name] = [
            llm.get_tokenizer().decode(generate(llm, [PROMPT], params)[0]) for _ in range(2)
        ]
    params = SamplingParams(temperature=0, max_tokens=6, logprob_token_ids=[100, 200])
    scored = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
    places = zip(scored.token_ids, scored.logprobs, strict=True)
    return {"texts": texts, "scored": [place[token].logprob for token, place in places]}


def serve(folder: Path) -> dict[str, Any]:
    """What two servers say to the same requests: ForeSpark's and vLLM's own DFlash2."""
    from forespark.demo.server import Server

    servers = {
        policy: Server(
            PAIR / "target",
            [*OPTIONS.split(), json.dumps(settings(policy, folder))],
            folder / f"{policy}.log",
        )
        for policy in ("joint", "stock")
    }
    heard = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
        # Both start at once: most of a start is imports.
        with servers["joint"], servers["stock"]:
            for policy, server in servers.items():
                server.wait_ready()
                heard[policy] = _ask(server.url, everything=policy == "joint")
    return heard


def _ask(url: str, everything: bool) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=300) as client, ThreadPoolExecutor(32) as pool:

        def post(body: dict[str, Any]) -> dict[str, Any]:
            answer = client.post("/v1/completions", json={"model": "model", **body})
            return {"status": answer.status_code, **answer.json()}

        # 28: refusals between requests that are being served.
        beside = [pool.submit(post, GREEDY) for _ in range(3)]
        said: dict[str, Any] = {name: post({**TEXT, **extra}) for name, extra in REFUSED.items()}
        said["beside"] = [one.result() for one in beside]
        for name, body in (("narrow", NARROW), ("nucleus", NUCLEUS)):
            said[name] = [post(body), post(body)]
        if everything:
            said["scored"] = post(SCORED)
            said["several"] = post({**NARROW, "n": 2})
            bodies = [{**OBJECT, "prompt": f"Item {i}.\n{SPACE}"} for i in range(30)]
            said["objects"] = list(pool.map(post, bodies))
            said["after"] = post(GREEDY)
            said["metrics"] = client.get("/metrics").text
    return said


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "http", lambda: serve(tmp_path_factory.mktemp("servers")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    job = "test_reports_http:target"
    return once(tmp_path_factory, "http-target", lambda: run_job(job))["runs"]


def text_of(answer: dict[str, Any]) -> str:
    """The only text of an answer."""
    assert answer["status"] == 200, answer
    (choice,) = answer["choices"]
    return str(choice["text"])


@pytest.mark.parametrize("name", ["narrow", "nucleus"])
def test_report_5_filters_reach_the_verifier(
    heard: dict[str, Any], alone: dict[str, Any], name: str
) -> None:
    """Catches top_k or top_p that the drafted tokens are not verified under."""
    with_drafts = [text_of(answer) for run in heard.values() for answer in run[name]]
    assert {*with_drafts, *alone["texts"][name]} == set(alone["texts"]["greedy"])
    assert len(with_drafts) == 4


def test_report_22_values_of_one_request_are_there_or_absent(heard: dict[str, Any]) -> None:
    """Catches per-request acceptance that leaves out the bonus token, or is made up for n > 1."""
    (answer, _) = heard["joint"]["narrow"]
    values = answer["metrics"]["speculative_decoding"]
    histogram = values["acceptance_histogram"]
    steps, accepted = sum(histogram), sum(count * j for j, count in enumerate(histogram))
    assert values["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    # The prompt's step emits a token of its own; the last step may emit more than is kept.
    assert 24 - 1 <= steps + accepted <= 24 - 1 + 7
    several = heard["joint"]["several"]
    assert several["status"] == 200 and len(several["choices"]) == 2
    assert not (several.get("metrics") or {}).get("speculative_decoding")


@pytest.mark.parametrize("name", list(REFUSED))
def test_report_28_refusals_are_vllms_own(heard: dict[str, Any], name: str) -> None:
    """Catches another status or message than vLLM's, or a refusal that harms other requests."""
    ours, stock = heard["joint"][name], heard["stock"][name]
    assert ours["status"] == stock["status"] == 400
    assert name in ours["error"]["message"] and ours["error"] == stock["error"]
    texts = {text_of(answer) for run in heard.values() for answer in run["beside"]}
    assert texts == {text_of(heard["joint"]["after"])}


def test_report_29_one_logprob_per_emitted_token(
    heard: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Catches logprob_token_ids that ends in a 500 or loses the entries of drafted tokens."""
    answer = heard["joint"]["scored"]
    text_of(answer)
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["usage"]["completion_tokens"] == len(logprobs["tokens"]) == 6
    assert logprobs["token_logprobs"] == pytest.approx(alone["scored"], abs=5e-3)


def test_report_30_json_objects_complete(heard: dict[str, Any]) -> None:
    """Catches an engine that dies when a draft breaks the grammar or outlives a preemption."""
    objects = heard["joint"]["objects"]
    assert [answer["status"] for answer in objects] == [200] * 30
    reasons = {answer["choices"][0]["finish_reason"] for answer in objects}
    assert reasons <= {"stop", "length"}
    text_of(heard["joint"]["after"])
    (line,) = [
        line
        for line in heard["joint"]["metrics"].splitlines()
        if line.startswith("vllm:num_preemptions_total")
    ]
    assert float(line.split()[-1]) > 0
