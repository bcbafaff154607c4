"""Which torch implementation stands in for which Triton kernel of vLLM 0.32.

vLLM's dispatcher (`register_kernels`) is the platform hook for exactly this: it rebinds every
holder of a kernel to the implementation. Without a Triton backend the kernels are plain functions
that nothing could launch, so on a CPU there is nothing else they could mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forespark.cpu_mode import (
    kernels_accept,
    kernels_blocks,
    kernels_drafting,
    kernels_estimator,
    kernels_hybrid,
    kernels_inputs,
    kernels_logits,
    kernels_rejection,
    kernels_resample,
    kernels_sampling,
    kernels_thinking,
)

_RUNNER = "vllm.v1.worker.gpu"
_REJECTION = f"{_RUNNER}.spec_decode.rejection_sampler_utils"
_ESTIMATOR = f"{_RUNNER}.spec_decode.acceptance_estimator"
_DFLASH2 = f"{_RUNNER}.spec_decode.dflash2.speculator"

KERNELS: dict[str, Callable[..., Any]] = {
    f"{_RUNNER}.input_batch._prepare_prefill_inputs_kernel": kernels_inputs.prepare_prefill_inputs,
    f"{_RUNNER}.input_batch._prepare_pos_seq_lens_kernel": kernels_inputs.prepare_pos_seq_lens,
    f"{_RUNNER}.input_batch._combine_sampled_and_draft_tokens_kernel": (
        kernels_inputs.combine_sampled_and_draft_tokens
    ),
    f"{_RUNNER}.input_batch._get_num_sampled_and_rejected_kernel": (
        kernels_inputs.num_sampled_and_rejected
    ),
    f"{_RUNNER}.input_batch._post_update_kernel": kernels_inputs.post_update,
    f"{_RUNNER}.input_batch._post_update_num_computed_tokens_kernel": (
        kernels_inputs.post_update_num_computed_tokens
    ),
    f"{_RUNNER}.input_batch._expand_idx_mapping_kernel": kernels_inputs.expand_idx_mapping,
    f"{_RUNNER}.spec_decode.rejection_sampler._flatten_sampled_kernel": (
        kernels_inputs.flatten_sampled
    ),
    f"{_RUNNER}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": (
        kernels_inputs.gather_draft_sampled
    ),
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": kernels_hybrid.zero_kv_blocks,
    f"{_RUNNER}.model_states.mamba_hybrid._scatter_num_accepted_kernel": (
        kernels_hybrid.scatter_num_accepted
    ),
    f"{_RUNNER}.model_states.mamba_hybrid._fill_num_accepted_kernel": (
        kernels_hybrid.fill_num_accepted
    ),
    f"{_RUNNER}.buffer_utils._apply_write_kernel": kernels_blocks.apply_write,
    f"{_RUNNER}.block_table._gather_block_tables_kernel": kernels_blocks.gather_block_tables,
    f"{_RUNNER}.block_table._compute_slot_mappings_kernel": kernels_blocks.compute_slot_mappings,
    f"{_RUNNER}.sample.gumbel._temperature_kernel": kernels_sampling.temperature,
    f"{_RUNNER}.sample.gumbel._gumbel_sample_kernel": kernels_sampling.gumbel_sample,
    f"{_RUNNER}.sample.logprob._topk_log_softmax_kernel": kernels_sampling.topk_log_softmax,
    f"{_RUNNER}.sample.logprob._ranks_kernel": kernels_sampling.ranks,
    f"{_RUNNER}.sample.logprob._fill_logprob_token_ids_kernel": (
        kernels_sampling.fill_logprob_token_ids
    ),
    f"{_RUNNER}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": (
        kernels_sampling.prompt_logprobs_token_ids
    ),
    f"{_RUNNER}.sample.output._compact_sampling_mask_kernel": (
        kernels_sampling.compact_sampling_mask
    ),
    f"{_RUNNER}.metrics.logits._num_nans_kernel": kernels_sampling.num_nans,
    f"{_RUNNER}.sample.min_p._min_p_kernel": kernels_logits.min_p,
    f"{_RUNNER}.sample.penalties._penalties_kernel": kernels_logits.penalties,
    f"{_RUNNER}.sample.penalties._bincount_kernel": kernels_logits.bincount,
    f"{_RUNNER}.sample.logit_bias._bias_kernel": kernels_logits.logit_bias,
    f"{_RUNNER}.sample.bad_words._bad_words_kernel": kernels_logits.bad_words,
    f"{_RUNNER}.structured_outputs._apply_grammar_bitmask_kernel": kernels_logits.grammar_bitmask,
    f"{_RUNNER}.sample.thinking_budget._update_committed_marker_cache_kernel": (
        kernels_thinking.update_marker_cache
    ),
    f"{_RUNNER}.sample.thinking_budget._thinking_budget_kernel": kernels_thinking.thinking_budget,
    f"{_REJECTION}._compute_local_logits_stats_kernel": kernels_rejection.local_logits_stats,
    f"{_REJECTION}._compute_cumulative_log_p_kernel": kernels_rejection.cumulative_log_p,
    f"{_REJECTION}._compute_local_residual_mass_kernel": kernels_rejection.local_residual_mass,
    f"{_REJECTION}._rejection_kernel": kernels_accept.rejection,
    f"{_REJECTION}._resample_kernel": kernels_resample.resample,
    f"{_REJECTION}._insert_resampled_kernel": kernels_resample.insert_resampled,
    f"{_RUNNER}.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
        kernels_drafting.prepare_dflash_inputs
    ),
    f"{_DFLASH2}._selector_walk_kernel": kernels_drafting.selector_walk,
    f"{_DFLASH2}._cache_draft_logits_kernel": kernels_drafting.cache_draft_logits,
    f"{_ESTIMATOR}._local_max_sumexp_kernel": kernels_estimator.local_max_sumexp,
    f"{_ESTIMATOR}._predict_kernel": kernels_estimator.predict,
    f"{_ESTIMATOR}._accumulate_kernel": kernels_estimator.accumulate,
    f"{_ESTIMATOR}._refit_kernel": kernels_estimator.refit,
}


# Kernels of the V2 runner without a CPU implementation, and the feature that launches them.
REFUSED: dict[str, str] = {
    **{
        f"{_RUNNER}.spec_decode.target_dependent_ar.speculator.{kernel}": (
            "an autoregressive drafter (EAGLE, MTP)"
        )
        for kernel in (
            "_prepare_prefill_inputs_kernel",
            "_prepare_decode_inputs_kernel",
            "_update_draft_inputs_kernel",
        )
    },
    f"{_RUNNER}.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": (
        "a standalone draft model"
    ),
    f"{_RUNNER}.spec_decode.multi_module_mtp.speculator._prepare_input_buffers_kernel": (
        "a multi-module MTP drafter"
    ),
    f"{_RUNNER}.sample.watermark._philox_gumbel_kernel": "watermarking",
    f"{_RUNNER}.sample.trace_replay._trace_replay_kernel": "trace replay",
    f"{_RUNNER}.mm.rope._prepare_rope_positions_kernel": "multimodal rotary positions",
}


def _refuse(feature: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise ValueError(
            f"{feature}: CPU mode has no kernel for it; a DFlash or DFlash2 drafter, or the target "
            "alone, works on a CPU"
        )

    return refuse


def register_torch_kernels() -> None:
    """Register every implementation once (imports the modules that own the kernels)."""
    from vllm.triton_utils import dispatcher

    implementations = KERNELS | {name: _refuse(feature) for name, feature in REFUSED.items()}
    missing = {n: impl for n, impl in implementations.items() if n not in dispatcher._registry}
    if missing:
        dispatcher.register_kernels(missing)
