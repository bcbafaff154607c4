"""The plans of `joint.py` and `selective.py` by compiled loops: what serves.

The NumPy form is the specification: every decision here equals its decision bit for bit, and is
asked for where it decides differently in kind (floors, or nothing that may be drafted).
"""

from __future__ import annotations

import numpy as np

from forespark.core import (
    Candidate,
    Decision,
    FloatArray,
    IntArray,
    LatencyTable,
    Plan,
    StepInputs,
    VerifyInputs,
)
from forespark.scheduler import joint, selective
from forespark.scheduler.joint_loops import (
    FIELDS,
    pack_eligible,
    search_joint,
    search_verified,
)
from forespark.scheduler.pool import NOT_FINITE, check_pool
from forespark.scheduler.prices import Prices
from forespark.scheduler.selection import EDGES, SelectionModel
from forespark.scheduler.selective_loops import (
    count_bins,
    edges_in,
    search_selected,
    search_selective,
)

_EDGES: dict[np.dtype[np.floating], FloatArray] = {}  # between bins, by type of score


def plan_joint(
    inputs: StepInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    min_gain: float,
    policy: str = "joint",
) -> Decision:
    """As `joint.plan_joint`."""
    packed = None if inputs.min_draft_len > 0 or min_gain < 0 else _packed(inputs)
    if packed is None or not packed.size:
        return joint.plan_joint(inputs, draft, verify, min_gain, policy)
    packed.sort()
    prices = Prices.of_step(inputs, packed.size, draft, verify)
    out = np.empty((3, FIELDS))
    search_joint(
        packed, prices.draft_table, prices.verify_table, prices.verify_extra_ms,
        prices.num_emit, out,
    )  # fmt: skip
    return _decide(inputs, prices, out, min_gain, joint.flat_notes(draft, verify), policy)


def replan_verify(
    inputs: VerifyInputs, draft: LatencyTable, verify: LatencyTable, policy: str = "joint"
) -> Decision:
    """As `joint.replan_verify`."""
    if inputs.min_draft_len > 0:
        return joint.replan_verify(inputs, draft, verify, policy)
    packed = _packed(inputs)
    packed.sort()
    prices = Prices.of_verification(inputs, draft, verify)
    cap = max(0, min(inputs.verify_cap, inputs.draft_budget, packed.size))
    out = np.empty((2, FIELDS))
    search_verified(
        packed, inputs.draft_budget, cap, prices.draft_price(inputs.draft_budget),
        prices.verify_table, prices.verify_extra_ms, prices.num_emit, out,
    )  # fmt: skip
    found = tuple(_candidates(out, prices.num_emit))
    return joint.decide_verification(inputs, found, joint.flat_notes(draft, verify), policy)


def plan_selective(
    inputs: StepInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    min_gain: float,
    model: SelectionModel,
    policy: str = "joint",
) -> Decision:
    """As `selective.plan_selective`."""
    packed = None if inputs.min_draft_len > 0 else _packed(inputs)
    if packed is None or not packed.size:
        return selective.plan_selective(inputs, draft, verify, min_gain, model, policy)
    prices = Prices.of_step(inputs, packed.size, draft, verify)
    out = np.empty((3, FIELDS))
    search_selective(
        _counts(packed), prices.draft_table, prices.verify_table, prices.verify_extra_ms,
        prices.num_emit, model.share, model.value, selective.MOST_DRAFTS,
        selective.MOST_VERIFIED, out,
    )  # fmt: skip
    return _decide(inputs, prices, out, min_gain, joint.flat_notes(draft, verify), policy)


def replan_selective(
    inputs: VerifyInputs,
    draft: LatencyTable,
    verify: LatencyTable,
    model: SelectionModel,
    policy: str = "joint",
) -> Decision:
    """As `selective.replan_selective`."""
    if inputs.min_draft_len > 0:
        return selective.replan_selective(inputs, draft, verify, model, policy)
    packed = _packed(inputs)
    prices = Prices.of_verification(inputs, draft, verify)
    cap = max(0, min(inputs.verify_cap, inputs.draft_budget, packed.size))
    out = np.empty((2, FIELDS))
    search_selected(
        _counts(packed), inputs.draft_budget, cap, selective.MOST_VERIFIED,
        prices.draft_price(inputs.draft_budget), prices.verify_table, prices.verify_extra_ms,
        prices.num_emit, model.share, model.value, out,
    )  # fmt: skip
    found = tuple(_candidates(out, prices.num_emit))
    return joint.decide_verification(inputs, found, joint.flat_notes(draft, verify), policy)


def compile_all(num_speculative_tokens: int) -> None:
    """Run every loop once on scores as the planner holds them: no step waits for a compiler."""
    table = LatencyTable(np.array([1, 8]), np.array([1.0, 2.0]), 8)
    limits = np.full(2, num_speculative_tokens, dtype=np.int32)
    scores = np.full((2, num_speculative_tokens), 0.5, dtype=np.float32)
    step = StepInputs(scores, limits, 2, 2)
    again = VerifyInputs(scores, limits, 2, 2, 2, 2, 2)
    model = SelectionModel()
    plan_joint(step, table, table, 0.0)
    plan_selective(step, table, table, 0.0, model)
    replan_verify(again, table, table)
    replan_selective(again, table, table, model)


def _packed(inputs: StepInputs | VerifyInputs) -> FloatArray:
    """[M] eligible scores in row order, at least 0."""
    scores = np.asarray(inputs.scores)
    check_pool(scores, inputs.draft_limits)
    packed: FloatArray
    packed, sound = pack_eligible(scores, np.asarray(inputs.draft_limits))
    if not sound:
        raise ValueError(NOT_FINITE)
    return packed


def _counts(packed: FloatArray) -> IntArray:
    """int64 [bins]: scores by bin."""
    if packed.dtype not in _EDGES:
        _EDGES[packed.dtype] = edges_in(EDGES, packed.dtype)
    counts: IntArray = count_bins(packed, _EDGES[packed.dtype])
    return counts


def _decide(
    inputs: StepInputs,
    prices: Prices,
    out: FloatArray,
    min_gain: float,
    notes: tuple[str, ...],
    policy: str,
) -> Decision:
    *found, full = _candidates(out, prices.num_emit)
    none = prices.candidate(0, 0, 0.0)
    return joint.decide(inputs, tuple(found), none, full, min_gain, notes, policy)


def _candidates(out: FloatArray, num_emit: int) -> list[Candidate]:
    """The plans in the rows of `out` that hold one."""
    return [
        Candidate(Plan(int(drafted), int(verified)), num_emit + gain, draft_ms + ms, draft_ms)
        for drafted, verified, gain, draft_ms, ms in out.tolist()
        if drafted >= 0
    ]
