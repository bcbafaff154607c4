"""Which side decides lengths: what attention backends need, and what the setting says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="the adapter needs vLLM")

from forespark import patches
from forespark.config import ForeSparkConfig
from forespark.drafter import batch
from forespark.drafter.batch import packed_attention
from forespark.verifier.lengths import Split, select_either, setting_now, split_for


def groups(*kinds: str) -> list[list[Any]]:
    """One attention group a kind: reads lengths on the device, on the host, or keeps a state."""
    return [
        [
            SimpleNamespace(
                backend=SimpleNamespace(
                    supports_device_cpu_query_lens_mismatch=lambda kind=kind: kind == "device",
                    is_ssm=lambda kind=kind: kind == "state",
                )
            )
        ]
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("setting", "kinds", "where"),
    [
        ("auto", ("device", "device"), Split.DEVICE),
        ("auto", ("device", "host"), Split.HOST),
        ("host", ("device",), Split.HOST),
        ("device", ("device",), Split.DEVICE),
        ("device", ("device", "host"), Split.NONE),
        ("auto", ("device", "state"), Split.NONE),
        ("host", ("host", "state"), Split.NONE),
    ],
)
def test_the_backends_and_the_setting_decide(
    setting: str, kinds: tuple[str, ...], where: Split
) -> None:
    """Catches device lengths handed to a backend that plans on the host: wrong attention."""
    assert split_for(setting, groups(*kinds)) is where


def test_real_backends() -> None:
    """Catches a renamed question to vLLM's backends, and the wrong answer taken for yes."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

    def split(backend: Any) -> Split:
        return split_for("auto", [[SimpleNamespace(backend=backend)]])

    assert split(CPUAttentionBackend) is Split.DEVICE
    assert split(GDNAttentionBackend) is Split.NONE
    if not torch.cuda.is_available():  # without its variable-length kernels
        assert split(DeepseekV32IndexerBackend) is Split.HOST


def choose(setting: str | None, refuses: bool) -> list[bool]:
    """How vLLM is asked for a backend: with or without its rule about device lengths, in turn."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked: list[bool] = []

    def original(backend: Any, config: Any, num_heads: int) -> str:
        asked.append(config.use_adaptive_verification)
        if refuses and config.use_adaptive_verification:
            raise ValueError("this is needed for adaptive verification")
        return "chosen"

    config = AttentionSelectorConfig(64, torch.bfloat16, "auto", 32, use_adaptive_verification=True)
    assert select_either(original, lambda: setting)("ANY", config, num_heads=8) == "chosen"
    return asked


def test_backends_that_plan_on_the_host_can_be_chosen() -> None:
    """Catches an engine that refuses them although the host split serves them, or that takes one
    under auto although another reads lengths on the device."""
    assert choose("auto", refuses=False) == [True]
    assert choose("auto", refuses=True) == [True, False]
    assert choose("host", refuses=True) == [False]
    with pytest.raises(ValueError, match="adaptive verification"):
        choose("device", refuses=True)
    assert choose(None, refuses=False) == [True]
    assert setting_now() is None  # no engine is being built


@pytest.mark.parametrize(
    ("split", "kinds", "level", "says"),
    [
        ("auto", ("device", "host"), "info", "the host decides lengths"),
        (
            "host",
            ("device",),
            "info",
            "the host decides lengths",
        ),  # its graphs are of equal lengths
        ("auto", ("device",), "warning", "scheduler.split: host trims them here"),
        ("device", ("host",), "warning", "scheduler.split: host trims them here"),
        ("auto", ("device", "state"), "warning", "no other split trims them here"),
    ],
)
def test_a_refused_backend_is_served_as_it_takes_it(
    split: str, kinds: tuple[str, ...], level: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a server that stops, or that silently stops trimming, where vLLM trims nothing."""
    lines: dict[str, list[str]] = {"info": [], "warning": []}
    for name, kept in lines.items():
        monkeypatch.setattr(
            patches.logger, name, lambda line, *args, kept=kept: kept.append(line % args)
        )
    settings = {"method": "forespark", "model": "drafter", "scheduler": {"split": split}}
    extra = {"forespark": ForeSparkConfig.from_any(settings).settings()}

    def refuses(**kwargs: Any) -> Any:
        raise ValueError("vLLM's reason")

    create = patches._uniform_fallback(refuses)
    ours = SimpleNamespace(additional_config=extra)
    assert create(vllm_config=ours, attn_groups=groups(*kinds)) is None
    assert sum(map(len, lines.values())) == 1
    (line,) = lines[level]
    assert says in line and "vLLM's reason" in line and "\n" not in line
    with pytest.raises(ValueError, match="vLLM's reason"):
        create(vllm_config=SimpleNamespace(additional_config={}), attn_groups=groups(*kinds))


@pytest.mark.parametrize("lengths", [None, [0, 3, 1]])
def test_the_drafters_attention_gets_exact_lengths(
    lengths: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an even split where the host knows better."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(batch, "build_attn_metadata", lambda **kwargs: given.update(kwargs) or {})
    n, rows = 3, 7
    spec = SimpleNamespace(
        packed_lens=None if lengths is None else np.array(lengths, dtype=np.int32),
        num_query_per_req=5, max_model_len=64, draft_max_seq_len=64, attn_groups=[],
        kv_cache_config=None, _group_causal={}, draft_is_prefilling=torch.zeros(n),
        input_buffers=SimpleNamespace(
            query_start_loc=torch.zeros(n + 1), seq_lens=torch.zeros(n), positions=torch.zeros(rows)
        ),
        block_tables=SimpleNamespace(input_block_tables=[], slot_mappings=torch.zeros(1, rows)),
    )  # fmt: skip
    upper = torch.full((n,), 9, dtype=torch.int32)
    packed_attention(spec, SimpleNamespace(num_reqs=n, seq_lens_cpu_upper_bound=upper), rows)
    exact = [0, 3, 5, 7] if lengths is None else [0, 1, 5, 7]
    assert given["query_start_loc_cpu"].tolist() == exact
    assert given["max_query_len"] == (5 if lengths is None else 4)
