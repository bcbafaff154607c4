"""The frozen target inside the training loop: features on the fly and greedy text on a CPU.

Hidden-state ids follow speculators: id i is the input of layer i (Hugging Face's
`hidden_states[i]`), and the last state is the one before the final norm, which the training model
applies itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Target:
    """A Hugging Face causal language model with taps on the input of chosen layers."""

    def __init__(
        self,
        path: str | Path,
        aux_layers: list[int],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.aux_layers = aux_layers
        self._taps: dict[int, torch.Tensor] = {}
        layers = self.model.model.layers
        if max(aux_layers, default=0) > len(layers):
            raise ValueError(
                f"aux_layers: {aux_layers} reach past the target's {len(layers)} layers; "
                f"use ids 0..{len(layers)}"
            )
        for index in (*aux_layers, len(layers)):
            module = layers[index] if index < len(layers) else self.model.model.norm
            module.register_forward_pre_hook(self._tap(index), with_kwargs=True)

    def _tap(self, index: int):  # noqa: ANN202 - a hook
        def hook(_module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self._taps[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    @torch.no_grad()
    def features(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, S, n_aux * H] and last states [B, S, H] of right-padded ids [B, S].

        Padding on the right needs no mask: attention is causal.
        """
        self._taps.clear()
        self.model.model(input_ids=ids.to(self.device), use_cache=False)
        last = self._taps[len(self.model.model.layers)]
        return torch.cat([self._taps[i] for i in self.aux_layers], dim=-1), last

    @torch.no_grad()
    def greedy(
        self, prompts: list[list[int]], max_new_tokens: int, eos_ids: set[int]
    ) -> list[list[int]]:
        """Greedy answers of one batch of prompts, each up to and including its end token."""
        width = max(map(len, prompts))
        pad = min(eos_ids)
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        start = torch.tensor([width - len(p) for p in prompts], device=self.device)
        mask = (torch.arange(width, device=self.device) >= start[:, None]).long()
        position = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        ends = torch.tensor(sorted(eos_ids), device=self.device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        columns = []
        for _ in range(max_new_tokens):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            token = output.logits[:, -1].argmax(-1)
            columns.append(token)
            done |= torch.isin(token, ends)
            if done.all():
                break
            ids, position = token[:, None], position[:, -1:] + 1
            mask = torch.cat((mask, mask.new_ones(len(prompts), 1)), dim=1)
        rows = torch.stack(columns, dim=1).tolist()
        return [_until_end(row, eos_ids) for row in rows]


def _until_end(tokens: list[int], eos_ids: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1]
    return tokens
