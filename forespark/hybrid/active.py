"""Whether an engine serves a Gated DeltaNet target this way. Everything else stays stock vLLM.

It does with method forespark, with adaptive verification (which vLLM refuses on such a target), or
when `additional_config` says `forespark_hybrid: true` (plain DFlash at full length).
"""

from __future__ import annotations

from typing import Any

from forespark.engine_args import SETTINGS_KEY

SWITCH = "forespark_hybrid"
ARCHITECTURES = ("Qwen3Next", "Qwen3_5")  # beginnings of the names; MTP drafters are no targets


def gdn_layers(vllm_config: Any) -> int:
    """Number of Gated DeltaNet layers of the target, 0 for other targets."""
    model = vllm_config.model_config
    if model is None or not model.architecture.startswith(ARCHITECTURES):
        return 0
    types = getattr(model.hf_text_config, "layer_types", None) or ()
    return list(types).count("linear_attention")


def drafts_compactly(vllm_config: Any) -> bool:
    """Whether drafts of this engine are verified without a state per token."""
    spec, extra = vllm_config.speculative_config, vllm_config.additional_config
    extra = extra if isinstance(extra, dict) else {}
    if spec is None or not gdn_layers(vllm_config):
        return False
    return bool(SETTINGS_KEY in extra or spec.enable_adaptive_verification or extra.get(SWITCH))


def runs_in_torch(vllm_config: Any) -> bool:
    """Whether the layers run in plain torch: on a CPU, compactly or in a dtype vLLM refuses."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not gdn_layers(vllm_config):
        return False
    return drafts_compactly(vllm_config) or vllm_config.model_config.dtype == torch.float32
