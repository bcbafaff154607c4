"""What an engine process does: one function a job, JSON in and JSON out (see `harness.py`)."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import hybrid_pair
import rank_jobs
import small_pair
from draft_capture import DraftCapture
from engines import engine, runner_of
from harness import MARK, PACKED, K
from probes import DraftLog, StepProbe


def _greedy(tokens: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **options)


def lossless(task: dict[str, Any]) -> dict[str, Any]:
    """Every prompt one at a time, then in batches of 12; with the drafts and the lengths seen."""
    llm = engine(task, enable_prefix_caching=False)
    runner, prompts, tokens = runner_of(llm), task["prompts"], task["max_tokens"]
    probe = StepProbe(runner) if task["policy"] in PACKED else None
    log = DraftLog(runner) if runner.speculator is not None else None
    # The target also says how close its second choice was, to tell ties from faults.
    options = {"logprobs": 2} if task["policy"] is None else {}
    alone, runners_up, steps_alone = [], [], []
    steps = _count_steps(runner)
    for prompt in prompts[: task["alone"]]:
        output = llm.generate([prompt], _greedy(tokens, **options), use_tqdm=False)[0].outputs[0]
        alone.append(list(output.token_ids))
        steps_alone.append(steps["count"])
        runners_up.append(
            [[[t, p.logprob] for t, p in place.items()] for place in output.logprobs or []]
        )
    mixed = _staggered(llm.llm_engine, prompts, task["lengths"])
    result = {"alone": alone, "mixed": mixed, "top": runners_up, **_drafter_parts(runner)}
    result |= {"steps_alone": steps_alone, "counters": _spec_counters(llm)}
    if log is not None:
        result |= {"log": log.rows, "beside_chunks": log.beside_chunks}
    if probe is not None:
        result |= {"broken": probe.broken, "D": probe.budgets, "B": probe.verified}
        result |= {"lengths": probe.lengths, "uneven": probe.uneven}
    return result


def _staggered(core: Any, prompts: list[str], lengths: list[int]) -> list[list[int]]:
    """Token ids of all prompts, 12 at a time, a new one at every second step at most."""
    texts: list[list[int]] = [[] for _ in prompts]
    started, alive, steps = 0, 0, 0
    while started < len(prompts) or alive:
        if started < len(prompts) and alive < 12 and steps % 2 == 0:
            core.add_request(f"m{started}", prompts[started], _greedy(lengths[started]))
            started, alive = started + 1, alive + 1
        for output in core.step():
            if output.finished:
                texts[int(output.request_id[1:])] = list(output.outputs[0].token_ids)
                alive -= 1
        steps += 1
    return texts


def _plan_on_the_host() -> None:
    """From now on every attention backend says what FlashInfer says: it reads lengths on the host.

    A backend that says so for itself keeps its own answer.
    """
    from vllm.v1.attention.backend import AttentionBackend

    AttentionBackend.supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)


def _count_steps(runner: Any) -> dict[str, int]:
    """Counts the worker's steps from now on."""
    seen, prepare = {"count": 0}, runner.prepare_inputs

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen["count"] += 1
        return prepare(*args, **kwargs)

    runner.prepare_inputs = counted
    return seen


def _spec_counters(llm: Any) -> dict[str, Any]:
    """vLLM's own speculative counters."""
    values = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in llm.get_metrics()}
    return {name: value for name, value in values.items() if name.startswith("vllm:spec_decode")}


def _drafter_parts(runner: Any) -> dict[str, Any]:
    """What of a drafter this process holds: its object, its modules, its layers' KV cache."""
    from torch import nn

    gc.unfreeze()  # vLLM hides what it created from the collector
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    drafter = [m for m in modules if "dflash" in type(m).__module__]
    return {
        "speculator": runner.speculator is not None,
        "drafter_modules": len(drafter),
        "drafter_parameters": sum(p.numel() for m in drafter for p in m.parameters()),
        "kv_layers": sum(len(g.layer_names) for g in runner.kv_cache_config.kv_cache_groups),
    }


def churn(task: dict[str, Any]) -> dict[str, Any]:
    """Random arrivals, aborts, lengths, temperatures, opt-outs and preemption, step by step."""
    from vllm import SamplingParams

    if task.get("plans_on_host", False):
        _plan_on_the_host()
    llm = engine(
        task,
        num_gpu_blocks_override=task["blocks"],
        max_model_len=160,
    )
    runner, core, rng = runner_of(llm), llm.llm_engine, random.Random(task["seed"])
    probe, log = StepProbe(runner), DraftLog(runner)
    runner.speculator.reads_lengths = task["reads_lengths"]
    alive: set[str] = set()
    seen = {"requests": 0, "aborted": 0, "sampled": 0, "finished": 0, "at_model_len": 0}
    while len(probe.budgets) < task["steps"]:
        if len(alive) < 16 and rng.random() < 0.5:
            name = f"r{seen['requests']}"
            extra = {"forespark": {"enabled": False}} if rng.random() < 0.1 else None
            temperature = rng.choice([0.0, 0.0, 1.0])
            tokens = rng.randint(1, 40)
            # Some prompts leave less than their max_tokens before max_model_len.
            prompt = rng.choice(task["prompts"]) * rng.randint(1, 4)
            ids = llm.get_tokenizer()(prompt).input_ids[: 159 - 20 * (rng.random() < 0.8)]
            params = SamplingParams(
                temperature=temperature, max_tokens=tokens, ignore_eos=True, extra_args=extra
            )
            if extra:
                probe.opted_out.add(name)
            core.add_request(name, {"prompt_token_ids": ids}, params)
            alive.add(name)
            seen["requests"] += 1
            seen["sampled"] += temperature > 0
            seen["at_model_len"] += len(ids) + tokens > 160
        if alive and rng.random() < 0.03:
            gone = rng.choice(sorted(alive))
            core.abort_request([gone])
            alive.discard(gone)
            seen["aborted"] += 1
        finished = {output.request_id for output in core.step() if output.finished}
        seen["finished"] += len(finished)
        alive -= finished
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return {
        **seen,
        "broken": probe.broken,
        "D": probe.budgets,
        "B": probe.verified,
        "lengths": probe.lengths,
        "uneven": probe.uneven,
        "opted_out": len(probe.opted_out),
        "refused": probe.refused,
        "preempted": counters["vllm:num_preemptions"],
        "beside_chunks": log.beside_chunks,
    }


def parity(task: dict[str, Any]) -> dict[str, Any]:
    """Drafts of constant length d = 1..K: of one packed engine, and of a stock engine for each of
    `lengths`."""
    from forespark.scheduler.policies import make_policy

    first = {"policy": "batchwise", "scheduler": {"batchwise_schedule": [[512, K]]}}
    llm = engine({**task, **first}, max_num_seqs=8)
    log, capture = DraftLog(runner_of(llm)), DraftCapture(runner_of(llm), every=5)
    packed, stock, captured = {}, {}, []
    for length in range(1, K + 1):
        policy = make_policy("batchwise", schedule=[[512, length]])
        runner_of(llm).speculator.planner.policy = policy
        packed[length] = _drafts_of(llm, log, task)
        captured += _with_text(capture, packed[length])
    for length in task["lengths"]:
        del llm
        gc.collect()
        llm = engine({**task, "policy": "stock", "tokens": length}, max_num_seqs=8)
        stock[length] = _drafts_of(llm, DraftLog(runner_of(llm)), task)
    return {"packed": packed, "stock": stock, "captured": captured}


def _with_text(capture: DraftCapture, run: dict[str, Any]) -> list[dict[str, Any]]:
    """The kept drafts of a run, each with all tokens up to its anchor as `ids`."""
    rows = []
    for row in capture.rows:
        text = run["sequences"][run["names"][row["request"]]]
        rows.append({**row, "ids": text[: row["total"]]})
    capture.rows.clear()
    return rows


def _drafts_of(llm: Any, log: DraftLog, task: dict[str, Any]) -> dict[str, Any]:
    """Drafts by prompt, in order, and the text."""
    log.rows.clear()
    outputs = llm.generate(task["prompts"], _greedy(task["max_tokens"]), use_tqdm=False)
    names = {output.request_id: str(index) for index, output in enumerate(outputs)}
    drafts: dict[str, list[Any]] = {index: [] for index in names.values()}
    for name, *rest in log.rows:
        drafts[names[name]].append(rest)
    texts = [list(o.outputs[0].token_ids) for o in outputs]
    prompts = [list(o.prompt_token_ids) for o in outputs]
    sequences = {str(i): p + t for i, (p, t) in enumerate(zip(prompts, texts, strict=True))}
    return {"drafts": drafts, "texts": texts, "names": names, "sequences": sequences}


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lossless": lossless,
    "churn": churn,
    "parity": parity,
    "ranks": rank_jobs.ranks,
    "hybrid": hybrid_pair.greedy,
    "transitions": small_pair.transitions,
}

if __name__ == "__main__":
    print(MARK + json.dumps(JOBS[sys.argv[1]](json.loads(sys.stdin.read()))))
