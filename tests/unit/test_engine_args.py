"""ForeSpark settings on vLLM's engine arguments, and what is refused before the engine starts."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forespark.supported import check_combination, fit_batch

ASSETS = Path(__file__).parents[1] / "assets" / "tiny-pair"
DRAFTER = ASSETS / "drafter"
TARGET = ASSETS / "target"


def test_report_35_room_for_every_draft() -> None:
    """Report 35: catches 512 requests of K = 15 in 2,048 rows, a device assert at start-up."""
    with pytest.raises(ValueError) as caught:
        fit_batch(512, 2048, 15, seqs_given=True, tokens_given=True)
    message = str(caught.value)
    for word in ("2048", "512", "15", "15872", "max_num_seqs <= 66"):
        assert word in message
    assert "\n" not in message
    assert fit_batch(512, 15872, 15, seqs_given=True, tokens_given=True) == (512, 15872)


def test_a_default_gives_way_to_what_the_user_chose() -> None:
    """Catches a server that refuses vLLM's own defaults, or overrides what was asked for."""
    assert fit_batch(512, 2048, 15, seqs_given=True, tokens_given=False) == (512, 15872)
    assert fit_batch(1024, 8192, 15, seqs_given=False, tokens_given=False) == (264, 8192)
    assert fit_batch(128, 2048, 15, seqs_given=False, tokens_given=True) == (66, 2048)
    assert fit_batch(4, 2048, 15, seqs_given=False, tokens_given=False) == (4, 2048)
    with pytest.raises(ValueError, match="max_num_batched_tokens >= 31$"):
        fit_batch(16, 16, 15, seqs_given=False, tokens_given=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("enable_lora", True),
        ("kv_transfer_config", {"kv_connector": "X"}),
        ("kv_offloading_size", 1.0),
        ("watermark_config", {}),
        ("spec_tokens", 3),
    ],
)
def test_unsupported_combination_is_one_line(key: str, value: object) -> None:
    """Catches a combination that would start and then hang or return wrong text."""
    with pytest.raises(ValueError) as caught:
        check_combination(SimpleNamespace(**{key: value}), environment={})
    message = str(caught.value)
    assert message.startswith(f"{key}: {value!r} is not supported with method forespark: ")
    assert "\n" not in message


def test_forced_v1_runner_is_refused() -> None:
    """Catches the V1 runner drafting without the plugin, silently as plain DFlash."""
    for value in ("0", "False"):
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=1"):
            check_combination(SimpleNamespace(), {"VLLM_USE_V2_MODEL_RUNNER": value})
    check_combination(SimpleNamespace(), {"VLLM_USE_V2_MODEL_RUNNER": "1"})


@pytest.fixture(scope="module")
def engine_config() -> Callable[..., Any]:
    """A function from engine arguments to vLLM's configuration, with our patches in place."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    from forespark.cpu_mode import enable
    from forespark.engine_args import install_engine_args

    enable()
    install_engine_args()
    install_engine_args()

    def build(**changes: Any) -> Any:
        given = {"model": str(TARGET), "enforce_eager": True, **changes}
        return EngineArgs(**given).create_engine_config()

    return build


def settings(**changes: Any) -> dict[str, Any]:
    return {"method": "forespark", "model": str(DRAFTER), **changes}


def test_every_spelling_reaches_the_engine(
    engine_config: Callable[..., Any], tmp_path: Path
) -> None:
    """Catches a YAML path, inline JSON or dotted flag that argparse or vLLM reads differently."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    file = tmp_path / "forespark.yaml"
    file.write_text(json.dumps(settings(scheduler={"policy": "full"})))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flag = "--speculative-config"
    for words in (
        [flag, str(file)],
        ["-sc", str(file)],
        [f"{flag}={file}"],
        [flag, file.read_text()],
        [f"{flag}.method", "forespark", f"{flag}.model", str(DRAFTER),
         f"{flag}.scheduler.policy", "full"],
    ):  # fmt: skip
        parsed = parser.parse_args(["--model", str(TARGET), "--enforce-eager", *words])
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
        assert config.speculative_config.method == "dflash"
        assert config.speculative_config.num_speculative_tokens == 7
        assert config.additional_config["forespark"]["scheduler"]["policy"] == "full"
    parsed = parser.parse_args(["--model", "m", flag, '{"method": "ngram"}'])
    assert parsed.speculative_config == {"method": "ngram"}


def test_misspelt_yaml_stops_the_command_line(
    tmp_path: Path, engine_config: Callable[..., Any]
) -> None:
    """Catches a typo that starts a server with the default instead of what was asked for."""
    from forespark.engine_args import parse_speculative_config

    file = tmp_path / "forespark.yaml"
    file.write_text("method: forespark\nmodel: x\nscheduler:\n  polcy: full\n")
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean scheduler.policy"):
        parse_speculative_config(str(file))


def test_settings_travel_and_do_not_change_the_compile_cache(
    engine_config: Callable[..., Any],
) -> None:
    """Catches a recompilation of the model for every scheduler knob."""
    config = engine_config(speculative_config=settings())
    changed = copy.deepcopy(config)
    changed.additional_config["forespark"]["scheduler"]["min_gain"] = 0.5
    assert changed.compute_hash() == config.compute_hash()
    assert changed.additional_config["forespark"]["scheduler"]["min_gain"] == 0.5
    changed.additional_config["other"] = 1
    assert changed.compute_hash() != config.compute_hash()
    json.dumps(config.additional_config)


def test_engine_arguments_may_be_used_twice(engine_config: Callable[..., Any]) -> None:
    """Catches a second engine from the same arguments losing its ForeSpark settings."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(TARGET), enforce_eager=True, speculative_config=settings())
    first, second = args.create_engine_config(), args.create_engine_config()
    assert first.additional_config == second.additional_config
    assert second.speculative_config.method == "dflash"


def test_off_is_the_target_alone(engine_config: Callable[..., Any]) -> None:
    """Catches a policy off that still loads a drafter."""
    config = engine_config(speculative_config=settings(scheduler={"policy": "off"}))
    assert config.speculative_config is None
    assert config.num_lookahead_tokens == 0


def test_report_40_drafter_does_not_inherit_a_quantised_cache(
    engine_config: Callable[..., Any],
) -> None:
    """Report 40: catches a drafter in the target's fp8 cache, which has no non-causal backend."""
    config = engine_config(speculative_config=settings(), kv_cache_dtype="fp8")
    assert config.cache_config.cache_dtype == "fp8"
    assert config.speculative_config.kv_cache_dtype == "auto"
    own = settings(drafter={"kv_cache_dtype": "bfloat16"})
    config = engine_config(speculative_config=own, kv_cache_dtype="fp8")
    assert config.speculative_config.kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_speculative_tokens": 8}, ["num_speculative_tokens: 8", "1..7"]),
        ({"model": "/no/such/folder"}, ["/no/such/folder", "is not a folder"]),
        ({"model": "./nowhere"}, ["is not a folder"]),
        ({"model": str(TARGET)}, ["Qwen3ForCausalLM", "not a DFlash2DraftModel"]),
        ({"drafter": {"kv_cache_dtype": "bf16"}}, ["'bf16'", "bfloat16"]),
        ({"drafter": {"attention_backend": "FLASH_ATN"}}, ["'FLASH_ATN'", "FLASH_ATTN"]),
    ],
)
def test_what_the_engine_could_not_serve_is_one_line(
    engine_config: Callable[..., Any], change: dict[str, Any], words: list[str]
) -> None:
    """Catches a bad checkpoint or backend that only fails minutes later, inside a worker."""
    with pytest.raises(ValueError) as caught:
        engine_config(speculative_config=settings(**change))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_foreign_drafter_is_refused(engine_config: Callable[..., Any], tmp_path: Path) -> None:
    """Catches a drafter of another target, whose shape error would come from the weight loader."""
    config = json.loads((DRAFTER / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="hidden size 128, this target has 256"):
        engine_config(speculative_config=settings(model=str(tmp_path)))


def test_defaults_make_room(engine_config: Callable[..., Any]) -> None:
    """Catches running requests that vLLM's scheduler skips because drafts do not fit."""
    config = engine_config(speculative_config=settings(), max_num_seqs=512)
    assert config.scheduler_config.max_num_batched_tokens >= 512 * 15
    with pytest.raises(ValueError, match="max_num_batched_tokens: 2048 is too small"):
        engine_config(speculative_config=settings(), max_num_seqs=512, max_num_batched_tokens=2048)


def test_without_the_plugin_vllm_refuses(tmp_path: Path) -> None:
    """Catches `VLLM_PLUGINS` excluding us and the server starting without ForeSpark."""
    pytest.importorskip("vllm")
    from vllm.config.speculative import SpeculativeConfig

    with pytest.raises(ValueError, match="method"):
        SpeculativeConfig(method="forespark", model=str(DRAFTER), num_speculative_tokens=7)


def graph_config(largest: int, seqs: int = 4) -> Any:
    """The parts of vLLM's configuration that are read, with K = 7."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            max_cudagraph_capture_size=largest, cudagraph_capture_sizes=[largest] * bool(largest)
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=7),
    )


def test_captured_sizes_that_miss_a_full_batch_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches a bucket list that silently runs large steps without graphs: one line, at start."""
    pytest.importorskip("vllm")
    from vllm.config import CompilationConfig

    from forespark.engine_args import check_graphs, given_graph_sizes

    def given(**keys: Any) -> Any:
        return SimpleNamespace(compilation_config=CompilationConfig(), **keys)

    assert given_graph_sizes(given()) is None
    assert given_graph_sizes(given(cudagraph_capture_sizes=[1])) == "cudagraph_capture_sizes"
    nested = SimpleNamespace(compilation_config=CompilationConfig(max_cudagraph_capture_size=24))
    key = given_graph_sizes(nested)
    assert key == "compilation_config.max_cudagraph_capture_size"
    with pytest.raises(ValueError) as caught:
        check_graphs(graph_config(24), key)
    message = str(caught.value)
    assert message.startswith(f"{key}: 24 is the largest captured step, but max_num_seqs 4 x ")
    assert ">= 32, or max_num_seqs <= 3, or leave it out" in message and "\n" not in message
    check_graphs(graph_config(32), key)
    check_graphs(graph_config(0), key)  # nothing is captured at all
    check_graphs(graph_config(24), None)  # vLLM's own choice is only warned about
