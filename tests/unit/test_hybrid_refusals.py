"""What Gated DeltaNet targets are refused with: key, value, reason and what works, in one line."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forespark.hybrid.active import drafts_compactly, gdn_layers
from forespark.hybrid.refusals import LAYER, check_layer, check_state_dtype, check_target


def config(**changes: Any) -> Any:
    """The parts of a configuration that are read; `changes` by the name of the setting."""
    value = {
        "mamba_cache_mode": "none", "pipeline_parallel_size": 1, "kv_connector": None,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_speculative_tokens": 15,
        "architecture": "Qwen3_5MoeForConditionalGeneration", "adaptive": True, "extra": {},
    } | changes  # fmt: skip
    connector = value["kv_connector"]
    layers = ["linear_attention"] * 3 + ["full_attention"]
    text = SimpleNamespace(
        linear_key_head_dim=value["linear_key_head_dim"],
        linear_value_head_dim=value["linear_value_head_dim"],
        layer_types=layers,
    )
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_cache_mode=value["mamba_cache_mode"], use_replayssm=value.get("use_replayssm")
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=value["pipeline_parallel_size"]),
        model_config=SimpleNamespace(architecture=value["architecture"], hf_text_config=text),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
        speculative_config=SimpleNamespace(enable_adaptive_verification=value["adaptive"]),
        num_speculative_tokens=value["num_speculative_tokens"],
        additional_config=value["extra"],
    )


@pytest.mark.parametrize(
    "key, value, named, works",
    [
        ("mamba_cache_mode", "align", "mamba_cache_mode", "none"),
        ("pipeline_parallel_size", 2, "pipeline_parallel_size", "tensor_parallel_size"),
        ("kv_connector", "NixlConnector", "kv_transfer_config", "leave it out"),
        ("linear_key_head_dim", 96, "linear_key_head_dim", "128"),
        ("linear_value_head_dim", 256, "linear_value_head_dim", "128"),
        ("num_speculative_tokens", 16, "num_speculative_tokens", "15"),
        ("use_replayssm", True, "use_replayssm", "leave it out"),
    ],
)
def test_each_refusal_is_one_clear_line(key: str, value: Any, named: str, works: str) -> None:
    """Catches a setting that would be served wrongly or refused without saying what works."""
    check_target(config())
    with pytest.raises(ValueError, match=f"^{named}: {re.escape(str(value))} is not") as refused:
        check_target(config(**{key: value}))
    assert works in str(refused.value).rsplit(";", 1)[1] and "\n" not in str(refused.value)


def test_channel_first_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    with pytest.raises(ValueError, match="^VLLM_SSM_CONV_STATE_LAYOUT: DS .*use SD"):
        check_target(config())


def test_half_precision_states_are_refused() -> None:
    check_state_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match="mamba_ssm_cache_dtype: torch.float16 .*use float32"):
        check_state_dtype(torch.float16)


def test_another_plugins_layer_is_refused() -> None:
    """Catches two plugins of which the second silently wins."""

    class Theirs:
        pass

    class Ours:
        pass

    check_layer({}, Ours)
    check_layer({LAYER: Ours}, Ours)
    with pytest.raises(ValueError, match=f"{LAYER}: .*Theirs .*VLLM_PLUGINS=forespark"):
        check_layer({LAYER: Theirs}, Ours)


def test_other_engines_stay_stock() -> None:
    """Catches an installed plugin that changes a server which did not ask for it."""
    assert gdn_layers(config()) == 3 and drafts_compactly(config())
    assert gdn_layers(config(architecture="Qwen3MoeForCausalLM")) == 0
    assert not drafts_compactly(config(adaptive=False))
    assert drafts_compactly(config(adaptive=False, extra={"forespark_hybrid": True}))
    assert drafts_compactly(config(adaptive=False, extra={"forespark": {}}))
