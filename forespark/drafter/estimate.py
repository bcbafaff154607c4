"""The estimators on the device, inside the drafter's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from forespark.estimators.checkpoint import FOLDER, Estimators
from forespark.estimators.post_draft import post_survival
from forespark.triton_kernels.envelope import envelope


class DeviceEstimators:
    """Both estimators in the drafter's dtype and on its device, with their calibration."""

    def __init__(
        self,
        estimators: Estimators,
        model: nn.Module,  # the loaded DFlash2 drafter (vLLM's ForCausalLM)
        dtype: torch.dtype,
        device: torch.device,
        single_curve: bool,
    ) -> None:
        self.pre_draft = estimators.pre_draft.to(device=device, dtype=dtype).eval()
        self.post_draft = estimators.post_draft.to(device=device, dtype=dtype).eval()
        self.directional = estimators.directional
        self.single_curve = single_curve
        self.scale, self.bias = _pair(estimators.scale, estimators.bias, device)
        self.temperature = (
            None if estimators.temperature is None else estimators.temperature.to(device)
        )
        self._drafter = model.model

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of both estimators by name."""
        for part in ("pre_draft", "post_draft"):
            for name, weight in getattr(self, part).named_parameters():
                yield f"{FOLDER}/{part}.{name}", weight

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything both estimators compute with, calibration included, by name."""
        calibration = {"scale": self.scale, "bias": self.bias, "temperature": self.temperature}
        given = {name: value for name, value in calibration.items() if value is not None}
        return {**dict(self.named_parameters()), **given}

    def scores(
        self,
        context: torch.Tensor,  # [n, H] rows of H_feat before its norm
        anchors: torch.Tensor,  # i64 [n]
        limits: torch.Tensor,  # i32 [n]
        out: torch.Tensor,  # f32 [n, K], written: the survival scores g
        mark: Callable[[str], object] = str,  # told when the next stage begins
    ) -> torch.Tensor:
        """z f32 [n, K(K+1)/2], the pre-draft logits behind `out` (section 4.2)."""
        feature = self._drafter.hidden_norm(context)
        logits = self.pre_draft(feature, self._drafter.embed_tokens(anchors))
        mark("envelope")
        envelope(
            logits.contiguous(),
            self.scale,
            self.bias,
            limits,
            out,
            single_curve=self.single_curve,
            directional=self.directional,
        )
        return logits

    def post_logits(
        self,
        hidden: torch.Tensor,  # [R, H] drafter hidden states of the drafted rows
        previous: torch.Tensor,  # i64 [R]: x_{j-1}, the anchor for j = 1
        drafted: torch.Tensor,  # i64 [R]: x_j
    ) -> torch.Tensor:
        """Acceptance logits f32 [R]. `drafted` is not read: that is what keeps sampling exact."""
        del drafted
        table = self._drafter.candidate_selector.predecessor_codebook
        return self.post_draft(hidden, table[previous])

    def post_survival(self, logits: torch.Tensor, draft_lens: torch.Tensor) -> torch.Tensor:
        """S~ f32 [n, K] from logits [n, K] and lengths [n] (equation 5)."""
        return post_survival(logits, draft_lens, self.temperature)


def _pair(
    scale: torch.Tensor | None, bias: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and bias together or not at all, as the kernel takes them."""
    given = scale if scale is not None else bias
    if given is None:
        return None, None
    scale = torch.ones_like(given) if scale is None else scale
    bias = torch.zeros_like(given) if bias is None else bias
    return scale.to(device).contiguous(), bias.to(device).contiguous()
