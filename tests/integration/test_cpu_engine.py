"""The real engine on a CPU: DFlash2 and adaptive verification against the target alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forespark.cpu_mode import is_cpu_platform

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_cpu_platform(), reason="needs the CPU build of vLLM"),
]

PAIR = Path(__file__).parents[1] / "assets" / "tiny-pair"
PROMPTS = [
    "def foo(x):",
    "import os",
    "class A:\n    def b(self):",
    "for i in range(10):",
    "x = [1, 2, 3]",
    "return None",
    "try:\n    pass",
    "print('hello')",
]

# One engine a process: argv is a JSON job, the last line printed is the JSON answer.
CHILD = """
import json, sys
from pathlib import Path
import forespark.cpu_mode as cpu_mode
from forespark.cpu_mode import worker_patches

job = json.loads(sys.argv[1])
if job.get("without"):
    every = worker_patches.worker_patches
    worker_patches.worker_patches = lambda: [p for p in every() if p.attribute != job["without"]]
assert cpu_mode.enable()
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

def params(fields):
    fields = dict(fields)
    if "regex" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(regex=fields.pop("regex"))
    fields.pop("prompts", None)
    return SamplingParams(max_tokens=job.get("tokens", 48), **fields)

llm = LLM(job["target"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
          speculative_config=job.get("spec"), disable_log_stats=False, seed=0, **job.get("llm", {}))
texts = [[list(o.outputs[0].token_ids) for o in llm.generate(
         p.get("prompts", job["prompts"]), params(p), use_tqdm=False)] for p in job["params"]]
counts = {m.name: m.value for m in llm.get_metrics()
          if "spec_decode" in m.name and isinstance(getattr(m, "value", None), int)}
print(json.dumps({"texts": texts, "counts": counts}))
"""


def generate(mode: str, params: list[dict], **job) -> dict:
    """Token ids [params][prompts] of one engine, and its speculative counters."""
    spec = None
    if mode != "alone":
        spec = {
            "method": "dflash",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": 7,
            "enable_adaptive_verification": mode == "adaptive",
            "draft_sample_method": job.pop("draft_sample_method", "greedy"),
        }
    job = {
        "target": str(PAIR / "target"),
        "prompts": PROMPTS,
        "params": params,
        "spec": spec,
        **job,
    }
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_PLUGINS": "",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def accepted_per_draft(counts: dict) -> float:
    drafts = counts["vllm:spec_decode_num_drafts"]
    return counts["vllm:spec_decode_num_accepted_tokens"] / drafts


# Deterministic parameters only: every one has to give the same tokens with and without drafts.
GREEDY = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"temperature": 0.0, "ignore_eos": True, "bad_words": ["return"], "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 20, "prompt_logprobs": 2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "regex": "[a-z]{4,9} = [0-9]{1,20}\\n"},
    {"temperature": 0.0, "logprob_token_ids": [5, 9], "allowed_token_ids": list(range(3, 900))},
]


@pytest.fixture(scope="module")
def alone() -> dict:
    return generate("alone", GREEDY)


@pytest.mark.parametrize("mode", ["full", "adaptive"])
def test_greedy_text_equals_the_target_alone(alone, mode):
    """Catches any kernel that changes what the target says, under every deterministic option."""
    speculative = generate(mode, GREEDY)
    assert speculative["texts"] == alone["texts"]
    assert accepted_per_draft(speculative["counts"]) > 0.3


def test_chunked_prefill_prefix_caching_and_preemption_keep_the_text(alone):
    """Catches chunks, cached prefixes and resumed requests that read or write the wrong rows."""
    options = {"max_num_batched_tokens": 192, "block_size": 32, "num_gpu_blocks_override": 20}
    longer = [(prompt + "\n") * 6 for prompt in PROMPTS]
    job = {"prompts": longer, "tokens": 40}
    expected = generate("alone", GREEDY[:1], **job)
    twice = generate("full", GREEDY[:1] * 2, llm=options, **job)
    assert twice["texts"] == expected["texts"] * 2
    assert generate("adaptive", GREEDY[:1], llm=options, **job)["texts"] == expected["texts"]


def test_sampling_is_reproducible_per_seed_and_position():
    """Catches draws that depend on the batch, and options that fail at temperature > 0."""
    seeded = {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 40, "ignore_eos": True}
    # vLLM refuses min_p and logit_bias together with drafts.
    biased = {"temperature": 0.7, "seed": 12, "min_p": 0.05, "ignore_eos": True}
    one = {"prompts": PROMPTS[2:3]}
    whole, single, whole_biased, single_biased = generate(
        "alone", [seeded, seeded | one, biased, biased | one]
    )["texts"]
    assert whole[2] == single[0] and whole_biased[2] == single_biased[0]
    for method in ("greedy", "probabilistic"):
        drafted = generate("adaptive", [seeded], draft_sample_method=method)["texts"]
        assert all(len(tokens) == 48 for tokens in drafted[0])


def test_each_draft_layer_uses_its_own_key_norm():
    """Catches the silent fault that normalises every draft layer with layer 0's weight."""
    params = GREEDY[:1]
    fixed = generate("full", params)["counts"]
    faulty = generate("full", params, without="_normalize_context_k")["counts"]
    assert accepted_per_draft(fixed) > accepted_per_draft(faulty)
