"""What verification keeps of a draft for the commit, and where the states of all layers are.

A state per drafted token would cost 2 MB a layer and request. The factors of up to 16 tokens cost
0.3 MB and rebuild the state after any accepted prefix (HybridSpec, section 3.4 and appendix C.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_TOKENS = 16  # tokens of one request per round: the anchor and up to 15 drafts
HEAD_SIZES = (16, 32, 64, 128)
STATE_DTYPES = (torch.float32, torch.bfloat16)
QKV_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class GdnFactors:
    """Compact factors of L layers and N batch rows; `layer` gives the views of one layer.

    `verify` writes every field of the rows it is given, so nothing needs clearing in between.
    """

    z: torch.Tensor  # f32 [L, N, HV, V, 16], what each token writes to the state, token fastest
    k: torch.Tensor  # dtype of the keys [L, N, H, 16, K], raw: exact, normalised where it is used
    g: torch.Tensor  # f32 [L, N, HV, 16], log decay of each token (not cumulative)
    slot: torch.Tensor  # i32 [L, N], block id of the state that was read; 0: padding
    width: torch.Tensor  # i32 [L, N], tokens kept, 0..16

    @classmethod
    def allocate(
        cls,
        layers: int,
        rows: int,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> GdnFactors:
        """A workspace whose rows hold no tokens."""
        heads = (layers, rows, value_heads)
        return cls(
            z=torch.zeros(*heads, value_size, MAX_TOKENS, device=device),
            k=torch.zeros(
                layers, rows, key_heads, MAX_TOKENS, key_size, dtype=dtype, device=device
            ),
            g=torch.zeros(*heads, MAX_TOKENS, device=device),
            slot=torch.zeros(layers, rows, dtype=torch.int32, device=device),
            width=torch.zeros(layers, rows, dtype=torch.int32, device=device),
        )

    def layer(self, index: int) -> GdnFactors:
        """Views of one layer, L = 1."""
        one = slice(index, index + 1)
        return GdnFactors(self.z[one], self.k[one], self.g[one], self.slot[one], self.width[one])

    def bytes_per_row(self) -> int:
        """Bytes of one request over all layers."""
        fields = (self.z, self.k, self.g, self.slot, self.width)
        return sum(field[:, :1].numel() * field.element_size() for field in fields)


@dataclass(frozen=True)
class GdnStates:
    """The states of L layers as one table, so that one launch reaches them all.

    The table holds addresses: build it again whenever a state tensor is allocated again.
    """

    tensors: tuple[torch.Tensor, ...]  # L times [slots, HV, V, K], only the slot stride may differ
    pointers: torch.Tensor  # i64 [L]
    slot_strides: torch.Tensor  # i64 [L], in elements

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> GdnStates:
        """Raises ValueError on an empty list, mixed dtypes or shapes, or gaps inside a slot."""
        if not tensors:
            raise ValueError("GdnStates: no state tensors; give one per GDN layer")
        first = tensors[0]
        for index, state in enumerate(tensors):
            name = f"GdnStates: layer {index}"
            check_state(name, state)
            same = (state.dtype, state.shape[1:], state.device)
            if same != (first.dtype, first.shape[1:], first.device):
                raise ValueError(
                    f"{name} is {state.dtype} {list(state.shape)} on {state.device}, layer 0 is "
                    f"{first.dtype} {list(first.shape)} on {first.device}; one launch needs equal "
                    "dtypes, head shapes and devices"
                )
        device = first.device
        return cls(
            tensors=tuple(tensors),
            pointers=torch.tensor([state.data_ptr() for state in tensors], device=device),
            slot_strides=torch.tensor([state.stride(0) for state in tensors], device=device),
        )


def check_state(name: str, state: torch.Tensor) -> None:
    """Raise ValueError unless `state` is [slots, HV, V, K] as the kernels address it."""
    problem = None
    if state.dtype not in STATE_DTYPES:
        problem = "its dtype must be torch.float32 or torch.bfloat16"
    elif state.dim() != 4 or not {*state.shape[2:]} <= {*HEAD_SIZES}:
        problem = f"its shape must be [slots, HV, V, K] with V and K in {HEAD_SIZES}"
    elif state.shape[0] and not state[0].is_contiguous():
        problem = "a slot must be contiguous (only the slot stride is free)"
    elif state.stride(0) % 16 or state.data_ptr() % 16:
        problem = "its slots must be aligned to 16 elements and 16 bytes"
    if problem:
        raise ValueError(
            f"{name} is {state.dtype} {list(state.shape)} with strides {list(state.stride())}; "
            f"{problem}"
        )
