"""What a request of a Gated DeltaNet target costs."""

from __future__ import annotations

from forespark.hybrid.memory import GdnShape

QWEN36_35B_A3B = GdnShape(layers=30, key_heads=16, value_heads=32, key_size=128, value_size=128)


def test_a_request_with_15_drafts_fits_in_85_mb() -> None:
    """Catches a state or a factor kept per token that should be kept per request."""
    assert QWEN36_35B_A3B.page_bytes(15) == 2_097_152 + 294_912
    assert QWEN36_35B_A3B.stock_bytes(15) == 1_148_190_720
    assert 71_761_920 < QWEN36_35B_A3B.request_bytes(15) <= 85_000_000
