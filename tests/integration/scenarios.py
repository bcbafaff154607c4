"""What the engine processes of `serving.py` do: one function a scenario, JSON in and out."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import MARK, PAIR, PRICED


def _artifact(prices: dict[str, Any], tokens: int) -> str:
    from forespark.core import LatencyTable
    from forespark.scheduler.latency import save_artifact

    tables = [
        LatencyTable([s for s, _ in prices[n]], [m for _, m in prices[n]], 0, "made up")
        for n in ("draft", "verify")
    ]
    path = Path(tempfile.mkdtemp()) / "latency.json"
    identity = {
        "model": str(PAIR / "target"),
        "drafter": str(PAIR / "drafter"),
        "device": "cpu",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "num_speculative_tokens": tokens,
        "vllm": "0.32.0",
    }
    save_artifact(path, *tables, identity)
    return str(path)


def speculative(task: dict[str, Any]) -> dict[str, Any] | None:
    """The speculative config of a task."""
    if task["policy"] is None:
        return None
    tokens = task.get("tokens", 7)
    base = {"model": str(PAIR / "drafter"), "num_speculative_tokens": tokens}
    if task["policy"] == "stock":
        return {"method": "dflash", "draft_sample_method": "probabilistic", **base}
    latency = {}
    if task["policy"] in ("adaptive_verification", "single_curve", "joint"):
        latency = {"latency": {"artifact": _artifact(task.get("prices", PRICED), tokens)}}
    scheduler = {"policy": task["policy"], **task.get("scheduler", {})}
    return {"method": "forespark", "scheduler": scheduler, **latency, **base}


def engine(task: dict[str, Any], **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(PAIR / "target"),
        enforce_eager=True,
        dtype="float32",
        seed=task.get("engine_seed", 0),
        max_model_len=options.pop("max_model_len", 512),
        max_num_seqs=options.pop("max_num_seqs", 12),
        max_num_batched_tokens=options.pop("max_num_batched_tokens", 192),
        block_size=32,
        speculative_config=speculative(task),
        disable_log_stats=False,
        **options,
    )


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def greedy(task: dict[str, Any]) -> dict[str, Any]:
    """Token ids of every prompt alone and in mixed batches; what was drafted and verified."""
    from vllm import SamplingParams

    llm = engine(task, enable_prefix_caching=False)
    counts = _watch(runner_of(llm)) if task["policy"] not in (None, "off", "full", "stock") else {}
    lengths = [task["max_tokens"] - 3 * (i % 4) for i in range(len(task["prompts"]))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    alone = [
        list(llm.generate([p], s, use_tqdm=False)[0].outputs[0].token_ids)
        for p, s in list(zip(task["prompts"], params, strict=True))[: task["alone"]]
    ]
    # A prompt far over the step's token budget keeps prefill chunks beside the drafts.
    long = "x = [1, 2, 3]\n" * 30
    mixed_prompts = [p if i % 8 else long + p for i, p in enumerate(task["prompts"])]
    mixed = llm.generate(mixed_prompts, params, use_tqdm=False)
    return {
        "alone": alone,
        "mixed": [list(o.outputs[0].token_ids) for o in mixed],
        "speculates": runner_of(llm).speculator is not None,
        **counts,
    }


def _watch(runner: Any) -> dict[str, Any]:
    """Check every step's invariants; the returned dict keeps counting."""
    speculator, manager = runner.speculator, runner.adaptive_verification
    seen: dict[str, Any] = {"steps": 0, "broken": [], "D": [], "B": [], "lens": []}
    propose, reallocate = speculator.propose, manager.reallocate_drafts

    def checked_propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(batch, *args, **kwargs)
        record = speculator.planner.last
        lens = speculator.draft_lens[: batch.num_reqs].tolist()
        seen["steps"] += 1
        seen["D"].append(record.drafted)
        seen["lens"] += lens
        ends = runner.req_states.max_seq_len[batch.idx_mapping_np]
        totals = runner.req_states.total_len.gpu[batch.idx_mapping].tolist()
        if sum(lens) != record.drafted:
            seen["broken"].append(f"split {sum(lens)} != plan {record.drafted}")
        for d, end, total, row in zip(lens, ends, totals, tokens.tolist(), strict=True):
            if d and total + d + 1 > min(int(end), runner.max_model_len):
                seen["broken"].append(f"draft of {d} at length {total} ends at {end}")
            if any(t < 0 for t in row[:d]) or any(t != -1 for t in row[d:]):
                seen["broken"].append(f"draft of {d} wrote {row}")
        return tokens

    def checked_reallocate(req_ids: Any, idx_mapping: Any) -> Any:
        drafted = speculator.slot_draft_lens[idx_mapping].tolist()
        starts, locations, budget = reallocate(req_ids, idx_mapping)
        verified = (starts[1:] - starts[:-1] - 1).tolist()
        seen["B"].append(budget)
        if sum(verified) != budget or budget > sum(drafted):
            seen["broken"].append(f"B {budget}: verified {verified} of {drafted}")
        if any(v > d for v, d in zip(verified, drafted, strict=True)):
            seen["broken"].append(f"verified {verified} beyond drafted {drafted}")
        return starts, locations, budget

    speculator.propose, manager.reallocate_drafts = checked_propose, checked_reallocate
    return seen


def churn(task: dict[str, Any]) -> dict[str, Any]:
    """Random arrivals, aborts, lengths, temperatures, opt-outs, preemption; every step checked."""
    from vllm import SamplingParams

    llm = engine(task, num_gpu_blocks_override=40, max_model_len=160)
    runner = runner_of(llm)
    seen = _watch(runner)
    runner.speculator.reads_lengths = task["reads_lengths"]
    rng, core = random.Random(task["seed"]), llm.llm_engine
    opted_out, alive, number = set(), set(), 0
    propose = runner.speculator.propose

    def without_opt_outs(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(batch, *args, **kwargs)
        for req_id, d in zip(batch.req_ids, runner.speculator.draft_lens.tolist(), strict=False):
            if d and req_id.split("-")[0] in opted_out:
                seen["broken"].append(f"{req_id} opted out and got a draft of {d}")
        return tokens

    runner.speculator.propose = without_opt_outs
    while seen["steps"] < task["steps"]:
        if len(alive) < 16 and rng.random() < 0.5:
            name = f"r{number}"
            number += 1
            extra = {"forespark": {"enabled": False}} if rng.random() < 0.1 else None
            if extra:
                opted_out.add(name)
            params = SamplingParams(
                temperature=rng.choice([0.0, 0.0, 1.0]),
                max_tokens=rng.randint(1, 40),
                ignore_eos=True,
                extra_args=extra,
            )
            core.add_request(name, rng.choice(task["prompts"]) * rng.randint(1, 4), params)
            alive.add(name)
        if alive and rng.random() < 0.02:
            gone = rng.choice(sorted(alive))
            core.abort_request([gone])
            alive.discard(gone)
        alive -= {o.request_id for o in core.step() if o.finished}
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics()}
    return {**seen, "requests": number, "preempted": metrics.get("vllm:num_preemptions", 0)}


def sampled(task: dict[str, Any]) -> dict[str, Any]:
    """The first tokens of many identical requests at temperature 1."""
    from vllm import SamplingParams

    llm = engine(task, max_num_seqs=256, max_num_batched_tokens=4096)
    if task.get("biased"):
        _score_by_own_probability(runner_of(llm).speculator)
    budgets: dict[str, Any] = {}
    if task["policy"] in ("joint", "single_curve", "adaptive_verification"):
        budgets = _watch(runner_of(llm))
        _verify_half(runner_of(llm).speculator.planner)
    counts: dict[str, int] = {}
    emitted = 0
    left, batch = task["requests"], 4096
    while left > 0:
        size = min(batch, left)
        left -= size
        params = SamplingParams(
            temperature=1.0, max_tokens=task["max_tokens"], ignore_eos=True, n=size, seed=None
        )
        # `n` shares the prompt's tokens; every sample is a request of its own for the engine.
        output = llm.generate([task["prompt"]], params, use_tqdm=False)[0]
        for one in output.outputs:
            ids = list(one.token_ids)
            emitted += len(ids)
            key = " ".join(map(str, ids[:3]))
            counts[key] = counts.get(key, 0) + 1
    totals = {key: sum(budgets.get(key, [])) for key in ("D", "B")}
    return {"counts": counts, "emitted": emitted, **totals}


def _verify_half(planner: Any) -> None:
    """Full drafts and half of them verified in every step: the most that ranking can choose."""
    from dataclasses import replace

    from forespark.core import Plan

    policy = planner.policy

    class Half:
        name, plan_scores, replan_scores = policy.name, policy.plan_scores, policy.replan_scores

        def plan(self, inputs: Any) -> Any:
            decision, total = policy.plan(inputs), int(inputs.draft_limits.sum())
            return replace(decision, chosen=replace(decision.chosen, plan=Plan(total, total)))

        def replan(self, inputs: Any) -> Any:
            decision, budget = policy.replan(inputs), inputs.verify_cap // 2
            plan = Plan(inputs.draft_budget, budget)
            return replace(decision, chosen=replace(decision.chosen, plan=plan))

    planner.policy = Half()


def _score_by_own_probability(speculator: Any) -> None:
    """The estimator that must not be: it reads the token whose verification it decides."""
    import torch

    def own(hidden: Any, previous: Any, drafted: Any) -> Any:
        logits = torch.nn.functional.linear(hidden, speculator.model.lm_head.weight)
        chance = logits.float().softmax(-1).gather(1, drafted[:, None])[:, 0]
        return torch.logit(chance.clamp(1e-6, 1 - 1e-6))

    speculator.estimators.post_logits = own


def drafts(task: dict[str, Any]) -> dict[str, Any]:
    """Every greedy draft with the length of the context it was made at, and accepted counts."""
    from vllm import SamplingParams

    llm = engine(task, max_num_seqs=4)
    speculator = runner_of(llm).speculator
    log: list[Any] = []
    propose = speculator.propose

    def logged(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(batch, *args, **kwargs)
        num_sampled, slots = args[4].tolist(), batch.idx_mapping.tolist()
        totals = runner_of(llm).req_states.total_len.gpu[batch.idx_mapping].tolist()
        for name, n, total, row in zip(
            batch.req_ids, num_sampled, totals, tokens.tolist(), strict=True
        ):
            if n:
                log.append([name.split("-")[0], total, n, row])
        assert len(slots) == len(totals)
        return tokens

    speculator.propose = logged
    params = SamplingParams(temperature=0, max_tokens=task["max_tokens"], ignore_eos=True)
    llm.generate(task["prompts"], params, use_tqdm=False)
    return {"log": log}


SCENARIOS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "greedy": greedy,
    "churn": churn,
    "sampled": sampled,
    "drafts": drafts,
}

if __name__ == "__main__":
    import report_scenarios

    for name in ("text_options", "grammar", "refused", "broken_selector", "uniform_only"):
        SCENARIOS[name] = getattr(report_scenarios, name)
    given = json.loads(sys.stdin.read())
    print(MARK + json.dumps(SCENARIOS[given["scenario"]](given)))
