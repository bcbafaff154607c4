"""Host split: who drafts and verifies how much, decided on the host before the GPU starts.

For attention backends that plan a batch from query lengths on the host. The same rule as on the
device, on the previous step's estimates; the device is handed the lengths and follows them. A
length depends on earlier steps only, never on a token it lets through: sampling stays exact.
"""

from __future__ import annotations

import numpy as np

from forespark.core import FloatArray, IntArray
from forespark.scheduler.split import rank_split


class HostSplit:
    """Lengths of the last drafts by request slot: the host's copy of what the device holds."""

    def __init__(self, max_num_reqs: int, min_draft_len: int) -> None:
        self.min_draft_len = min_draft_len
        self._drafted = np.zeros(max_num_reqs, dtype=np.int32)

    def forget(self, slot: int) -> None:
        """A request was admitted into `slot`: nothing was drafted for it."""
        self._drafted[slot] = 0

    def draft(
        self,
        slots: IntArray,  # [n]
        scores: FloatArray,  # [n, K] last step's g
        limits: IntArray,  # [n]
        budget: int,
    ) -> IntArray:
        """d int32 [n] that sum to min(budget, sum of limits), remembered until the next draft."""
        lengths = rank_split(scores, limits, budget, self.min_draft_len, order=slots)
        self._drafted[slots] = lengths
        return lengths

    def held(self, slots: IntArray, scheduled: IntArray) -> IntArray:
        """int32 [n] drafted tokens that each request really has among its `scheduled` [n]."""
        return np.minimum(scheduled, self._drafted[slots]).astype(np.int32)

    def verify(
        self,
        slots: IntArray,  # [n]
        survival: FloatArray,  # [n, K] S~ of the drafts before these, -inf where none was
        scores: FloatArray,  # [n, K] g of the step before
        scheduled: IntArray,  # [n]
        budget: int,
    ) -> IntArray:
        """b int32 [n] that sum to min(budget, what is held).

        A position that was not drafted last time has no S~; what was expected of it before
        drafting stands in, and never ranks a token above the one it follows.
        """
        expected = np.where(np.isfinite(survival), survival, scores)
        ranked = np.minimum.accumulate(expected, axis=1)
        return rank_split(ranked, self.held(slots, scheduled), budget, order=slots)
