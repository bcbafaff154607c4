"""Bytes that a request's Gated DeltaNet states and its drafted tokens take, here and in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from forespark.triton_kernels.gdn_types import GdnFactors

STATE_BYTES = 4  # float32, what Qwen3.5 and Qwen3.6 checkpoints ask for
CONV_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class GdnShape:
    """The Gated DeltaNet layers of a target, per tensor-parallel rank."""

    layers: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    conv_width: int = 4

    def page_bytes(self, drafts: int) -> int:
        """Bytes of one layer's page: the state, and the convolution's window with room to roll."""
        state = self.value_heads * self.value_size * self.key_size * STATE_BYTES
        channels = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        return state + (self.conv_width - 1 + drafts) * channels * CONV_BYTES

    def factor_bytes(self) -> int:
        """Bytes of one request's factors in all layers, kept from verification to commit."""
        workspace = GdnFactors.allocate(
            self.layers, 1, self.key_heads, self.value_heads, self.key_size, self.value_size,
            device="meta", dtype=torch.bfloat16,
        )  # fmt: skip
        return workspace.bytes_per_row()

    def request_bytes(self, drafts: int) -> int:
        """Bytes of a running request: one page a layer, and the factors."""
        return self.layers * self.page_bytes(drafts) + self.factor_bytes()

    def stock_bytes(self, drafts: int) -> int:
        """Bytes of a running request in vLLM 0.32: one page a layer and drafted token."""
        return self.layers * (1 + drafts) * self.page_bytes(drafts)
