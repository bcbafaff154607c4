"""vLLM in a process of its own: answers to prompts, and vLLM's own acceptance figures.

    python -m forespark.training.engine generate REQUEST.pt REPLY.pt
    python -m forespark.training.engine measure  REQUEST.pt REPLY.pt

A separate process, because an engine keeps the GPU's memory until its process ends. This is the
only file under training/ that imports vLLM, and nothing imports this file.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_CHUNK_WAVES = 3  # prompts of one call, in multiples of the sequences run at a time
_MIN_CHUNK = 64
_WARM_UP_PROMPTS = 4


def generate(request: dict[str, Any]) -> list[list[int]]:
    """Answers in prompt order; stops before `seconds` (the engine's start included) run out."""
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    seats = request["max_num_seqs"]
    prompts, temperatures = request["prompts"], request["temperatures"]
    longest = max(map(len, prompts)) + request["max_tokens"]
    llm = LLM(
        request["model"],
        max_model_len=longest,
        max_num_seqs=seats,
        dtype="bfloat16",
        seed=request["seed"],
        **_memory_options(0.8),
    )
    print(f"engine: ready after {time.monotonic() - started:.0f} s", flush=True)
    answers: list[list[int]] = []
    slowest = 0.0  # seconds a prompt, of the chunks so far
    while len(answers) < len(prompts):
        count = min(seats * _CHUNK_WAVES, len(prompts) - len(answers))
        if request["seconds"] is not None and slowest:
            left = request["seconds"] - (time.monotonic() - started)
            count = min(count, int(left / slowest))
            if count < min(_MIN_CHUNK, len(prompts) - len(answers)):
                print(f"engine: time is up after {len(answers)} prompts", flush=True)
                break
        chunk = slice(len(answers), len(answers) + count)
        begun = time.monotonic()
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts[chunk]],
            [
                SamplingParams(temperature=t, max_tokens=request["max_tokens"], detokenize=False)
                for t in temperatures[chunk]
            ],
            use_tqdm=False,
        )
        answers += [list(o.outputs[0].token_ids) for o in outputs]
        took = time.monotonic() - begun
        slowest = max(slowest, took / count)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        print(
            f"engine: {len(answers)}/{len(prompts)} prompts, {tokens / took:.0f} tokens/s",
            flush=True,
        )
    return answers


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Greedy run with (or without) a drafter: tokens, seconds, vLLM's speculation counters."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    from vllm import LLM, SamplingParams

    drafter = request["drafter"]
    speculative = None
    if drafter is not None:
        speculative = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": request["num_speculative_tokens"],
        }
    prompts = [{"prompt_token_ids": p} for p in request["prompts"]]
    longest = max(map(len, request["prompts"])) + request["max_tokens"]
    llm = LLM(
        request["model"],
        max_model_len=longest + request["num_speculative_tokens"] + 1,
        max_num_seqs=request["max_num_seqs"],
        dtype="bfloat16",
        enforce_eager=True,
        speculative_config=speculative,
        disable_log_stats=False,
        seed=0,
        **_memory_options(0.5),
    )
    llm.generate(
        prompts[:_WARM_UP_PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=8, detokenize=False),
        use_tqdm=False,
    )
    before, begun = _counters(llm), time.monotonic()
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], detokenize=False),
        use_tqdm=False,
    )
    seconds = time.monotonic() - begun
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    after = _counters(llm)
    result: dict[str, Any] = {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": sum(map(len, tokens)) / seconds,
    }
    if speculative is not None:
        gained = {key: _difference(after[key], before.get(key)) for key in after}
        drafts = gained["spec_decode_num_drafts"]
        per_position = gained["spec_decode_num_accepted_tokens_per_pos"]
        result["drafts"] = drafts
        result["acceptance_length"] = 1 + gained["spec_decode_num_accepted_tokens"] / max(1, drafts)
        result["survival"] = [count / max(1, drafts) for count in per_position]
    return result


def _memory_options(share: float) -> dict[str, Any]:
    return {"gpu_memory_utilization": share} if torch.cuda.is_available() else {}


def _counters(llm: Any) -> dict[str, Any]:
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            value = getattr(metric, "value", None)
            found[metric.name.split(":")[1]] = metric.values if value is None else value
    return found


def _difference(after: Any, before: Any) -> Any:
    if isinstance(after, list | tuple):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - (before or 0)


def main(arguments: list[str]) -> None:
    """Read the request file, run one job, write the reply file under a temporary name first."""
    job, request_file, reply_file = arguments
    request = torch.load(request_file, weights_only=True)
    reply = {"generate": generate, "measure": measure}[job](request)
    torch.save(reply, f"{reply_file}.tmp")
    os.replace(f"{reply_file}.tmp", reply_file)


if __name__ == "__main__":
    main(sys.argv[1:])
