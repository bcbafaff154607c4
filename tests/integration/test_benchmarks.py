"""The benchmarks' own tools on the tiny pair, with the real engine; and `forespark profile`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forespark.benchmarks.cli import NAMES, run
from forespark.benchmarks.smoke import batches, smoke, write_prompts
from harness import LONG, PAIR

from forespark.scheduler.latency import load_artifact

pytestmark = pytest.mark.engine


@pytest.mark.skipif(not LONG, reason="two minutes; `make bench-smoke` runs the same and more")
@pytest.mark.timeout(600)
def test_decode_compare_and_simulate(tmp_path: Path) -> None:
    """Catches a closed loop that counts nothing, policies that are not swapped, records that do
    not compare, and a simulator that does not read what the engine measured."""
    record = smoke(PAIR, tmp_path, ("forespark",), "joint,batchwise:3", "1,3", 1.5)
    runs = {(one["policy"], one["load"]): one for one in record["runs"]}
    assert set(runs) == {(p, n) for p in ("joint", "batchwise:3") for n in (1, 3)}
    assert all(run["output_throughput"] > 0 for run in runs.values())
    fixed = runs["batchwise:3", 3]
    # Exactly three tokens a request that decodes; joint is free to choose.
    assert 0.8 * 3 <= fixed["drafted"] / 3 <= 3 and fixed["verified"] <= fixed["drafted"]
    assert 0.3 < runs["joint", 1]["predicted_over_measured_ms"] < 3
    assert set(record["ratios"]) == {"batchwise:3"}
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    simulated = {(row["policy"], row["load"]): row for row in record["simulated"]}
    assert simulated["batchwise:3", 3]["drafted"] == 9
    assert simulated["off", 1]["emitted"] == 1


@pytest.mark.timeout(300)
def test_a_batch_decodes_together(tmp_path: Path) -> None:
    """Catches a barrier that lets early requests decode while late ones are prefilled: at release
    every request has its first token and no other. Also a second run of what is done."""
    prompts = write_prompts(tmp_path)["long"]
    record = batches(PAIR, tmp_path, prompts, "joint,off", "1,4")
    runs = {(one["policy"], one["load"]): one for one in record["runs"]}
    assert set(runs) == {(p, n) for p in ("joint", "off") for n in (1, 4)}
    for (policy, load), seen in runs.items():
        assert seen["tokens_at_release"] == load and seen["short"] == 0, (policy, load)
        assert seen["output_throughput"] > 0 and seen["median_tpot_ms"] > 0
        assert seen["counters"]["forespark:emitted_tokens"] >= 32 * load
    assert batches(PAIR, tmp_path, prompts, "joint,off", "1,4") == record


@pytest.mark.timeout(400)
def test_profile_writes_what_serving_reads(tmp_path: Path) -> None:
    """Catches an artifact that the server would refuse, or that is of no use."""
    out = tmp_path / "latency.json"
    config = {"method": "forespark", "model": str(PAIR / "drafter"), "num_speculative_tokens": 7}
    done = subprocess.run(
        [sys.executable, "-m", "forespark.cli", "profile", "--out", str(out),
         "--model", str(PAIR / "target"), "--dtype", "float32", "--max-model-len", "256",
         "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--enforce-eager",
         "--speculative-config", json.dumps(config)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(out.read_text())
    identity = record["identity"]
    assert identity["num_speculative_tokens"] == 7 and identity["device"] == "cpu"
    assert identity["drafter"] == str(PAIR / "drafter") and record["provenance"]["command"]
    draft, verify = load_artifact(out, identity)
    assert draft.sizes[-1] == verify.sizes[-1] == 4 * 8  # every request with its full block
    with pytest.raises(ValueError, match="was measured with dtype 'float32'"):
        load_artifact(out, identity | {"dtype": "bfloat16"})


def test_benchmarks_are_listed_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a name that leads to no module, and a typo answered by a traceback."""
    run([])
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    folder = Path(__file__).parents[2] / "benchmarks"
    for module, _ in NAMES.values():
        assert (folder / (module.replace(".", "/") + ".py")).is_file()
    with pytest.raises(ValueError, match="unknown benchmark 'decod'; did you mean 'decode'"):
        run(["decod"])
