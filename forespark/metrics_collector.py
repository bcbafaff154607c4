"""The totals of `forespark/metrics.py` as Prometheus metrics, wherever vLLM answers a scrape.

`engine_args` asks `stats_file` for a file while it builds the engine's configuration. That happens
in the processes that answer scrapes (an API server, or the one that holds `LLM(...)`), so the
collector is registered there too. A worker finds the path in `additional_config`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from forespark.core import IntArray
from forespark.metrics import BUDGET_BUCKETS, Stats, create_stats_file, read_stats, stats_path
from forespark.patching import Patch

logger = logging.getLogger("vllm.forespark")

STATS_VARIABLE = "FORESPARK_STATS_FILE"
"""Tells API servers started by this process, which build their own configuration, the path."""

_FILE_PREFIX = "forespark-stats-"
_STALE_SECONDS = 60.0

_COUNTERS = {
    "steps": "Decoding steps.",
    "request_steps": "Requests that sampled, summed over steps: the denominator of lengths.",
    "drafted_tokens": "Tokens drafted.",
    "verified_tokens": "Drafted tokens that the target judged.",
    "accepted_tokens": "Drafted tokens that the target kept.",
    "emitted_tokens": "Accepted tokens plus one bonus or corrected token per request and step.",
    "predicted_tokens": "Emitted tokens that the plans expected.",
    "emitted_tokens_with_prediction": "Emitted tokens of the steps that had a prediction.",
    "predicted_ms": "Milliseconds the plans expected of decode-only steps behind another.",
    "measured_ms": "Milliseconds those decode-only steps took.",
}
_POSITION_COUNTERS = {
    "verified_tokens_by_position": ("verified_by_pos", "Tokens the target judged, by position."),
    "accepted_tokens_by_position": ("accepted_by_pos", "Tokens the target kept, by position."),
    "reached_tokens_by_position": (
        "reached_by_pos",
        "Tokens the target judged whose predecessors were all kept, by position.",
    ),
}
_HISTOGRAMS = {
    "draft_length": "Tokens drafted for a request in a step.",
    "draft_budget": "D, the tokens drafted in a step.",
    "verify_budget": "B, the drafted tokens verified in a step.",
}


def metric_families(stats: Stats | None) -> Iterator[Metric]:
    """Every metric of `docs/metrics.md`; without `stats` only names and types."""
    policy = GaugeMetricFamily(
        "forespark:info",
        "Always 1; the labels tell what runs.",
        labels=("policy", "version", "num_speculative_tokens"),
    )
    trimming = GaugeMetricFamily(
        "forespark:trimming_active",
        "1 when verification can be trimmed; 0 when the policy or a flat latency table forbids it.",
    )
    guards = CounterMetricFamily(
        "forespark:guard_hits", "Steps whose plan a guard replaced.", labels=("guard",)
    )
    if stats is not None:
        policy.add_metric((stats.policy, stats.version, str(stats.num_speculative_tokens)), 1)
        trimming.add_metric((), stats.scalars["trimming_active"])
        for guard, hits in stats.guard_hits.items():
            guards.add_metric((guard,), hits)
    yield from (policy, trimming, guards)
    for name, text in _COUNTERS.items():
        counter = CounterMetricFamily(f"forespark:{name}", text)
        if stats is not None:
            counter.add_metric((), stats.scalars[name])
        yield counter
    for name, (field, text) in _POSITION_COUNTERS.items():
        counter = CounterMetricFamily(f"forespark:{name}", text, labels=("position",))
        if stats is not None:
            for position, count in enumerate(getattr(stats, field).tolist()):
                counter.add_metric((str(position),), count)
        yield counter
    for name, text in _HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"forespark:{name}", text)
        if stats is not None:
            bounds = (
                range(stats.num_speculative_tokens + 1)
                if name == "draft_length"
                else BUDGET_BUCKETS
            )
            buckets = _cumulative(bounds, getattr(stats, name))
            histogram.add_metric((), buckets, stats.scalars[f"{name}_sum"])
        yield histogram


def _cumulative(bounds: range | tuple[int, ...], counts: IntArray) -> list[tuple[str, float]]:
    totals = counts.cumsum().tolist()
    ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
    # A draft is never longer than K, so the draft lengths have no count above the last bound.
    totals += totals[-1:] * (len(ends) - len(totals))
    return list(zip(ends, totals, strict=True))


class ForeSparkCollector:
    """Reads the stats file of the newest engine of this process at every scrape."""

    def __init__(self) -> None:
        self.path: str | None = None
        self._registries: WeakSet[CollectorRegistry] = WeakSet()
        self._complained: str | None = None

    def register(self, registry: CollectorRegistry) -> None:
        """Add this collector to a registry; again does nothing."""
        if registry not in self._registries:
            registry.register(self)
            self._registries.add(registry)

    def describe(self) -> Iterator[Metric]:
        """Names and types, so that the registry knows them before an engine has started."""
        return metric_families(None)

    def collect(self) -> Iterator[Metric]:
        """The metrics now; none without an engine or when its file cannot be read."""
        if self.path is None:
            return
        try:
            stats = read_stats(self.path)
        except (OSError, ValueError) as error:
            # The other metrics of the scrape must not fail with ours.
            if self._complained != str(error):
                self._complained = str(error)
                logger.warning("ForeSpark metrics are missing: %s", error)
            return
        yield from metric_families(stats)


COLLECTOR = ForeSparkCollector()
_locks: dict[str, IO[bytes]] = {}


def stats_file(engine_args: Any, policy: str, num_speculative_tokens: int) -> str:
    """The stats file of the engine that `engine_args` describe; its metrics are exposed from now.

    The newest engine of a process is the one exposed, as with vLLM's own metrics. Engine arguments
    that were turned into a configuration before keep their file.
    """
    given = stats_path(engine_args.additional_config)
    inherited = os.environ.get(STATS_VARIABLE)
    if given in _locks:
        path = given
    elif inherited and engine_args._api_process_count > 1 and engine_args._api_process_rank >= 0:
        path = inherited  # one of several API servers: the parent's configuration is the engine's
    else:
        path = _make_file(policy, num_speculative_tokens)
        os.environ[STATS_VARIABLE] = path
    COLLECTOR.path = path
    for patch in metrics_patches():
        patch.apply()
    COLLECTOR.register(REGISTRY)
    return path


def _make_file(policy: str, num_speculative_tokens: int) -> str:
    folder = tempfile.gettempdir()
    _remove_stale(Path(folder))
    handle, path = tempfile.mkstemp(prefix=_FILE_PREFIX, dir=folder)
    os.close(handle)
    create_stats_file(path, policy, num_speculative_tokens)
    _locks[path] = _lock(Path(path))
    atexit.register(_remove, path, os.getpid())
    return path


def _lock(path: Path) -> IO[bytes]:
    """Mark a file as in use until this process ends, however it ends."""
    file = path.open("rb")
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:
        Path(path).unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Remove files whose makers were killed: nobody holds their lock any more."""
    for path in folder.glob(f"{_FILE_PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            # A new file has no lock yet.
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _join_registry(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, registry: CollectorRegistry | None, *args: Any, **kwargs: Any) -> None:
        original(self, registry, *args, **kwargs)
        if registry is not None:
            COLLECTOR.register(registry)

    return init


def _add_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_metrics(self: Any) -> Any:
        return original(self) + list(_as_vllm(COLLECTOR.collect()))

    return get_metrics


def _as_vllm(families: Iterator[Metric]) -> Iterator[Any]:
    """Prometheus metrics in the records of `LLM.get_metrics()`."""
    from vllm.v1.metrics.reader import Counter, Gauge, Histogram

    for family in families:
        if family.type == "histogram":
            values = {
                sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value
                for sample in family.samples
            }
            count, total = int(values.pop("count")), values.pop("sum")
            buckets = {bound: int(value) for bound, value in values.items()}
            yield Histogram(family.name, {}, count, total, buckets)
            continue
        kind: Any = Counter if family.type == "counter" else Gauge
        for sample in family.samples:
            value = sample.value
            yield kind(family.name, dict(sample.labels), int(value) if value % 1 == 0 else value)


def metrics_patches() -> list[Patch]:
    """Applied by `stats_file`, in the processes that answer scrapes."""
    return [
        Patch(
            "prometheus_client.multiprocess:MultiProcessCollector",
            "__init__",
            "with PROMETHEUS_MULTIPROC_DIR vLLM answers from a fresh registry; add ours to it",
            wrap=_join_registry,
        ),
        Patch(
            "vllm.v1.engine.llm_engine:LLMEngine",
            "get_metrics",
            "LLM.get_metrics() lists only names that start with vllm:; append ours",
            wrap=_add_ours,
        ),
    ]
