"""Totals of the steps: written in one process, scraped in another."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forespark.metrics import (
    BUDGET_BUCKETS,
    STATS_KEY,
    MetricsWriter,
    StepStats,
    budget_bucket,
    create_stats_file,
    read_stats,
    stats_path,
)

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forespark import metrics_collector
from forespark.engine_args import engine_args_patches
from forespark.metrics_collector import ForeSparkCollector

REPORT_22 = StepStats(
    num_reqs=1,
    drafted=4,
    verified=2,
    accepted=1,
    emitted=2,
    draft_budget=4,
    verify_budget=2,
    draft_len_counts=[0, 0, 0, 0, 1, 0, 0, 0],
    verified_by_pos=[1, 1, 0, 0, 0, 0, 0],
    accepted_by_pos=[1, 0, 0, 0, 0, 0, 0],
    reached_by_pos=[1, 1, 0, 0, 0, 0, 0],
)
NOTHING = StepStats(0, 0, 0, 0, 0, 0, 0)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(path: Path) -> Samples:
    """What Prometheus would store: sample name and labels to value, from the text format."""
    registry = CollectorRegistry()
    collector = ForeSparkCollector()
    collector.path = str(path)
    collector.register(registry)
    return parse(generate_latest(registry).decode())


def parse(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("forespark:")
    }


def plain(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"forespark:{name}", tuple(sorted(labels.items()))]


def write(path: Path, *steps: StepStats, policy: str = "joint", tokens: int = 7) -> None:
    writer = MetricsWriter(path, policy, tokens)
    for step in steps:
        writer.observe(step)
    writer.close()


def test_report_22_rates_and_length_from_totals(tmp_path: Path) -> None:
    """Report 22: catches one acceptance rate that mixes drafted and verified, or lengths that
    forget the bonus token."""
    write(tmp_path / "s", *[REPORT_22] * 10)
    samples = scrape(tmp_path / "s")
    accepted = plain(samples, "accepted_tokens_total")
    assert accepted / plain(samples, "drafted_tokens_total") == 0.25
    assert accepted / plain(samples, "verified_tokens_total") == 0.5
    emitted = plain(samples, "emitted_tokens_total")
    assert emitted / plain(samples, "request_steps_total") == 2.0
    assert plain(samples, "steps_total") == 10


def test_report_4_conditional_acceptance_shows_where_drafts_break(tmp_path: Path) -> None:
    """Report 4: catches a per-position rate in which trimmed or unreached tokens count as
    rejected, which hides a collapse at position 2 in an ordinary decay."""
    # Three requests: all kept of 1, broken at position 1 of 3, and never reached position 2.
    step = StepStats(
        3, 6, 6, 3, 6, 6, 6,
        accepted_by_pos=[3, 0, 0], verified_by_pos=[3, 2, 1], reached_by_pos=[3, 2, 0],
    )  # fmt: skip
    write(tmp_path / "s", step, tokens=3)
    samples = scrape(tmp_path / "s")
    rates = [
        plain(samples, "accepted_tokens_by_position_total", position=str(j))
        / plain(samples, "reached_tokens_by_position_total", position=str(j))
        for j in range(2)
    ]
    assert rates == [1.0, 0.0]
    assert plain(samples, "reached_tokens_by_position_total", position="2") == 0
    assert plain(samples, "verified_tokens_by_position_total", position="1") == 2


def test_report_8_trimming_is_visible(tmp_path: Path) -> None:
    """Report 8: catches a flat latency table that leaves operators believing in trimming."""
    writer = MetricsWriter(tmp_path / "s", "joint", 7)
    for active in (True, False):
        writer.set_trimming(active)
        assert plain(scrape(tmp_path / "s"), "trimming_active") == active
    writer.observe(NOTHING)
    assert plain(scrape(tmp_path / "s"), "trimming_active") == 0
    writer.close()


def test_another_process_writes(tmp_path: Path) -> None:
    """Catches totals that stay in the worker, or are lost when it dies without closing."""
    code = (
        "import os, sys\n"
        "from forespark.metrics import MetricsWriter, StepStats\n"
        "writer = MetricsWriter(sys.argv[1], 'full', 3)\n"
        "for _ in range(5): writer.observe(StepStats(2, 6, 6, 3, 5, 6, 6, guard='g'))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "s"
    create_stats_file(path, "full", 3)
    assert plain(scrape(path), "steps_total") == 0
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    samples = scrape(path)
    assert plain(samples, "emitted_tokens_total") == 25
    assert plain(samples, "guard_hits_total", guard="g") == 5
    write(path, NOTHING, policy="full", tokens=3)
    assert plain(scrape(path), "steps_total") == 6  # a restarted writer goes on


def test_zero_drafted_tokens_are_a_legal_step(tmp_path: Path) -> None:
    """Catches a division or a missing bucket in a step that drafts nothing."""
    write(tmp_path / "s", NOTHING, StepStats(3, 0, 0, 0, 3, 0, 0, draft_len_counts=[3] + [0] * 7))
    samples = scrape(tmp_path / "s")
    assert plain(samples, "emitted_tokens_total") == 3
    assert plain(samples, "draft_budget_bucket", le="0.0") == 2
    assert plain(samples, "draft_length_bucket", le="0.0") == 3
    assert plain(samples, "draft_length_sum") == 0


def test_steps_without_prediction_stay_out_of_the_comparison(tmp_path: Path) -> None:
    """Catches NaN swallowing a total, or measured time summed over other steps than predicted."""
    nan = math.nan
    write(
        tmp_path / "s",
        StepStats(1, 4, 4, 3, 4, 4, 4, predicted_tokens=3.5, predicted_ms=10.0, actual_ms=12.0),
        StepStats(1, 4, 4, 3, 4, 4, 4, predicted_tokens=nan, predicted_ms=10.0, actual_ms=nan),
        StepStats(1, 4, 4, 3, 4, 4, 4, predicted_tokens=nan, predicted_ms=nan, actual_ms=99.0),
    )
    samples = scrape(tmp_path / "s")
    assert plain(samples, "predicted_tokens_total") == 3.5
    assert plain(samples, "emitted_tokens_with_prediction_total") == 4
    assert plain(samples, "predicted_ms_total") == 10.0
    assert plain(samples, "measured_ms_total") == 12.0


def test_histograms_are_cumulative(tmp_path: Path) -> None:
    """Catches plain counts exposed as buckets, which quantiles silently misread."""
    lengths = np.array([1, 0, 2, 0, 0, 0, 0, 4])
    steps = [StepStats(7, d, d, 0, 7, d, b) for d, b in ((0, 0), (5, 1), (64, 33), (99999, 16384))]
    write(tmp_path / "s", *steps, StepStats(7, 32, 0, 0, 7, 32, 0, draft_len_counts=lengths))
    samples = scrape(tmp_path / "s")
    for name in ("draft_length", "draft_budget", "verify_budget"):
        values = [v for (key, _), v in samples.items() if key == f"forespark:{name}_bucket"]
        assert values == sorted(values)
        assert values[-1] == plain(samples, f"{name}_count")
    found = [plain(samples, "draft_length_bucket", le=f"{d}.0") for d in range(8)]
    assert found == [1, 1, 3, 3, 3, 3, 3, 7]
    assert plain(samples, "draft_length_sum") == 32
    budget = {le: plain(samples, "draft_budget_bucket", le=le) for le in ("0.0", "8.0", "64.0")}
    assert budget == {"0.0": 1, "8.0": 2, "64.0": 4}
    assert plain(samples, "draft_budget_bucket", le="16384.0") == 4
    assert plain(samples, "draft_budget_bucket", le="+Inf") == 5
    assert plain(samples, "verify_budget_sum") == 1 + 33 + 16384


def test_a_budget_falls_in_the_first_bucket_that_holds_it() -> None:
    """Catches an off-by-one at the powers of two."""
    for tokens in (0, 1, 2, 3, 4, 5, 8, 9, 16384, 16385, 10**6):
        expected = next((i for i, b in enumerate(BUDGET_BUCKETS) if tokens <= b), 16)
        assert budget_bucket(tokens) == expected


@pytest.mark.parametrize(("policy", "tokens"), [("joint", 8), ("full", 7)])
def test_a_file_of_another_engine_is_refused(tmp_path: Path, policy: str, tokens: int) -> None:
    """Catches a worker that writes its totals over those of another K or policy."""
    create_stats_file(tmp_path / "s", "joint", 7)
    with pytest.raises(ValueError, match=f"policy {policy} with K = {tokens}") as caught:
        MetricsWriter(tmp_path / "s", policy, tokens)
    assert "\n" not in str(caught.value)


def test_another_layout_is_refused_and_spares_the_scrape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches numbers read from the wrong place, or a scrape that fails for everybody."""
    path = tmp_path / "s"
    create_stats_file(path, "joint", 7)
    good = path.read_bytes()
    for content, words in (
        (good.replace(b'"layout": 1', b'"layout": 9'), "has layout 9 .* reads layout 1"),
        (good[:-8], "bytes, K = 7 needs"),
        (b"", "not a ForeSpark stats file"),
        (b"\xff" * 4096, "not a ForeSpark stats file"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words) as caught:
            read_stats(path)
        assert "\n" not in str(caught.value)
        caplog.clear()
        assert scrape(path) == {} and words.split(" .*")[0] in caplog.text
    path.unlink()
    assert scrape(path) == {}


def test_more_guards_than_slots_are_still_counted(tmp_path: Path) -> None:
    """Catches an index error in the worker when a guard's name is new, long or one too many."""
    guards = [f"guard_{i}" for i in range(20)] + ["é" * 80]
    write(tmp_path / "s", *[StepStats(1, 0, 0, 0, 1, 0, 0, guard=guard) for guard in guards])
    hits = read_stats(tmp_path / "s").guard_hits
    assert sum(hits.values()) == 21 and hits["other"] == 6 and len(hits) == 16


def test_every_name_is_ours_and_on_the_page(tmp_path: Path) -> None:
    """Catches a clash with vLLM's counters, which its benchmark sums, and an unexplained metric."""
    write(tmp_path / "s", REPORT_22)
    families = list(metrics_collector.metric_families(read_stats(tmp_path / "s")))
    assert families and all(f.name.startswith("forespark:") for f in families)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for family in families:
        suffix = "_total" if family.type == "counter" else ""
        assert f"`{family.name}{suffix}" in page
    described = [f.name for f in ForeSparkCollector().describe()]
    assert described == [f.name for f in families]
    info = {"policy": "joint", "version": "0.1.0", "num_speculative_tokens": "7"}
    assert plain(scrape(tmp_path / "s"), "info", **info) == 1


def test_observing_is_cheap(tmp_path: Path) -> None:
    """Catches a writer that costs the worker a visible part of a step."""
    writer = MetricsWriter(tmp_path / "s", "joint", 7)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            writer.observe(REPORT_22)
        best = min(best, (time.perf_counter() - start) / 50)
    writer.close()
    assert best < 100e-6  # about 10 us when the machine is idle


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """`stats_file` with its own folder and collector, and without touching vLLM."""
    monkeypatch.setattr(metrics_collector.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(metrics_collector, "COLLECTOR", ForeSparkCollector())
    monkeypatch.setattr(metrics_collector, "REGISTRY", CollectorRegistry())
    monkeypatch.setattr(metrics_collector, "metrics_patches", list)
    monkeypatch.delenv(metrics_collector.STATS_VARIABLE, raising=False)

    def build(additional: Any = None, count: int = 1, rank: int = 0) -> str:
        arguments = SimpleNamespace(
            additional_config=additional, _api_process_count=count, _api_process_rank=rank
        )
        return metrics_collector.stats_file(arguments, "joint", 7)

    yield build
    os.environ.pop(metrics_collector.STATS_VARIABLE, None)


def test_api_servers_of_one_engine_read_one_file(host: Callable[..., str]) -> None:
    """Catches API servers that each make a file which no worker writes."""
    parent = host(count=2, rank=-1)
    assert host(count=2, rank=0) == host(count=2, rank=1) == parent
    assert host({STATS_KEY: parent}) == parent  # the same arguments, turned into a config again
    assert host() != parent
    assert stats_path({STATS_KEY: parent}) == parent
    assert stats_path({}) is stats_path(None) is None


def test_the_newest_engine_of_a_process_is_exposed(host: Callable[..., str]) -> None:
    """Catches duplicated time series, or the numbers of an engine that is gone."""
    for drafted in (1, 2):
        write(Path(host()), StepStats(1, drafted, 0, 0, 1, drafted, 0))
    samples = parse(generate_latest(metrics_collector.REGISTRY).decode())
    assert plain(samples, "drafted_tokens_total") == 2


def test_only_files_of_killed_servers_are_swept(host: Callable[..., str], tmp_path: Path) -> None:
    """Catches a folder that fills up, or a new server that deletes a running one's file."""
    running = Path(host())
    killed, fresh = (tmp_path / f"forespark-stats-{name}" for name in ("killed", "fresh"))
    for path in (killed, fresh):
        create_stats_file(path, "joint", 7)
    for path in (running, killed):
        os.utime(path, (1.0, 1.0))
    host()
    assert running.exists() and fresh.exists() and not killed.exists()
    with running.open("rb") as file, pytest.raises(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_maker_removes_its_file_at_exit(tmp_path: Path) -> None:
    """Catches a file left behind by every server that stops, or removed by a forked child."""
    code = (
        "import os, pathlib, types\n"
        "from forespark import metrics_collector as m\n"
        "m.metrics_patches = list\n"
        "a = types.SimpleNamespace(additional_config=None, _api_process_count=1)\n"
        "path = m.stats_file(a, 'joint', 7)\n"
        "if os.fork() == 0: raise SystemExit\n"
        "os.wait(); assert pathlib.Path(path).exists()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_path_is_no_compile_cache_key() -> None:
    """Catches a recompilation at every start, because the file's name is random."""
    wrapped = engine_args_patches()[-1].wrap
    assert wrapped is not None
    compute_hash = wrapped(lambda self: repr(self.additional_config))
    hashes = {
        compute_hash(SimpleNamespace(additional_config={"forespark": {}, STATS_KEY: path}))
        for path in ("a", "b")
    }
    assert len(hashes) == 1
