"""User reports on what an engine says and does when it starts: reports 8, 12, 14 and 35."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
from reports_harness import (
    FLAT,
    K,
    counters,
    generate,
    greedy,
    in_engine,
    once,
    run_job,
    runner_of,
    wide_drafter,
)

pytestmark = pytest.mark.engine

PROMPTS = ["def merge(data, key):\n    ", "x = [1, 2, 3]\n", "class Path:\n    "]
WIDE = 15


class Heard(logging.Handler):
    """Keeps what ForeSpark logs."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []
        logger = logging.getLogger("vllm.forespark")
        logger.addHandler(self)
        logger.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())


def job(task: dict[str, Any]) -> dict[str, Any]:
    """Every start, in one process."""
    found: dict[str, Any] = {"target": in_engine(None, _serve)}
    heard = Heard()
    found["flat"] = in_engine("joint", _serve, {"prices": FLAT})
    found["flat"]["warnings"] = [line for line in heard.warnings if "flat" in line]
    heard.warnings.clear()
    found["short"] = in_engine("batchwise", _serve, {"tokens": 3, "batchwise_schedule": [[512, 3]]})
    with tempfile.TemporaryDirectory() as folder:
        wide = {
            "drafter": wide_drafter(Path(folder) / "drafter", WIDE),
            "tokens": WIDE,
            "batchwise_schedule": [[512, WIDE]],
        }
        tight = {"max_num_batched_tokens": 2048}
        found["refused"] = _error("batchwise", wide, max_num_seqs=512, **tight)
        found["capped"] = in_engine("batchwise", _serve, wide, max_num_seqs=None, **tight)
    found["backend"] = _backend_error()
    heard.warnings.clear()
    found["uniform"] = _uniform()
    found["uniform"]["warnings"] = heard.warnings
    return found


def _serve(llm: Any) -> dict[str, Any]:
    texts = generate(llm, PROMPTS, greedy(32))
    runner, metrics = runner_of(llm), counters(llm)
    return {
        "texts": texts,
        "trimming": metrics.get("forespark:trimming_active"),
        "counted": {
            name: metrics.get(f"forespark:{name}_tokens", 0)
            for name in ("drafted", "verified", "accepted")
        },
        "drafts": metrics.get("vllm:spec_decode_num_drafts", 0),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
        "manager": runner.adaptive_verification is not None,
        "seqs": runner.max_num_reqs,
        "tokens": runner.max_num_tokens,
    }


def _error(policy: str, config: dict[str, Any] | None = None, **options: Any) -> str:
    try:
        in_engine(policy, _serve, config, **options)
    except ValueError as error:
        return str(error)
    return "started"


def _backend_error() -> str:
    """A target whose only backend is refused by vLLM's selector, with the words of its CUDA one."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    platform = type(current_platform)
    choose = platform.get_attn_backend_cls

    def refuse(backend: Any, *, attn_selector_config: Any, **_: Any) -> str:
        raise ValueError(
            f"No valid attention backend found for cpu with {attn_selector_config!r}. Reasons: "
            "{GDN: [device-cpu query lens mismatch not supported, "
            "this is needed for adaptive verification]}."
        )

    selector._cached_get_attn_backend.cache_clear()
    platform.get_attn_backend_cls = staticmethod(refuse)
    try:
        return _error("joint")
    finally:
        platform.get_attn_backend_cls = choose
        selector._cached_get_attn_backend.cache_clear()


def _uniform() -> dict[str, Any]:
    """A target layer that takes only equal widths."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as module

    module.get_query_lens_mismatch_unsupported_backend = lambda *_, **__: "UNIFORM_ONLY"
    widths: list[list[int]] = []

    def watched(llm: Any) -> dict[str, Any]:
        runner = runner_of(llm)
        prepare = runner.prepare_inputs

        def noted(*args: Any, **kwargs: Any) -> Any:
            batch = prepare(*args, **kwargs)
            if batch.num_draft_tokens_per_req is not None:
                widths.append(batch.query_start_loc.diff()[: batch.num_reqs].tolist())
            return batch

        runner.prepare_inputs = noted
        return _serve(llm)

    return {**in_engine("joint", watched), "widths": widths}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return once(tmp_path_factory, "startup", lambda: run_job("test_reports_startup:job"))


def test_report_8_a_flat_table_is_named_and_shown(found: dict[str, Any]) -> None:
    """Catches a table that pins the scheduler to verify-all while users believe it adapts."""
    warnings = found["flat"]["warnings"]
    assert warnings and all("latency.json" in line for line in warnings)
    assert found["flat"]["trimming"] == 0
    assert found["flat"]["texts"] == found["target"]["texts"]


def test_report_12_a_refused_backend_names_the_key(found: dict[str, Any]) -> None:
    """Catches a start that ends in vLLM's internal backend names without a way out."""
    message = found["backend"]
    assert "\n" not in message
    assert message.startswith("scheduler.policy: joint")
    assert "full" in message and "GDN" in message


def test_report_12_fewer_tokens_than_the_block_are_served(found: dict[str, Any]) -> None:
    """Catches a guard that refuses a K below the trained block size for no reason."""
    assert found["short"]["texts"] == found["target"]["texts"]
    assert found["short"]["accepted"] > 0


def test_report_14_equal_widths_only_means_full_blocks(found: dict[str, Any]) -> None:
    """Catches ragged verification handed to a target layer that assumes equal widths."""
    uniform = found["uniform"]
    assert [line for line in uniform["warnings"] if line.startswith("scheduler.policy: joint")]
    assert not uniform["manager"] and uniform["trimming"] == 0
    # One request's last step may have less room than K; all others are equally wide.
    wide = [widths for widths in uniform["widths"] if set(widths) == {K + 1}]
    assert len(wide) > len(uniform["widths"]) / 2
    assert uniform["texts"] == found["target"]["texts"] and uniform["accepted"] > 0
    counted = uniform["counted"]
    assert counted["accepted"] == uniform["accepted"]
    assert counted["drafted"] >= counted["verified"] > counted["accepted"]


def test_report_35_a_batch_without_room_is_refused_or_capped(found: dict[str, Any]) -> None:
    """Catches a start-up profile of more rows than the buffers hold."""
    message = found["refused"]
    assert "\n" not in message and "max_num_batched_tokens: 2048" in message
    assert "max_num_seqs <= 66" in message
    assert found["capped"]["seqs"] == 66 and found["capped"]["tokens"] == 2048
    assert found["capped"]["texts"] == found["target"]["texts"]
