"""User reports on the real engine: each scenario runs with drafts and with the target alone."""

from __future__ import annotations

from typing import Any

from scenarios import engine, runner_of
from serving import prompts


def _ids(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def _accepted(llm: Any) -> float:
    return sum(
        float(m.value)
        for m in llm.get_metrics()
        if m.name == "vllm:spec_decode_num_accepted_tokens"
    )


def text_options(task: dict[str, Any]) -> dict[str, Any]:
    """Reports 1, 5, 25, 26, 27, 29, 34: options whose output must equal the target's."""
    from vllm import SamplingParams

    llm = engine(task, enable_prefix_caching=True)

    def greedy(**options: Any) -> Any:
        return SamplingParams(temperature=0, **options)

    def one(prompt: str, params: Any) -> list[int]:
        return _ids(llm.generate([prompt], params, use_tqdm=False)[0])

    some = prompts(4, seed=9)
    results: dict[str, Any] = {}
    # 1: the second run restores nearly the whole prompt from the prefix cache.
    long = "def walk(node):\n    return node.next\n\n" * 20
    for turn in ("first", "second"):
        before = _accepted(llm)
        results[f"report_1_{turn}"] = one(long, greedy(max_tokens=40, ignore_eos=True))
        results[f"accepted_{turn}"] = _accepted(llm) - before
    for turn in ("a", "b"):
        params = SamplingParams(temperature=1.0, top_k=1, seed=7, max_tokens=24, ignore_eos=True)
        results[f"report_5_{turn}"] = one(some[0], params)
    results["report_5_greedy"] = one(some[0], greedy(max_tokens=24, ignore_eos=True))
    results["report_25"] = one("What does `load` return?", greedy(min_tokens=5, max_tokens=40))
    results["report_26"] = one(
        some[1], greedy(repetition_penalty=1.3, max_tokens=64, ignore_eos=True)
    )
    words = [greedy(max_tokens=n, ignore_eos=True) for n in (5, 30, 30, 30)]
    words[2] = greedy(max_tokens=30, ignore_eos=True, bad_words=["self", "return", "data"])
    results["report_27"] = [_ids(o) for o in llm.generate(some, words, use_tqdm=False)]
    scored = llm.generate(
        [some[3]],
        greedy(max_tokens=6, ignore_eos=True, logprobs=2, logprob_token_ids=[100, 200]),
        use_tqdm=False,
    )[0].outputs[0]
    results["report_29"] = list(scored.token_ids)
    results["report_29_entries"] = len(scored.logprobs)
    shared = "x = [1, 2, 3]\n" * 30
    pair = [shared + "def mean(x):\n    ", shared + "class Mean:\n    "]
    params = greedy(max_tokens=32, ignore_eos=True)
    results["report_34_serial"] = [one(p, params) for p in pair]
    results["report_34_batch"] = [_ids(o) for o in llm.generate(pair * 4, params, use_tqdm=False)]
    return results


def grammar(task: dict[str, Any]) -> dict[str, Any]:
    """Reports 16 and 30: grammars beside prefill chunks, B = 0, and a small cache."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = engine(task, num_gpu_blocks_override=48, max_num_batched_tokens=184, max_model_len=256)
    speculator = runner_of(llm).speculator
    if task.get("verify_nothing"):
        _verify_nothing(speculator.planner)
    regex = StructuredOutputsParams(regex=r"[a-z]{3,8} = \[[0-9], [0-9]\]")
    rule = SamplingParams(temperature=0, max_tokens=24, structured_outputs=regex)
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    mixed = [*prompts(2, seed=11), "import os\n" * 60]
    both = llm.generate(mixed, [rule, rule, plain], use_tqdm=False)
    shape = StructuredOutputsParams(json_object=True)
    objects = SamplingParams(temperature=0, max_tokens=20, structured_outputs=shape)
    done = llm.generate(prompts(30, seed=12), objects, use_tqdm=False)
    return {
        "report_16": [_ids(o) for o in both],
        "report_30": [_ids(o) for o in done],
        "finished": sum(o.outputs[0].finish_reason in ("stop", "length") for o in done),
    }


def _verify_nothing(planner: Any) -> None:
    from dataclasses import replace

    from forespark.core import Plan

    replan = planner.policy.replan

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return getattr(policy, name)

        def replan(self, inputs: Any) -> Any:
            decision = replan(inputs)
            chosen = replace(decision.chosen, plan=Plan(inputs.draft_budget, 0))
            return replace(decision, chosen=chosen)

    policy, planner.policy = planner.policy, Nothing()


def refused(task: dict[str, Any]) -> dict[str, Any]:
    """Report 28: what vLLM says to sampling options that speculation does not take."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    llm = engine(task)
    said = {}
    for name, options in (("min_p", {"min_p": 0.1}), ("logit_bias", {"logit_bias": {5: 1.0}})):
        try:
            llm.generate(["def f(x):"], SamplingParams(max_tokens=4, **options), use_tqdm=False)
            said[name] = "served"
        except VLLMValidationError as error:
            said[name] = str(error)
    after = llm.generate(["def f(x):"], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return {"said": said, "after": _ids(after[0])}


def broken_selector(task: dict[str, Any]) -> dict[str, Any]:
    """Report 4: accepted tokens by position, with every predecessor swapped for the anchor."""
    from vllm import SamplingParams

    if task["swap"]:
        import forespark.drafter.speculator as module

        scores = module.packed_edge_scores
        module.packed_edge_scores = lambda s, c, u, h, anchors, steps: scores(
            s, c, u, h, anchors, steps * 0
        )
    llm = engine(task)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    llm.generate(prompts(24, seed=2), params, use_tqdm=False)
    counts: dict[str, dict[int, float]] = {"accepted": {}, "reached": {}}
    for metric in llm.get_metrics():
        for kind, places in counts.items():
            if metric.name.startswith(f"forespark:{kind}_tokens_by_position"):
                places[int(metric.labels["position"])] = float(metric.value)
    return {
        "conditional": [
            counts["accepted"][j] / max(counts["reached"][j], 1.0)
            for j in sorted(counts["reached"])
        ]
    }


def uniform_only(task: dict[str, Any]) -> dict[str, Any]:
    """Report 14: a target whose attention takes only equal verify widths."""
    from vllm import SamplingParams

    if task["policy"] is not None:
        import logging

        from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

        module.get_query_lens_mismatch_unsupported_backend = lambda *_, **__: "UNIFORM_ONLY"
        said: list[str] = []
        logging.getLogger("vllm.forespark").addFilter(
            lambda record: said.append(record.getMessage()) or True
        )
    llm = engine(task)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids = [_ids(o) for o in llm.generate(prompts(12, seed=4), params, use_tqdm=False)]
    lines = [] if task["policy"] is None else [line for line in said if "UNIFORM_ONLY" in line]
    return {"ids": ids, "warnings": lines, "accepted": _accepted(llm)}
