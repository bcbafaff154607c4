"""Weights of a large model that computes what a small one computes, one tensor at a time.

The residual stream of the large model holds `copies` equal copies of the small one's, so every
RMSNorm sees the same mean square and every value is the small model's. What writes to the stream
writes all copies; what reads it reads the first, and its weights for the others come in pairs
(R, -R) that cancel. Extra heads, MLP rows and layers have random inputs and zero outputs. Extra
vocabulary rows repeat one token that the model never ranks high.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Size:
    """What the large model looks like; the head size stays the small model's."""

    hidden: int
    inner: int
    layers: int
    draft_layers: int
    heads: int
    kv_heads: int
    vocab: int
    selector_rank: int


class Inflater:
    """Tensors of one large model from those of the small one."""

    def __init__(
        self, small: dict[str, Any], size: Size, filler_token: int, device: str, dtype: torch.dtype
    ) -> None:
        self.small, self.size, self.filler = small, size, filler_token
        self.device, self.dtype = device, dtype
        self.copies = size.hidden // small["hidden_size"]
        self.random_state = torch.Generator(device).manual_seed(0)
        self._check()

    def _check(self) -> None:
        small, size = self.small, self.size
        if size.hidden % small["hidden_size"]:
            raise ValueError(
                f"hidden: {size.hidden} is not a multiple of the small model's "
                f"{small['hidden_size']}; use a multiple"
            )
        if small["model_type"] == "llama" and size.hidden % size.heads:
            raise ValueError(
                f"heads: {size.heads} do not divide hidden size {size.hidden}, which Llama "
                "configurations require; use a divisor"
            )
        group = small["num_attention_heads"] // small["num_key_value_heads"]
        if size.heads // size.kv_heads < group or size.kv_heads < small["num_key_value_heads"]:
            raise ValueError(
                f"heads: {size.heads} on {size.kv_heads} key-value heads cannot hold the small "
                f"model's {small['num_attention_heads']} on {small['num_key_value_heads']}; use "
                "at least as many key-value heads, with as many heads on each"
            )
        if set(small.get("layer_types") or ()) - {"full_attention"}:
            raise ValueError(
                f"layer_types: {sorted(set(small['layer_types']))}; use a model whose layers all "
                "have full attention"
            )
        for name, most in (("intermediate_size", size.inner), ("vocab_size", size.vocab)):
            if small[name] > most:
                raise ValueError(
                    f"{name}: {most} is less than the small model's {small[name]}; use more"
                )

    def random(self, *shape: int, std: float = 0.02) -> torch.Tensor:
        """Filler of the output dtype."""
        values = torch.empty(*shape, device=self.device, dtype=self.dtype)
        return values.normal_(0.0, std, generator=self.random_state)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=self.device, dtype=self.dtype)

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=self.device, dtype=self.dtype)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """[h] -> [H]: a weight of every copy."""
        return self.take(weight).repeat(self.copies)

    def writes(self, weight: torch.Tensor) -> torch.Tensor:
        """[h, x] -> [H, x]: every copy gets the output."""
        return self.take(weight).repeat(self.copies, 1)

    def reads(self, weight: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """[y, h] -> [rows or y, H]: reads the first copy; the others cancel in pairs."""
        out, h = weight.shape
        big = self.zeros(out, self.size.hidden)
        big[:, :h] = self.take(weight)
        std = float(weight.float().std()) or 0.02
        for pair in range((self.copies - 1) // 2):
            filler = self.random(out, h, std=std)
            start = h * (1 + 2 * pair)
            big[:, start : start + h] = filler
            big[:, start + h : start + 2 * h] = -filler
        if rows is None or rows == out:
            return big
        return torch.cat([big, self.random(rows - out, self.size.hidden)])

    def vocabulary(self, table: torch.Tensor) -> torch.Tensor:
        """[v, x] -> [V, x]: the small table, then the filler token's row."""
        extra = self.size.vocab - table.shape[0]
        return torch.cat([table, table[self.filler].expand(extra, -1)])

    def heads(self, weight: torch.Tensor, kv: bool, head_dim: int) -> torch.Tensor:
        """Rows of q (or k, v) heads, grouped as in the small model, among random ones."""
        total = self.size.kv_heads if kv else self.size.heads
        big = self.random(total * head_dim, self.size.hidden)
        rows = self.reads(weight)
        for index, place in enumerate(self._places(kv)):
            big[place * head_dim : (place + 1) * head_dim] = rows[
                index * head_dim : (index + 1) * head_dim
            ]
        return big

    def attention_output(self, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
        """[h, heads d] -> [H, HEADS d]: zero columns for the extra heads."""
        big = self.zeros(self.size.hidden, self.size.heads * head_dim)
        rows = self.writes(weight)
        for index, place in enumerate(self._places(kv=False)):
            big[:, place * head_dim : (place + 1) * head_dim] = rows[
                :, index * head_dim : (index + 1) * head_dim
            ]
        return big

    def _places(self, kv: bool) -> list[int]:
        if kv:
            return list(range(self.small["num_key_value_heads"]))
        group = self.small["num_attention_heads"] // self.small["num_key_value_heads"]
        wide = self.size.heads // self.size.kv_heads
        return [i // group * wide + i % group for i in range(self.small["num_attention_heads"])]

    def layer(self, source: Tensors | None) -> Tensors:
        """One decoder layer by its tensors' short names; None gives a layer that adds nothing."""
        size, d = self.size, int(self.small["head_dim"])
        q, kv = size.heads * d, size.kv_heads * d
        norms = {}
        if self.small["model_type"] == "qwen3":
            for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                norms[name] = self.ones(d) if source is None else self.take(source[name])
        if source is None:
            return norms | {
                "self_attn.q_proj.weight": self.random(q, size.hidden),
                "self_attn.k_proj.weight": self.random(kv, size.hidden),
                "self_attn.v_proj.weight": self.random(kv, size.hidden),
                "self_attn.o_proj.weight": self.zeros(size.hidden, q),
                "mlp.gate_proj.weight": self.random(size.inner, size.hidden),
                "mlp.up_proj.weight": self.random(size.inner, size.hidden),
                "mlp.down_proj.weight": self.zeros(size.hidden, size.inner),
                "input_layernorm.weight": self.ones(size.hidden),
                "post_attention_layernorm.weight": self.ones(size.hidden),
            }
        down = self.zeros(size.hidden, size.inner)
        narrow = self.writes(source["mlp.down_proj.weight"])
        down[:, : narrow.shape[1]] = narrow
        return norms | {
            "self_attn.q_proj.weight": self.heads(source["self_attn.q_proj.weight"], False, d),
            "self_attn.k_proj.weight": self.heads(source["self_attn.k_proj.weight"], True, d),
            "self_attn.v_proj.weight": self.heads(source["self_attn.v_proj.weight"], True, d),
            "self_attn.o_proj.weight": self.attention_output(source["self_attn.o_proj.weight"], d),
            "mlp.gate_proj.weight": self.reads(source["mlp.gate_proj.weight"], size.inner),
            "mlp.up_proj.weight": self.reads(source["mlp.up_proj.weight"], size.inner),
            "mlp.down_proj.weight": down,
            "input_layernorm.weight": self.norm(source["input_layernorm.weight"]),
            "post_attention_layernorm.weight": self.norm(source["post_attention_layernorm.weight"]),
        }

    def draft_layer(self, source: Tensors | None, taps: int, group: int) -> Tensors:
        """A layer of the drafter: also the two grouped convolutions."""
        size, h = self.size, self.small["hidden_size"]
        layer, groups = self.layer(source), size.hidden // group
        for conv in ("attention_conv", "mlp_conv"):
            base = self.zeros(2, taps, size.hidden)
            base[:, 0] = 1.0
            projection = self.zeros(2 * taps * groups, size.hidden)
            if source is not None:
                base = self.take(source[f"{conv}.base_kernel"]).repeat(1, 1, self.copies)
                narrow = self.reads(source[f"{conv}.kernel_projection.weight"])
                # Rows by (side, tap, group): each copy has its own groups.
                grouped = narrow.view(2, taps, h // group, size.hidden)
                projection = grouped.repeat(1, 1, self.copies, 1).view(-1, size.hidden)
            layer[f"{conv}.base_kernel"] = base
            layer[f"{conv}.kernel_projection.weight"] = projection.contiguous()
        return layer


def layers_of(tensors: Tensors, prefix: str) -> list[Tensors]:
    """The small model's layers in order, by their tensors' short names."""
    found: dict[int, Tensors] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            index, short = name.removeprefix(prefix).split(".", 1)
            found.setdefault(int(index), {})[short] = tensor
    return [found[index] for index in sorted(found)]


def shape_keys(size: Size, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
    }
