"""What a request of a Gated DeltaNet target costs."""

from __future__ import annotations

import pytest
import torch

from forespark.hybrid.memory import GdnShape

QWEN36_35B_A3B = GdnShape(layers=30, key_heads=16, value_heads=32, key_size=128, value_size=128)


def test_a_request_with_15_drafts_fits_in_85_mb() -> None:
    """Catches a state or a factor kept per token that should be kept per request."""
    assert QWEN36_35B_A3B.page_bytes(15) == 2_097_152 + 294_912
    assert QWEN36_35B_A3B.stock_bytes(15) == 1_148_190_720
    assert 71_761_920 < QWEN36_35B_A3B.request_bytes(15) <= 85_000_000


def test_vllm_counts_the_same_page() -> None:
    """Catches a page that differs from what vLLM allocates for the layer."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=2048,
        shapes=((18, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        num_speculative_blocks=0,
    )
    assert spec.page_size_bytes == QWEN36_35B_A3B.page_bytes(15)
