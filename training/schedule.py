"""Learning-rate schedule over steps or over minutes, and the time box of one call."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


@dataclass
class Schedule:
    """Linear warm-up, then a cosine down to `final_share`, over steps or training minutes.

    With `steps` the schedule repeats exactly. With `minutes` it follows the training time spent so
    far (summed over restarts), for a machine that is lent by the minute.
    """

    steps: int | None
    minutes: float | None
    warmup_steps: int
    final_share: float
    box_minutes: float | None = None  # this call ends after so many minutes
    spent_before: float = 0.0  # seconds trained by earlier calls
    _started: float = field(default_factory=time.monotonic)

    def start(self, spent_before: float = 0.0) -> None:
        """Start (or restart) this call's clock."""
        self.spent_before = spent_before
        self._started = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds trained, earlier calls included."""
        return self.spent_before + time.monotonic() - self._started

    def progress(self, step: int) -> float:
        """Share of the whole training that is done before step `step`, 0..1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, self.spent / (60 * (self.minutes or 1.0)))

    def factor(self, step: int) -> float:
        """What the base learning rate is multiplied by in step `step`."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step)))
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return warm * (self.final_share + (1 - self.final_share) * cosine)

    def done(self, step: int) -> bool:
        """True when the whole training is over."""
        return self.progress(step) >= 1.0

    def box_over(self) -> bool:
        """True when this call's time box is over."""
        spent = time.monotonic() - self._started
        return self.box_minutes is not None and spent >= 60 * self.box_minutes

    def seconds_left(self, step: int, first_step: int) -> float:
        """Estimate of the seconds until the training (or this call's box) ends."""
        now = time.monotonic() - self._started
        if self.steps is not None:
            left = (self.steps - step) * now / max(1, step - first_step)
        else:
            left = 60 * (self.minutes or 0.0) - self.spent
        if self.box_minutes is not None:
            left = min(left, 60 * self.box_minutes - now)
        return max(0.0, left)
