"""A prompt of one token that the scheduler pads with placeholder drafts.

vLLM pads it to K + 1 tokens beside running requests and runs it as a prefill, whose state cannot
leave the placeholders out again (it runs a padded *last* token of a prompt as a draft, not an only
one). Here it runs as a draft too, from a state and a window of zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def padded_prompts(batch: Any) -> np.ndarray:  # bool [n]
    """Rows of the batch that are such prompts: nothing else has drafts while it is prefilled."""
    nothing = np.zeros(batch.num_reqs, dtype=bool)
    drafts, as_drafts = batch.num_draft_tokens_per_req, batch.prefill_runs_as_decode_np
    if drafts is None:
        return nothing
    known = nothing if as_drafts is None else as_drafts
    return batch.is_prefilling_np & (drafts > 0) & ~known


def run_as_drafts(
    batch: Any,
    block_tables: tuple[torch.Tensor, ...],  # a cache group each, i32 [>= n, blocks]
    groups: list[Any],  # vLLM's cache groups, in the same order
    context: dict[str, Any],  # layers by name
) -> None:
    """Clear the states of such prompts and mark them as drafts."""
    rows = padded_prompts(batch)
    if not rows.any():
        return
    known = batch.prefill_runs_as_decode_np
    batch.prefill_runs_as_decode_np = rows if known is None else rows | known
    at = torch.from_numpy(rows.nonzero()[0])
    for table, group in zip(block_tables, groups, strict=True):
        recurrent = [context[n] for n in group.layer_names if hasattr(context[n], "workspace")]
        for layer in recurrent:
            slots = table[at.to(table.device), 0].long()
            for cache in layer.kv_cache:
                cache[slots] = 0
