"""Metadata of Gated DeltaNet layers whose requests own one state and drafts of any length.

Relies on vLLM's builder for the split into drafting and other requests: every length it uses on
the device comes from the device's `query_start_loc`, and the total and the prefills' lengths agree
with the host's. So lengths trimmed on the device are taken, eagerly and in captured graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.recoverssm_metadata import RecoverSSMMetadata

from forespark.hybrid.workspace import GdnWorkspace, workspace_of


@dataclass
class CompactGdnMetadata(GDNAttentionMetadata, RecoverSSMMetadata):
    """vLLM's metadata, and how to commit what the step accepts."""

    workspace: GdnWorkspace | None = None  # set in the one cache group that commits for all layers
    draft_rows: torch.Tensor | None = None  # integer [n] drafting request -> batch row; None: same

    def commit_recoverssm_state(self, num_accepted_tokens: torch.Tensor) -> None:
        """Called after sampling and before the drafter.

        num_accepted_tokens  [requests]: tokens each request emitted. A drafting request emits one
        token per verified token it keeps; a prefill has no factors.
        """
        if self.workspace is None or self.num_spec_decodes == 0:
            return None
        accepted = num_accepted_tokens
        if self.draft_rows is not None:
            accepted = accepted[self.draft_rows]
        self.workspace.commit(accepted[: self.num_spec_decodes])
        return None


class CompactGdnBuilder(GDNAttentionMetadataBuilder):
    """One graph captured at K + 1 tokens a request replays any lengths up to that."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def build(self, *args: Any, **kwargs: Any) -> CompactGdnMetadata:
        """vLLM's metadata with a column of state indices per token."""
        stock = super().build(*args, **kwargs)
        values = {field.name: getattr(stock, field.name) for field in fields(stock)}
        metadata = CompactGdnMetadata(**values)
        states = metadata.spec_state_indices_tensor
        if states is not None and states.shape[1] < self.num_spec + 1:
            # The convolution takes the longest possible draft from the number of columns.
            metadata.spec_state_indices_tensor = states.expand(-1, self.num_spec + 1)
        context = self.compilation_config.static_forward_context
        workspace = workspace_of(context)
        if workspace is not None and workspace.first in self.layer_names:
            metadata.workspace = workspace
            metadata.draft_rows = self._draft_rows(stock)
        return metadata

    @staticmethod
    def _draft_rows(stock: GDNAttentionMetadata) -> torch.Tensor | None:
        masks = stock.spec_sequence_masks_cpu
        if masks is None or bool(masks[: stock.num_spec_decodes].all()):
            return None
        assert stock.spec_query_start_loc is not None
        return async_tensor_h2d(masks.nonzero()[:, 0], device=stock.spec_query_start_loc.device)


class CompactGdnBackend(GDNAttentionBackend):
    """The backend of a layer that serves drafts without a state per token."""

    @staticmethod
    def get_name() -> str:
        return "GDN_ATTN"

    @staticmethod
    def get_builder_cls() -> type[CompactGdnBuilder]:
        return CompactGdnBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True
