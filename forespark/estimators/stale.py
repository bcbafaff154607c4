"""Last step's scores on the host, by request slot: what the host plans with (section 5).

The host never waits for the GPU, so it plans a step with the scores of the step before, copied
asynchronously. A request admitted since has no row: it takes the mean of the batch's other
requests, and when nobody has a row yet, a geometric prior.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forespark.core import FloatArray, IntArray


@dataclass(frozen=True)
class CopyTicket:
    """Which slots an asynchronous copy covers, and who owned them when it was launched."""

    slots: IntArray  # [n] request slots
    owners: IntArray  # [n] admission count of each slot


class StaleScores:
    """Scores f32 [max_num_reqs, K] of the previous step, slot by slot.

    `prior_acceptance` p (0 < p <= 1) is the conditional acceptance assumed before anything was
    measured: the prior score of position j (1..K) is p ** j.
    """

    def __init__(self, max_num_reqs: int, num_speculative_tokens: int, prior: float) -> None:
        if not 0.0 < prior <= 1.0:
            raise ValueError(f"prior acceptance must lie in (0, 1], got {prior}")
        steps = np.arange(1, num_speculative_tokens + 1)
        self.prior: FloatArray = np.power(prior, steps).astype(np.float32)
        self._scores = np.zeros((max_num_reqs, num_speculative_tokens), dtype=np.float32)
        self._known = np.zeros(max_num_reqs, dtype=bool)
        self._owner = np.zeros(max_num_reqs, dtype=np.int64)

    def mark_new(self, slot: int) -> None:
        """A request was admitted into `slot`: forget the last owner's scores, in flight too."""
        self._known[slot] = False
        self._owner[slot] += 1

    def ticket(self, slots: IntArray) -> CopyTicket:
        """Take when a copy is launched for the requests in `slots` [n]; hand it to `publish`."""
        held = np.array(slots, dtype=np.int64)
        return CopyTicket(held, self._owner[held])

    def publish(self, scores: FloatArray, ticket: CopyTicket | None = None) -> None:
        """Store a copy of `scores` [max_num_reqs, K]: the ticket's slots, or all without one.

        A slot re-admitted after the ticket was taken stays new: the late row was another request's.
        """
        if np.shape(scores) != self._scores.shape:
            raise ValueError(
                f"stale scores: got shape {np.shape(scores)}, expected {self._scores.shape}"
            )
        if ticket is None:
            self._scores[:] = scores
            self._known[:] = True
            return
        fresh = ticket.slots[self._owner[ticket.slots] == ticket.owners]
        self._scores[fresh] = scores[fresh]
        self._known[fresh] = True

    def gather(self, slots: IntArray) -> FloatArray:
        """f32 [n, K] scores of the batch's requests, in the order of `slots` [n]."""
        rows: FloatArray = self._scores[slots]
        known = self._known[slots]
        if known.all():
            return rows
        rows[~known] = rows[known].mean(axis=0) if known.any() else self.prior
        return rows
