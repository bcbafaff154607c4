"""Random Gated DeltaNet layers for `benchmarks/kernels/gdn.py`: ours, and vLLM's on equal data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from . import timing as _timing  # noqa: F401  # makes a plain checkout importable

from forespark.triton_kernels.gdn_commit import launch_gdn_commit  # isort: skip
from forespark.triton_kernels.gdn_ref import gdn_commit_ref, gdn_verify_ref  # isort: skip
from forespark.triton_kernels.gdn_types import GdnFactors, GdnStates  # isort: skip
from forespark.triton_kernels.gdn_verify import launch_gdn_verify  # isort: skip

COLUMNS = 16  # of vLLM's table of state slots: one per token of the longest draft


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `want`."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


@dataclass(frozen=True)
class Shape:
    """Sizes of the layers; the defaults are the model's."""

    layers: int = 30
    key_heads: int = 16
    value_heads: int = 32
    size: int = 128  # K = V

    def state_bytes(self) -> int:
        """Bytes of one float32 state."""
        return 4 * self.value_heads * self.size * self.size


@dataclass
class Case:
    """Inputs of B requests with w tokens each; `verify` and `commit` run every layer."""

    shape: Shape
    requests: int
    tokens: int
    device: torch.device
    inputs: dict[str, torch.Tensor] = field(init=False)  # what all layers share
    pools: list[torch.Tensor] = field(init=False)  # L times [B + 1, HV, V, K]

    def __post_init__(self) -> None:
        shape, rows = self.shape, self.requests * self.tokens
        heads, size = shape.value_heads, shape.size
        generator = torch.Generator(self.device).manual_seed(rows)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, device=self.device)

        width = (2 * shape.key_heads + heads) * size
        slots = torch.randperm(self.requests, generator=generator, device=self.device) + 1
        steps = torch.arange(self.requests + 1, device=self.device) * self.tokens
        self.inputs = {
            "mixed_qkv": normal(rows, width).bfloat16(),
            "a": normal(rows, heads).bfloat16(),
            "b": normal(rows, heads).bfloat16(),
            "a_log": normal(heads).abs(),
            "dt_bias": normal(heads),
            "slots": slots.int(),
            "cu_seqlens": steps.int(),
        }
        self.pools = [
            normal(self.requests + 1, heads, size, size) * 0.1 for _ in range(shape.layers)
        ]
        self.states = GdnStates.of(self.pools)
        self.factors = GdnFactors.allocate(
            shape.layers,
            self.requests,
            shape.key_heads,
            heads,
            size,
            size,
            device=self.device,
        )
        self.layers = [self.factors.layer(index) for index in range(shape.layers)]
        self.out = torch.zeros(rows, heads, size, dtype=torch.bfloat16, device=self.device)
        self.gate = normal(rows, heads, size).bfloat16()
        self.norm_weight = normal(size).bfloat16()
        self.accepted = torch.full_like(self.inputs["slots"], self.tokens)

    def verify(self, **tiles: Any) -> None:
        """All layers, one launch each."""
        for state, factors in zip(self.pools, self.layers, strict=True):
            launch_gdn_verify(**self.inputs, state=state, out=self.out, factors=factors, **tiles)

    def verify_and_norm(self) -> None:
        """All layers with the gated norm in the same launch."""
        self.verify(gate=self.gate, norm_weight=self.norm_weight)

    def commit(self, **tiles: Any) -> None:
        """All layers, one launch."""
        launch_gdn_commit(self.states, self.factors, self.accepted, **tiles)

    def both(self) -> None:
        """What a round pays when nothing overlaps the commit."""
        self.verify()
        self.commit()

    def errors(self, dtype: torch.dtype, **tiles: Any) -> dict[str, float]:
        """Relative errors of the first layer against float64: outputs in `dtype`, z, state."""
        state, factors = self.pools[0].clone(), self.layers[0]
        exact = GdnFactors(
            *(torch.zeros_like(x) for x in (factors.z, factors.k, factors.g)),
            torch.zeros_like(factors.slot),
            torch.zeros_like(factors.width),
        )
        out, want = self.out.to(dtype), self.out.double()
        launch_gdn_verify(**self.inputs, state=state, out=out, factors=factors, **tiles)
        gdn_verify_ref(**self.inputs, state=state, out=want, factors=exact)
        after = state.double()
        launch_gdn_commit(GdnStates.of([state]), factors, self.accepted)
        gdn_commit_ref([after], exact, self.accepted)
        return {
            "out_error": relative(out, want),
            "z_error": relative(factors.z, exact.z),
            "state_error": relative(state[1:], after[1:]),
        }


class VllmCase:
    """The same inputs in the form of vLLM's kernel: a slot per token, all written each round."""

    name = "vLLM 0.32 Triton fused_sigmoid_gating_delta_rule_update, BV 32, 4 warps, 3 stages"

    def __init__(self, case: Case) -> None:
        from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import (
            fused_sigmoid_gating_delta_rule_update,
        )

        self.update = fused_sigmoid_gating_delta_rule_update
        shape, inputs, requests = case.shape, case.inputs, case.requests
        keys = shape.key_heads * shape.size
        q, k, v = inputs["mixed_qkv"].split([keys, keys, shape.value_heads * shape.size], 1)
        self.qkv = [x.unflatten(1, (-1, shape.size))[None].contiguous() for x in (q, k, v)]
        self.gates = [inputs[name] for name in ("a_log", "a", "b", "dt_bias")]
        slots = torch.zeros(requests, COLUMNS, dtype=torch.int32, device=case.device)
        count = requests * case.tokens
        order = torch.arange(1, count + 1, dtype=torch.int32, device=case.device)
        slots[:, : case.tokens] = order.view(requests, -1)
        self.options = {
            "cu_seqlens": inputs["cu_seqlens"],
            "ssm_state_indices": slots,
            "num_accepted_tokens": case.accepted,
            "use_qk_l2norm_in_kernel": True,
        }
        # A state each token writes: 63 GB at 64 requests of 16 tokens.
        sizes = (count + 1, *case.pools[0].shape[1:])
        self.pools = [torch.zeros(sizes, device=case.device) for _ in case.pools]
        for pool, ours in zip(self.pools, case.pools, strict=True):
            pool[slots[:, case.tokens - 1].long()] = ours[inputs["slots"].long()]

    def verify(self) -> torch.Tensor:
        """All layers; the last layer's outputs."""
        a_log, a, b, dt_bias = self.gates
        for pool in self.pools:
            options = {"initial_state": pool, **self.options}
            out, _ = self.update(a_log, a, b, dt_bias, *self.qkv, **options)
        return out
