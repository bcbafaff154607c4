"""What steps cost beyond the latency tables, learned while serving.

The tables hold what grows with the tokens of a step. Sampling, bookkeeping and the host's own work
come on top, and attention costs what the contexts at hand make it cost. All of that is paid
whatever is drafted or verified, so it is one number for a batch size: the median of measured minus
priced time over the latest decode-only steps. Left out, every token of a draft would look dearer
than it is in a step that has to be paid for anyway.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 32  # steps a median is taken over
FEWEST = 8  # steps before a size class is believed
_LONGEST = 4.0  # an interval this many times the price held something other than the step
_SHORTEST = 0.5  # a step is never taken to cost less than this share of its price


class FixedCost:
    """Medians by size class: batches of 1, 2-3, 4-7, 8-15, ... requests."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def observe(self, num_reqs: int, priced_ms: float, measured_ms: float) -> None:
        """A decode-only step of `num_reqs` requests, priced by the tables alone.

        Prices that are not finite and intervals that held a pause are left out.
        """
        if not math.isfinite(priced_ms) or not 0.0 < measured_ms < _LONGEST * priced_ms:
            return
        size_class = num_reqs.bit_length()
        samples = self._samples.setdefault(size_class, deque(maxlen=WINDOW))
        samples.append(max(measured_ms, _SHORTEST * priced_ms) - priced_ms)
        if len(samples) >= FEWEST:
            self._medians[size_class] = statistics.median(samples)

    def at(self, num_reqs: int) -> float:
        """Milliseconds to add to a step of `num_reqs`; the nearest class seen, 0 without any."""
        if not self._medians:
            return 0.0
        size_class = num_reqs.bit_length()
        nearest = min(self._medians, key=lambda seen: (abs(seen - size_class), seen))
        return self._medians[nearest]
