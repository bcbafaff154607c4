"""Qwen's Gated DeltaNet layer with one state a request: drafts leave factors instead of states."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
from vllm.v1.attention.backend import AttentionBackend

from forespark.hybrid.active import drafts_compactly, gdn_layers, runs_in_torch
from forespark.hybrid.metadata import CompactGdnBackend, CompactGdnMetadata
from forespark.hybrid.refusals import check_state_dtype
from forespark.hybrid.torch_core import gdn_core
from forespark.hybrid.workspace import GdnWorkspace, workspace_of
from forespark.triton_kernels.gdn_types import GdnFactors
from forespark.triton_kernels.gdn_verify import gdn_verify


class CompactGdnLayer(QwenGatedDeltaNetAttention):
    """Behaves like vLLM's layer unless the engine drafts compactly (`active.py`)."""

    workspace: GdnWorkspace | None = None

    def __init__(self, config: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.runs_in_torch = runs_in_torch(vllm_config)
        if not drafts_compactly(vllm_config):
            return
        check_state_dtype(self.get_state_dtype()[1])
        context = vllm_config.compilation_config.static_forward_context
        self.workspace = workspace_of(context) or self._new_workspace(vllm_config)
        self.factors = self.workspace.factors.layer(self.workspace.join(self))

    def _new_workspace(self, vllm_config: VllmConfig) -> GdnWorkspace:
        """Allocated with the weights, so that vLLM's memory profile counts it."""
        return GdnWorkspace(
            GdnFactors.allocate(
                gdn_layers(vllm_config),
                vllm_config.scheduler_config.max_num_seqs,
                self.num_k_heads // self.tp_size,
                self.num_v_heads // self.tp_size,
                self.head_k_dim,
                self.head_v_dim,
                dtype=vllm_config.model_config.dtype,
                device=self.A_log.device,
            )
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        """One state a request, none per drafted token."""
        spec = super().get_kv_cache_spec(vllm_config)
        if self.workspace is None or spec is None:
            return spec
        return dataclasses.replace(spec, num_speculative_blocks=0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that takes drafts of unequal lengths."""
        return super().get_attn_backend() if self.workspace is None else CompactGdnBackend

    def torch_core(
        self,
        mixed_qkv: torch.Tensor,  # [T, 2*H*K + HV*V]
        b: torch.Tensor,  # [T, HV]
        a: torch.Tensor,  # [T, HV]
        out: torch.Tensor,  # [T, HV, V]
        metadata: Any,
    ) -> None:
        """Convolution and recurrence on a CPU."""
        gdn_core(self, mixed_qkv, b, a, out, metadata)

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        if self.workspace is None:
            return super()._can_use_fused_gdn_mtp_decode(attn_metadata)
        # True leads to _forward_core_decode_spec_fused_norm below; the rest of the way is eager.
        return (
            attn_metadata.spec_sequence_masks is not None
            and attn_metadata.num_decodes == 0
            and attn_metadata.num_spec_decodes > 0
            and self.norm.activation == "silu"
        )

    def _forward_core_decode_spec_fused_norm(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output_gate: torch.Tensor,
        core_attn_out: torch.Tensor,
        attn_metadata: Any,
    ) -> None:
        if self.workspace is None:
            super()._forward_core_decode_spec_fused_norm(
                mixed_qkv, b, a, output_gate, core_attn_out, attn_metadata
            )
            return
        count = attn_metadata.num_actual_tokens
        self._verify(
            mixed_qkv[:count], b[:count], a[:count], core_attn_out[:count], attn_metadata,
            output_gate[:count],
        )  # fmt: skip

    def _verify(
        self,
        mixed_qkv: torch.Tensor,  # [T, 2*H*K + HV*V], the drafting requests' tokens alone
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,  # [T, HV, V]
        metadata: CompactGdnMetadata,
        gate: torch.Tensor | None = None,  # [T, HV, V]: also the gated norm
    ) -> None:
        """vLLM's convolution, whose window rolls by itself, then one launch for the recurrence."""
        states, starts = metadata.spec_state_indices_tensor, metadata.spec_query_start_loc
        accepted, requests = metadata.num_accepted_tokens, metadata.num_spec_decodes
        assert states is not None and starts is not None and accepted is not None
        starts, slots = starts[: requests + 1], states[:requests, 0]
        mixed_qkv = causal_conv1d_update(
            mixed_qkv,
            self.kv_cache[0].transpose(-1, -2),
            self.conv1d.weight.view(self.conv1d.weight.size(0), -1),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots,
            num_accepted_tokens=accepted[:requests],
            query_start_loc=starts,
            max_query_len=states.size(1),
            validate_data=False,
        )
        norm = (None, None) if gate is None else (gate, self.norm.weight)
        gdn_verify(
            mixed_qkv, a, b, self.A_log, self.dt_bias, self.kv_cache[1], slots, starts, out,
            self.factors, *norm, norm_eps=self.layer_norm_epsilon,
        )  # fmt: skip

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Drafting requests here, all others by vLLM, which is given them alone."""
        by_layer = get_forward_context().attn_metadata
        metadata = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        drafts = getattr(metadata, "spec_sequence_masks", None) is not None
        if self.workspace is None or not drafts:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        assert isinstance(metadata, CompactGdnMetadata) and isinstance(by_layer, dict)
        if metadata.num_prefills == 0:
            count = metadata.num_actual_tokens
            out = core_attn_out[:count]
            self._verify(mixed_qkv[:count], b[:count], a[:count], out, metadata)
            return
        drafted, others = metadata.spec_token_indx, metadata.non_spec_token_indx
        assert drafted is not None and others is not None
        out = core_attn_out.new_zeros(len(drafted), *core_attn_out.shape[1:])
        self._verify(mixed_qkv[drafted], b[drafted], a[drafted], out, metadata)
        rest = core_attn_out.new_zeros(len(others), *core_attn_out.shape[1:])
        by_layer[self.prefix] = dataclasses.replace(
            metadata,
            spec_sequence_masks=None,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=len(others),
        )
        try:
            super()._forward_core(mixed_qkv[others], b[others], a[others], rest)
        finally:
            by_layer[self.prefix] = metadata
        core_attn_out[drafted] = out
        core_attn_out[others] = rest
