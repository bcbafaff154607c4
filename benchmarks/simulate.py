"""Any policy on recorded drafts and a latency table: what it would do at loads nobody can run here.

The policies, the split and the prices are the ones that serve; only the acceptance comes from a
record (`forespark calibrate collect`) and the time from the tables. Requests walk through recorded
answers from random places; a finished one is replaced at once. Like the server, the host plans with
the scores of the step before, and the split uses the current ones.

Left out: prefill, and the change of attention's cost with the context.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forespark.calibration.traces import DraftTrace

from forespark.core import FloatArray, IntArray, LatencyTable, StepInputs, VerifyInputs
from forespark.estimators.pre_draft import single_curve, survival
from forespark.scheduler.correction import SurvivalCorrection
from forespark.scheduler.envelope import envelope_scores
from forespark.scheduler.policies import Policy, ScoreSource, make_policy
from forespark.scheduler.reward import reward
from forespark.scheduler.selection import SelectionModel
from forespark.scheduler.split import rank_split


@dataclass(frozen=True)
class Outcome:
    """Means over the simulated steps."""

    policy: str
    load: int
    output_throughput: float  # tokens/s
    drafted: float  # tokens a step
    verified: float
    emitted: float
    predicted_tokens: float
    step_ms: float


class Answers:
    """A trace as the simulator walks it: positions, scores and post-draft survival."""

    def __init__(self, trace: DraftTrace) -> None:
        self.trace = trace
        self.most = trace.num_speculative_tokens
        curves = survival(torch.from_numpy(trace.pre_logits), self.most)
        self.scores = {
            ScoreSource.PRE_DRAFT: envelope_scores(reward(curves)).numpy(),
            ScoreSource.SINGLE_CURVE: envelope_scores(reward(single_curve(curves))).numpy(),
        }
        last = np.zeros(int(trace.document.max()) + 1, dtype=np.int64)
        np.maximum.at(last, trace.document, trace.offset)
        step = np.diff(trace.offset)[np.diff(trace.document) == 0]
        if (step != 1).any():
            raise ValueError("trace: positions are missing; collect it with --stride 1")
        self.left = last[trace.document] - trace.offset  # positions behind each
        self.starts = np.flatnonzero(self.left > 0)
        if not self.starts.size:
            raise ValueError("trace: every answer has a single position; record longer ones")

    def post_survival(self, context: IntArray, lengths: IntArray) -> FloatArray:
        """S~ f32 [n, K] of drafts of these lengths; -inf beyond them."""
        position = np.arange(self.most)
        drafted = position < lengths[:, None]
        row = (lengths.astype(np.int64) * (lengths - 1) // 2)[:, None]
        logits = self.trace.post_logits[context[:, None], np.where(drafted, row + position, 0)]
        survived = np.cumprod(1 / (1 + np.exp(-logits)), axis=1)
        result: FloatArray = np.where(drafted, survived, np.float32(-np.inf))
        return result


def simulate(
    answers: Answers,
    policy: Policy,
    draft: LatencyTable,
    verify: LatencyTable,
    load: int,
    *,
    steps: int = 200,
    warm_up: int = 20,
    fixed_ms: float = 0.0,
    seed: int = 0,
    correction: SurvivalCorrection | None = None,
) -> Outcome:
    """`steps` steps of `load` requests behind `warm_up` others. ValueError for a load below 1.

    `correction` goes on learning from call to call, as `policy.selection` does.
    """
    if load < 1:
        raise ValueError(f"load: must be >= 1, got {load}")
    random = np.random.default_rng(seed)
    context = random.choice(answers.starts, load)
    limits = np.full(load, answers.most, dtype=np.int32)
    stale: dict[ScoreSource, FloatArray] = {}
    sums = np.zeros(6)  # drafted, verified, emitted, predicted tokens, ms, steps
    for step in range(warm_up + steps):
        nothing = np.zeros((load, answers.most), dtype=np.float32)
        inputs = StepInputs(
            stale.get(policy.plan_scores, nothing), limits, load, load, fixed_ms=fixed_ms
        )
        decision = policy.plan(inputs)
        lengths = _split(answers, policy, decision, context, limits)
        drafted = int(lengths.sum())
        survived = answers.post_survival(context, lengths)
        selection = getattr(policy, "selection", None)
        again = policy.replan(
            VerifyInputs(
                stale.get(policy.replan_scores, nothing),
                limits,
                num_emit=load,
                num_non_draft_tokens=load,
                draft_budget=drafted,
                num_drafted_reqs=load,
                verify_cap=drafted,
                fixed_ms=fixed_ms,
            )
        )
        verified = rank_split(survived, lengths, again.plan.verify_budget)
        won = np.minimum(answers.trace.accepted[context, lengths], verified).astype(np.int64)
        ms = float(verify.at(load + int(verified.sum()))) + fixed_ms
        if drafted:
            ms += float(draft.at(drafted + load))
        if step >= warm_up:
            emitted = load + int(won.sum())
            predicted = again.chosen.predicted_tokens
            sums += (drafted, int(verified.sum()), emitted, predicted, ms, 1)
        expected = {source: scores[context] for source, scores in answers.scores.items()}
        if correction is not None:
            correction.observe_verified(survived, verified, won)
            if policy.plan_scores in expected:
                correction.observe_drafted(expected[policy.plan_scores], survived)
            survived = correction.survival(survived)
            expected = {source: correction.scores(g) for source, g in expected.items()}
        stale = {**expected, ScoreSource.POST_DRAFT: survived}
        if selection is not None:
            selection.observe_verified(survived, verified, won)
            selection.observe(stale[policy.plan_scores], survived)
        context = _advance(answers, context, won + 1, random)
    means = (sums / sums[-1]).tolist()
    return Outcome(policy.name, load, 1e3 * means[2] / means[4], *means[:3], means[3], means[4])


def _split(
    answers: Answers, policy: Policy, decision: Any, context: IntArray, limits: IntArray
) -> IntArray:
    """Every request's draft length: the device's ranking of the current scores."""
    if decision.max_draft_len is not None:
        limits = np.minimum(limits, decision.max_draft_len).astype(np.int32)
    budget = min(decision.plan.draft_budget, int(limits.sum()))
    source = policy.plan_scores
    scores = answers.scores.get(source, answers.scores[ScoreSource.PRE_DRAFT])[context]
    return rank_split(scores, limits, budget)


def _advance(
    answers: Answers, context: IntArray, emitted: IntArray, random: np.random.Generator
) -> IntArray:
    """Where every request stands next; one at the end of its answer is replaced."""
    ends = answers.left[context] < emitted
    moved = np.where(ends, 0, context + emitted)
    moved[ends] = random.choice(answers.starts, int(ends.sum()))
    return moved


def read_tables(file: Path) -> tuple[LatencyTable, LatencyTable]:
    """(T_draft, T_verify) of a latency artifact, whatever machine it is from."""
    record = json.loads(file.read_text(encoding="utf-8"))
    tables = [
        LatencyTable(r["sizes"], r["ms"], r["captured_limit"], source=str(file))
        for r in (record["draft"], record["verify"])
    ]
    return tables[0], tables[1]


def policy_named(name: str, draft: LatencyTable, verify: LatencyTable, min_gain: float) -> Policy:
    """`joint`, `full`, ...; `batchwise:4` drafts 4 tokens for everyone, `joint:plain` is the
    paper's rule, which does not count on the post-draft ranking."""
    kind, _, length = name.partition(":")
    schedule = [(1 << 20, int(length))] if kind == "batchwise" else None
    selection = None if length == "plain" else SelectionModel()
    return make_policy(kind, draft, verify, min_gain, schedule, selection)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="of calibrate collect")
    parser.add_argument("--latency", type=Path, required=True, help="latency artifact")
    parser.add_argument("--policies", type=lambda s: s.split(","), default=["off", "full", "joint"])
    parser.add_argument("--loads", type=lambda s: [int(n) for n in s.split(",")], default=[1, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fixed-ms", type=float, default=0.0, help="a step's cost off the tables")
    parser.add_argument("--min-gain", type=float, default=0.02)
    parser.add_argument("--correction", choices=["none", "learned"], default="none")
    parser.add_argument("--then", type=Path, help="trace that follows without a break: a shift")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    traces = [args.trace] if args.then is None else [args.trace, args.then]
    walks = [Answers(DraftTrace.load(trace)) for trace in traces]
    draft, verify = read_tables(args.latency)
    outcomes = []
    for load, name in itertools.product(args.loads, args.policies):
        policy = policy_named(name, draft, verify, args.min_gain)
        correction = SurvivalCorrection(walks[0].most) if args.correction == "learned" else None
        steps = max(args.steps, 2000 // load)
        for number, answers in enumerate(walks):
            found = simulate(
                answers, policy, draft, verify, load, steps=steps, fixed_ms=args.fixed_ms,
                warm_up=0 if number else 20, correction=correction,
            )  # fmt: skip
            outcomes.append(asdict(found) | {"policy": name, "trace": traces[number].name})
            print(
                f"{name:>22} load {load:5d}: {found.output_throughput:9.1f} tokens/s  "
                f"drafted {found.drafted:7.1f}  verified {found.verified:7.1f}  "
                f"emitted {found.emitted:7.1f} (plan {found.predicted_tokens:7.1f})  "
                f"{found.step_ms:6.2f} ms"
            )
    if args.out is not None:
        args.out.write_text(json.dumps(outcomes, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
