"""Recorded drafts for calibration and the simulator: every length at every position of answers.

The target answers prompts greedily; at every position of an answer the drafter drafts 1, ..., K
tokens, so what each length would have earned is known. Drafts that reach past an answer's end are
left out: the end would cut them short. Text is not kept: only positions, logits and counts are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forespark.calibration.origin import Origin
from forespark.calibration.trace_file import check_name, save_trace
from forespark.calibration.traces import DraftTrace
from forespark.training.evaluate import autocast_for
from forespark.training.folder import load_checkpoint
from forespark.training.prompts import read_prompts
from forespark.training.rows import Row
from forespark.training.target import Target
from forespark.training.trace import Trace, record_lengths
from tqdm import tqdm
from transformers import AutoTokenizer

_BATCH = 8  # documents


def encode(tokenizer: Any, prompts: Path, documents: int, longest: int) -> list[list[int]]:
    """Token ids of the first prompts of at most `longest` tokens, as one chat turn each.

    Raises ValueError when there is none.
    """
    encoded: list[list[int]] = []
    for turns in read_prompts(prompts).conversations:
        chat = [{"role": "user", "content": turns[0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= longest:
            encoded.append(ids)
        if len(encoded) == documents:
            break
    if not encoded:
        raise ValueError(f"prompts: {prompts} has none of at most {longest} tokens; use another")
    return encoded


def answers(
    target: Target, folder: Path, prompts: Path, documents: int, tokens: int, longest: int
) -> list[Row]:
    """Greedy answers of `tokens` tokens to the first prompts of at most `longest` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = encode(tokenizer, prompts, documents, longest)
    rows = []
    for start in tqdm(range(0, len(encoded), 16), desc="answers", unit="batch"):
        batch = encoded[start : start + 16]
        for ids, answer in zip(
            batch, target.greedy(batch, tokens, {tokenizer.eos_token_id}), strict=True
        ):
            if len(answer) > 16:
                rows.append(Row(ids + answer, [0] * len(ids) + [1] * len(answer)))
    return rows


def collect(
    target_folder: Path,
    drafter: Path,
    prompts: Path,
    out: Path,
    documents: int,
    tokens: int,
    device: str | None = None,
    *,
    stride: int = 1,
    longest: int = 200,
    say: Callable[[str], None] = print,
) -> None:
    """Write the trace of a pair to `out`, with every `stride`-th position of an answer.

    Neighbouring positions say much the same: a fit wants many answers, the simulator whole ones.
    Raises ValueError when no prompt can be used or `out` has another ending than .npz, .parquet.
    """
    check_name(out)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_checkpoint(drafter, target_folder).to(place).eval()
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    target = Target(target_folder, model.target_layer_ids, place, dtype=dtype)
    rows = answers(target, target_folder, prompts, documents, tokens, longest)
    most = model.config.num_speculative_tokens
    if not any(sum(row.loss_mask) > most for row in rows):
        raise ValueError(
            f"prompts: {prompts} gives no answer longer than K = {most} tokens; use others"
        )
    amp = autocast_for(place)
    parts: list[list[Trace]] = [[] for _ in range(most)]
    for first in tqdm(range(0, len(rows), _BATCH), desc="drafts", unit="batch"):
        batch = rows[first : first + _BATCH]
        lengths = range(1, most + 1)
        found = record_lengths(
            model, target, batch, lengths, amp=amp, stride=stride, batch_size=_BATCH
        )
        for held, part in zip(parts, found, strict=True):
            part.document += first
            held.append(part)
    merged = [Trace.join(held) for held in parts]
    starts = np.array([row.loss_mask.index(1) for row in rows])
    # A draft that reaches past the answer's end is cut short by it.
    whole = merged[-1].exists.all(axis=1)
    trace = DraftTrace.of_lengths(
        [part.select(whole) for part in merged], starts, Origin.of_checkpoint(drafter)
    )
    save_trace(trace, out)
    say(f"{len(rows)} answers, {trace.num_contexts} positions, K = {most}: {out}")
