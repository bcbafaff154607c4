"""The host side of a step: limits, stale scores, the plan, and the re-plan of B.

Everything here is NumPy on numbers of the previous step; nothing waits for the GPU except for the
copy launched one step ago.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forespark.core import Decision, FloatArray, IntArray, StepInputs, VerifyInputs
from forespark.drafter.host_split import HostSplit
from forespark.drafter.requests import RequestLimits
from forespark.estimators.stale import CopyTicket, StaleScores
from forespark.scheduler.correction import SurvivalCorrection
from forespark.scheduler.fixed_cost import FixedCost
from forespark.scheduler.policies import JointPolicy, Policy, ScoreSource


@dataclass
class DraftRecord:
    """What was planned and launched in one step."""

    req_ids: list[str]
    slots: IntArray  # [n]
    limits: IntArray  # [n] longest draft of each request
    decision: Decision
    drafted: int  # D
    ticket: CopyTicket
    index: int  # running number of the draft
    launched_at: float = field(default_factory=time.perf_counter)
    fixed_ms: float = 0.0  # cost beyond the tables that its prices include
    verify: Decision | None = None  # how its verification was re-planned
    lens: IntArray | None = None  # [n] d_i where the host decides them; None: the device does
    exact_lens: dict[str, int] | None = None  # d_i, where the host has them anyway
    since_ms: float = 0.0  # from the draft before to this one, by this rank's clock
    follows: bool = False  # its verification only decoded requests of this draft: nothing waited
    steady: bool = False  # `since_ms` is one step's time: that step and the one before only decoded
    priced: tuple[int, float] | None = None  # (requests, ms) of that step, if it teaches its cost


class StepPlanner:
    """One per worker; all ranks of a tensor-parallel group compute the same plans."""

    def __init__(
        self,
        policy: Policy,
        limits: RequestLimits,
        max_num_reqs: int,
        num_speculative_tokens: int,
        prior_acceptance: float,
        min_draft_len: int,
        fixed_cost: FixedCost | None = None,
        clock_of_rank_0: bool = False,
        host_split: bool = False,
        correction: SurvivalCorrection | None = None,
    ) -> None:
        self.policy = policy
        self.fixed_cost = fixed_cost
        # Several ranks: steps teach what they cost when rank 0's time of them arrives.
        self.clock_of_rank_0 = clock_of_rank_0
        self.limits = limits
        self.min_draft_len = min_draft_len
        # The host split ranks by last step's g and S~, whatever the policy's budgets come from.
        self.host_split = HostSplit(max_num_reqs, min_draft_len) if host_split else None
        self._split_by = _split_sources(policy)
        sources = {policy.plan_scores, policy.replan_scores}
        self.stale = {
            source: StaleScores(max_num_reqs, num_speculative_tokens, prior_acceptance)
            for source in sources.union(self._split_by if host_split else ()) - {ScoreSource.NONE}
        }
        self._shape = (max_num_reqs, num_speculative_tokens)
        self.last: DraftRecord | None = None
        self._drafts = 0
        self._decoded = False  # the step before only decoded
        self._drafted: FloatArray | None = None  # survival of the last drafts, by slot
        self.correction = correction
        self._uncorrected: FloatArray | None = None  # the same before the correction

    def admit(self, slot: int, max_seq_len: int, enabled: bool) -> None:
        """A new or resumed request: it was never drafted and no estimate of it exists."""
        self.limits.add(slot, max_seq_len, enabled)
        for scores in self.stale.values():
            scores.mark_new(slot)
        if self.host_split is not None:
            self.host_split.forget(slot)

    def _scores(self, source: ScoreSource, slots: IntArray) -> FloatArray:
        if source is ScoreSource.NONE:
            return np.zeros((len(slots), self._shape[1]), dtype=np.float32)
        return self.stale[source].gather(slots)

    def publish(self, source: ScoreSource, scores: FloatArray, ticket: CopyTicket) -> None:
        """Scores [max_num_reqs, K] that arrived from the device, one step old."""
        if source in self.stale:
            self.stale[source].publish(scores, ticket)

    def corrected(
        self, record: DraftRecord, arrays: Mapping[str, FloatArray]
    ) -> Mapping[str, FloatArray]:
        """`arrays` (see `learn_selection`) with `scores` and `survival` as serving corrects them.

        What they say, and what became of the drafts before, is learned first.
        """
        if self.correction is None:
            return arrays
        survival, scores = arrays["survival"].copy(), arrays["scores"]
        if self._uncorrected is not None:
            self.correction.observe_verified(self._uncorrected[record.slots], *_outcome(arrays))
        self.correction.observe_drafted(scores[record.slots], survival[record.slots])
        self._uncorrected = survival
        return {
            **arrays,
            "scores": self.correction.scores(scores),
            "survival": self.correction.survival(survival),
        }

    def learn_selection(self, record: DraftRecord, arrays: Mapping[str, FloatArray]) -> None:
        """What the drafts of `record` look like after drafting, and what became of the last ones.

        `arrays` is the host copy of that step: `scores` and `survival` [max_num_reqs, K] by slot,
        `num_sampled` and `num_rejected` [n] of the verification before it.
        """
        selection = self.policy.selection if isinstance(self.policy, JointPolicy) else None
        if selection is None:
            return
        slots, survival = record.slots, arrays["survival"].copy()
        if self._drafted is not None:
            selection.observe_verified(self._drafted[slots], *_outcome(arrays))
        selection.observe(arrays["scores"][slots], survival[slots])
        self._drafted = survival

    def plan(
        self,
        req_ids: Sequence[str],
        slots: IntArray,
        num_computed: IntArray,
        num_scheduled: IntArray,
        num_drafts: IntArray,
        sampling: IntArray,
    ) -> DraftRecord:
        """Choose this step's D (and a first B) for the requests of the batch just verified."""
        limits = self.limits.update(slots, num_computed, num_scheduled, num_drafts, sampling)
        # A request that could not draft (an unfinished prompt) has no estimates to remember.
        estimated = np.asarray(slots)[limits > 0]
        num_emit = int(sampling.sum())
        unfinished_prefill = int(num_scheduled[~sampling].sum())
        inputs = StepInputs(
            scores=self._scores(self.policy.plan_scores, slots),
            draft_limits=limits,
            num_emit=max(num_emit, 1),
            num_non_draft_tokens=num_emit + unfinished_prefill,
            min_draft_len=self.min_draft_len,
            fixed_ms=self._fixed_ms(len(slots)),
        )
        decision = self.policy.plan(inputs)
        if decision.max_draft_len is not None:
            limits = np.minimum(limits, decision.max_draft_len).astype(np.int32)
        drafted = min(decision.plan.draft_budget, int(limits.sum()))
        ticket = next(iter(self.stale.values())).ticket(estimated) if self.stale else None
        if ticket is None:
            ticket = CopyTicket(estimated, np.zeros(len(estimated), dtype=np.int64))
        self._drafts += 1
        record = DraftRecord(
            list(req_ids),
            np.asarray(slots),
            limits,
            decision,
            drafted,
            ticket,
            self._drafts,
            fixed_ms=inputs.fixed_ms,
        )
        if self.host_split is not None:
            scores = self._scores(self._split_by[0], slots)
            record.lens = self.host_split.draft(slots, scores, limits, drafted)
            record.exact_lens = dict(zip(record.req_ids, record.lens.tolist(), strict=True))
        self._learn(self.last, record)
        self.last = record
        return record

    def _fixed_ms(self, num_reqs: int) -> float:
        return 0.0 if self.fixed_cost is None else self.fixed_cost.at(num_reqs)

    def _learn(self, before: DraftRecord | None, now: DraftRecord) -> None:
        """The step from one draft to the next, if it only decoded, against what it was priced."""
        decoded, self._decoded = self._decoded, False
        if before is None:
            return
        now.since_ms = (now.launched_at - before.launched_at) * 1e3
        self._decoded = before.follows
        # A host that runs ahead waits for the step before: its prefill would be counted here.
        now.steady = decoded and self._decoded
        if now.steady and self.fixed_cost is not None and before.verify is not None:
            verify = before.verify
            now.priced = (verify.num_reqs, verify.chosen.predicted_ms - before.fixed_ms)
            if not self.clock_of_rank_0:
                self.learn_cost(now, now.since_ms)

    def learn_cost(self, record: DraftRecord, measured_ms: float) -> None:
        """The step that ended with `record` took `measured_ms`."""
        if self.fixed_cost is not None and record.priced is not None:
            self.fixed_cost.observe(*record.priced, measured_ms)

    def present(self, scheduled: Mapping[str, int]) -> int:
        """Drafted tokens that are certainly still there, given the drafts scheduled per request.

        A request that finished, was aborted or got fewer drafts takes away what it may have held:
        d_i where the host has it, its limit otherwise.
        """
        record = self.last
        if record is None:
            return 0
        if record.exact_lens is not None:
            return sum(min(d, scheduled.get(r, 0)) for r, d in record.exact_lens.items())
        missing = sum(
            max(0, int(limit) - scheduled.get(req_id, 0))
            for req_id, limit in zip(record.req_ids, record.limits, strict=True)
        )
        return max(0, record.drafted - missing)

    def replan(
        self,
        req_ids: Sequence[str],
        slots: IntArray,
        scheduled_drafts: IntArray,  # [n]
        num_non_draft_tokens: int,  # N as it will run
        num_emit: int,
        max_budget: int,
    ) -> Decision:
        """B for the verification that is about to run, at its real N and what is left of D."""
        record = self.last
        scheduled = dict(zip(req_ids, (int(s) for s in scheduled_drafts), strict=True))
        cap = min(self.present(scheduled), int(sum(scheduled.values())), max_budget)
        if self.host_split is None:
            held = np.minimum(scheduled_drafts, self.limits.last(slots))
        else:
            held = self.host_split.held(slots, scheduled_drafts)
            cap = min(cap, int(held.sum()))
        decision = self.policy.replan(
            VerifyInputs(
                scores=self._scores(self.policy.replan_scores, slots),
                draft_limits=held.astype(np.int32),
                num_emit=max(num_emit, 1),
                num_non_draft_tokens=num_non_draft_tokens,
                draft_budget=0 if record is None else record.drafted,
                num_drafted_reqs=0 if record is None else len(record.req_ids),
                verify_cap=cap,
                min_draft_len=self.min_draft_len,
                fixed_ms=0.0 if record is None else record.fixed_ms,
            )
        )
        if record is not None:
            record.verify = decision
            # A prompt of one token looks like a decode, and the engine may have idled before it.
            record.follows = len(req_ids) == num_non_draft_tokens and (
                list(req_ids) == record.req_ids or set(req_ids) <= set(record.req_ids)
            )
        return decision

    def verify_lens(self, slots: IntArray, scheduled_drafts: IntArray, budget: int) -> IntArray:
        """b int32 [n] of the requests in `slots`, decided on the host; they sum to `budget`."""
        assert self.host_split is not None
        scores, survival = (self._scores(source, slots) for source in self._split_by)
        return self.host_split.verify(slots, survival, scores, scheduled_drafts, budget)


def _split_sources(policy: Policy) -> tuple[ScoreSource, ScoreSource]:
    """What ranks drafts and what ranks verification; nothing where the policy has no estimates."""
    if policy.plan_scores is ScoreSource.NONE:
        return ScoreSource.NONE, ScoreSource.NONE
    before = policy.plan_scores
    if before is ScoreSource.POST_DRAFT:
        before = ScoreSource.PRE_DRAFT
    return before, ScoreSource.POST_DRAFT


def _outcome(arrays: Mapping[str, FloatArray]) -> tuple[IntArray, IntArray]:
    """(verified, accepted) tokens [n] of the drafts before those in `arrays`."""
    # A request without verified drafts (new, or still in its prompt) rejected none.
    accepted = np.maximum(arrays["num_sampled"] - 1, 0)
    return accepted + arrays["num_rejected"] * (arrays["num_sampled"] > 0), accepted
