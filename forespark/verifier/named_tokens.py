"""Scores of the tokens that a request names (`logprob_token_ids`), also where drafts are verified.

vLLM's plain sampler returns them; its rejection sampler looks at `logprobs` alone, so a step with
drafts returns no entry at all for such a request, and over HTTP it ends in a 500.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def score_named_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `RejectionSampler._verify_in_chunks`."""

    @functools.wraps(original)
    def verify_in_chunks(self: Any, logits: Any, input_batch: Any, *args: Any, **kw: Any) -> Any:
        wanted = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        if wanted is None or wanted[1] == 0:
            return original(self, logits, input_batch, *args, **kw)
        # Hides the method of that name for this call; chunks come in the order of their rows.
        self._get_logprobs_tensors = _Scores(self, input_batch, *wanted)
        try:
            return original(self, logits, input_batch, *args, **kw)
        finally:
            del self._get_logprobs_tensors

    return verify_in_chunks


class _Scores:
    """Takes the arguments of `RejectionSampler._get_logprobs_tensors`."""

    def __init__(self, rejection: Any, input_batch: Any, num_logprobs: int, num_named: int) -> None:
        self._rejection = rejection
        self._row_slots = input_batch.expanded_idx_mapping  # row -> request slot
        self._num_logprobs = num_logprobs
        self._num_named = num_named
        self._done = 0  # rows of the chunks before

    def __call__(
        self,
        sampled: Any,  # [n, K + 1]
        num_sampled: Any,  # [n]
        logits: Any,  # [rows, vocabulary]
        cu_num_logits: Any,  # [n + 1], on the device
        cu_num_logits_np: Any,  # [n + 1], before trimming
        _: int,
    ) -> Any:
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as module

        num_reqs, rows = cu_num_logits.shape[0] - 1, logits.shape[0]
        flat = sampled.new_zeros(rows)
        module._flatten_sampled_kernel[(num_reqs,)](
            flat, sampled, sampled.stride(0), num_sampled, cu_num_logits, num_warps=1
        )
        trimmed = self._rejection.enable_adaptive_verification
        bounds = cu_num_logits.clone() if trimmed else cu_num_logits_np.tolist()
        slots = self._row_slots[self._done : self._done + rows]
        self._done += rows
        sampler = self._rejection.sampler
        return module.compute_topk_scores(
            logits,
            self._num_logprobs,
            flat,
            bounds if rows != num_reqs else None,
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=slots,
            max_per_req_token_ids=self._num_named,
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
