"""What ForeSpark cannot serve yet: checked before the engine starts, one clear line each.

Works on the attributes of vLLM's engine arguments and imports nothing of vLLM itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

_ONE_ONLY = {
    "pipeline_parallel_size": "draft scores exist on the last stage only; "
    "use 1 and tensor_parallel_size for more GPUs",
    "data_parallel_size": "ranks would choose different batch shapes; "
    "use 1 and start one server per replica",
    "decode_context_parallel_size": "the drafter's cache is not split over ranks; use 1",
    "prefill_context_parallel_size": "the drafter's cache is not split over ranks; use 1",
}
_NOT_WITH = {
    "enable_lora": "adapter rows are mapped before drafts are trimmed; "
    "merge the adapter into the target, or leave LoRA off",
    "kv_transfer_config": "a KV connector does not carry the drafter's cache; leave it out",
    "kv_offloading_size": "a KV connector does not carry the drafter's cache; leave it out",
    "watermark_config": "drafted tokens are not watermarked; leave it out",
    "diffusion_config": "diffusion targets have no draft to verify; leave it out",
    "enable_return_routed_experts": "rows of rejected drafts are trimmed; leave it out",
    "return_sampling_mask": "mask rows of rejected drafts are trimmed; leave it out",
    "enable_batch_sharded_sampling": "shards are planned before drafts are trimmed; leave it out",
    "enable_dbo": "a step is not split into two micro-batches; leave it out",
    "spec_method": "write method in the ForeSpark settings",
    "spec_model": "write model in the ForeSpark settings",
    "spec_tokens": "write num_speculative_tokens in the ForeSpark settings",
}


def check_combination(args: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ValueError for the first engine argument ForeSpark does not work with."""
    for key, advice in _ONE_ONLY.items():
        value = getattr(args, key, 1)
        if value is not None and value > 1:
            raise ValueError(f"{key}: {value} is not supported with method forespark: {advice}")
    for key, advice in _NOT_WITH.items():
        value = getattr(args, key, None)
        if value not in (None, False):
            raise ValueError(f"{key}: {value!r} is not supported with method forespark: {advice}")
    runner = environment.get(RUNNER_VARIABLE)
    if runner is not None and runner.strip().lower() in ("0", "false"):
        raise ValueError(
            f"{RUNNER_VARIABLE}: {runner} selects the V1 model runner, method forespark needs V2; "
            f"unset it or set {RUNNER_VARIABLE}=1"
        )


def fit_batch(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int,
    *,
    seqs_given: bool,
    tokens_given: bool,
) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens) with room for every running request's draft.

    vLLM's scheduler charges a running request 1 + K verified and K drafted tokens, and silently
    skips requests that do not fit. What the user gave is kept; a default gives way. ValueError
    when both were given and do not fit.
    """
    per_request = 2 * num_speculative_tokens + 1
    needed = max_num_seqs * per_request
    if max_num_batched_tokens >= needed:
        return max_num_seqs, max_num_batched_tokens
    fitting = max_num_batched_tokens // per_request
    if seqs_given and tokens_given or fitting < 1:
        works = f"max_num_batched_tokens >= {needed if seqs_given else per_request}"
        if fitting >= 1:
            works += f", or max_num_seqs <= {fitting}"
        raise ValueError(
            f"max_num_batched_tokens: {max_num_batched_tokens} is too small for max_num_seqs "
            f"{max_num_seqs} at num_speculative_tokens {num_speculative_tokens} "
            f"({max_num_seqs} x (2K + 1) = {needed}); use {works}"
        )
    if seqs_given:
        return max_num_seqs, needed
    return fitting, max_num_batched_tokens
