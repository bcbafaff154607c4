"""Service levels: which requests were answered in time, and the rate at which 90 % still are.

A request meets the level when its first token came within TTFT and the others within TPOT on
average. One that failed, or gave no token, is a miss: a server that drops work does not look fast.
Input is the detailed record of `vllm bench serve` (lists by request).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.9


@dataclass(frozen=True)
class Slo:
    """Milliseconds a request may take."""

    ttft_ms: float
    tpot_ms: float

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} must be above 0 ms")

    def scaled(self, factor: float) -> Slo:
        """Both limits times `factor`."""
        return Slo(self.ttft_ms * factor, self.tpot_ms * factor)


def latencies(record: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(TTFT, TPOT) f64 [requests] in ms: inf where there is no answer; TPOT 0 for one token.

    Raises ValueError for a record without details.
    """
    missing = [name for name in ("ttfts", "itls", "output_lens", "errors") if name not in record]
    if missing:
        raise ValueError(f"record: {', '.join(missing)} missing; save it with --save-detailed")
    lengths = np.asarray(record["output_lens"], dtype=np.float64)
    failed = np.array([bool(error) for error in record["errors"]], dtype=bool) | (lengths < 1)
    ttft = np.where(failed, np.inf, 1e3 * np.asarray(record["ttfts"], dtype=np.float64))
    spent = np.array([sum(gaps) for gaps in record["itls"]], dtype=np.float64)
    tpot = np.where(lengths > 1, 1e3 * spent / np.maximum(lengths - 1, 1), 0.0)
    return ttft, np.where(failed, np.inf, tpot)


def attainment(record: Mapping[str, Any], slo: Slo) -> float:
    """Share of all requests that met both limits; 0 when there was none."""
    ttft, tpot = latencies(record)
    met = (ttft <= slo.ttft_ms) & (tpot <= slo.tpot_ms)
    return float(met.mean()) if met.size else 0.0


def capacity(
    rates: Sequence[float], attained: Sequence[float], level: float = LEVEL
) -> tuple[float, bool]:
    """(requests/s at which `level` is still attained, whether that was measured).

    Interpolated between the last rate that attains it and the next. Without a measured miss the
    highest rate is a lower bound (False); when the lowest rate already misses, 0 (False).
    """
    order = np.argsort(rates)
    x, y = np.asarray(rates, dtype=np.float64)[order], np.asarray(attained)[order]
    if not x.size:
        raise ValueError("capacity: no rate was measured")
    misses = np.flatnonzero(y < level)
    if not misses.size:
        return float(x[-1]), False
    first = int(misses[0])
    if first == 0:
        return 0.0, False
    share = (y[first - 1] - level) / (y[first - 1] - y[first])
    return float(x[first - 1] + share * (x[first] - x[first - 1])), True
