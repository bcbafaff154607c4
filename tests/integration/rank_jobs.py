"""One engine over several ranks, watched from inside each of them while the others disagree."""

from __future__ import annotations

import random
from typing import Any

from engines import engine


class RankProbe:
    """What one rank planned, drafted and kept, step by step."""

    def __init__(self, runner: Any) -> None:
        self.steps: list[list[Any]] = []
        self._runner = runner
        self._propose = runner.speculator.propose
        runner.speculator.propose = self

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        spec, before = self._runner.speculator, self._runner.speculator.planner.last
        tokens = self._propose(batch, *args, **kwargs)
        plan, verify = spec.planner.last, None if before is None else before.verify
        slots, count = batch.idx_mapping, batch.num_reqs
        self.steps.append(
            [
                list(batch.req_ids),
                [plan.drafted, plan.limits.tolist(), str(plan.decision.guard), plan.fixed_ms],
                [] if verify is None else [verify.plan.verify_budget, verify.chosen.predicted_ms],
                spec.draft_lens[:count].tolist(),
                tokens.tolist(),
                [spec.slot_scores[slots].tolist(), str(spec.slot_survival[slots].tolist())],
                [args[4].tolist(), args[5].tolist()],  # sampled, rejected
            ]
        )
        return tokens


def begin(worker: Any, disturbed: bool) -> None:
    """Watch this rank; every rank but the first also computes wrong numbers if `disturbed`."""
    from vllm.distributed.parallel_state import get_tp_group

    from forespark.scheduler import fixed_cost

    fixed_cost._LONGEST = float("inf")  # the clock teaches however slow this machine is
    runner = worker.model_runner
    if disturbed and get_tp_group().rank_in_group:
        _disturb(runner)
    worker.rank_probe = RankProbe(runner)


def take(worker: Any) -> list[list[Any]]:
    """The steps of this rank since `begin`."""
    steps: list[list[Any]] = worker.rank_probe.steps
    return steps


def disagree(worker: Any) -> str | None:
    """What a rank says that read another verify table than rank 0; None if it says nothing."""
    from vllm.distributed.parallel_state import get_tp_group

    from forespark.verifier.agreement import check_agreement

    group = get_tp_group()
    check_agreement(group, {"the settings": "1", "the verify latency table": "1"})
    try:
        check_agreement(
            group,
            {"the settings": "1", "the verify latency table": str(group.rank_in_group)},
        )
    except ValueError as error:
        return str(error)
    return None


def _disturb(runner: Any) -> None:
    """Noise on the logits, the scores and the survival; every drafted token is another one."""
    import torch

    speculator, model = runner.speculator, runner.model
    estimators, graphs = speculator.estimators, speculator.graphs
    logits_of, scores_of = model.compute_logits, estimators.scores
    survival_of, heads = estimators.post_survival, graphs.heads
    vocab = runner.vocab_size

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = logits_of(*args, **kwargs)
        return logits + 5 * torch.randn_like(logits)

    def scores(context: Any, anchors: Any, limits: Any, out: Any, **kwargs: Any) -> Any:
        result = scores_of(context, anchors, limits, out, **kwargs)
        out.mul_(torch.rand_like(out))
        return result

    def post_survival(*args: Any) -> Any:
        survival = survival_of(*args)
        return survival * torch.rand_like(survival)

    def wrong_heads(hidden: Any, drafted: int, num_reqs: int) -> None:
        heads(hidden, drafted, num_reqs)
        tokens = speculator.draft_tokens[:num_reqs]
        tokens.copy_((tokens + 1) % vocab)

    model.compute_logits, estimators.scores = compute_logits, scores
    estimators.post_survival, graphs.heads = post_survival, wrong_heads


def ranks(task: dict[str, Any]) -> dict[str, Any]:
    """Random arrivals, aborts, lengths, temperatures, opt-outs and preemption over all ranks."""
    from vllm import SamplingParams

    llm = engine(task, num_gpu_blocks_override=task["blocks"], max_model_len=160)
    lines = llm.collective_rpc(disagree)
    llm.collective_rpc(begin, args=(task["disturbed"],))
    core, rng = llm.llm_engine, random.Random(task["seed"])
    greedy: dict[str, int] = {}  # request -> its prompt
    texts: list[list[Any]] = []
    alive: set[str] = set()
    seen = {"requests": 0, "aborted": 0, "sampled": 0, "opted_out": 0, "steps": 0}
    while seen["steps"] < task["steps"] or alive:
        arriving = seen["steps"] < task["steps"]
        if arriving and len(alive) < 16 and rng.random() < 0.5:
            name, prompt = f"r{seen['requests']}", rng.randrange(len(task["prompts"]))
            opted_out, sampled = rng.random() < 0.1, rng.random() < 0.4
            params = SamplingParams(
                temperature=rng.choice([0.7, 1.0]) if sampled else 0.0,
                top_p=rng.choice([0.9, 1.0]) if sampled else 1.0,
                max_tokens=rng.randint(1, task["max_tokens"]),
                ignore_eos=True,
                extra_args={"forespark": {"enabled": False}} if opted_out else None,
            )
            core.add_request(name, task["prompts"][prompt], params)
            alive.add(name)
            seen["requests"] += 1
            seen["sampled"] += sampled
            seen["opted_out"] += opted_out
            if not sampled:
                greedy[name] = prompt
        if alive and rng.random() < 0.03:
            gone = rng.choice(sorted(alive))
            core.abort_request([gone])
            alive.discard(gone)
            seen["aborted"] += 1
        for output in core.step():
            if output.finished:
                alive.discard(output.request_id)
                if output.request_id in greedy:
                    ids = list(output.outputs[0].token_ids)
                    texts.append([greedy[output.request_id], ids])
        seen["steps"] += 1
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    by_rank = llm.collective_rpc(take)
    return {
        **seen,
        "lines": lines,
        "texts": texts,
        "preempted": counters["vllm:num_preemptions"],
        "accepted": counters["vllm:spec_decode_num_accepted_tokens"],
        **_compared(by_rank),
    }


def _compared(by_rank: list[list[list[Any]]]) -> dict[str, Any]:
    """Where ranks differ, and what rank 0 did in short."""
    first = by_rank[0]
    parts = ("requests", "plan", "re-plan", "lengths", "tokens", "scores", "kept")
    different = [
        f"step {index}: {part} of rank {rank}"
        for rank, steps in enumerate(by_rank)
        for index, (mine, theirs) in enumerate(zip(steps, first, strict=False))
        for part, ours, others in zip(parts, mine, theirs, strict=True)
        if ours != others
    ]
    return {
        "counts": [len(steps) for steps in by_rank],
        "different": different[:20],
        "D": [plan[0] for _, plan, *_ in first],
        "B": [replan[0] for _, _, replan, *_ in first if replan],
        "fixed_ms": [plan[3] for _, plan, *_ in first],
    }
