"""Recorded drafts for the simulator: every length at every position of the target's own answers.

The target answers prompts greedily; at every position of an answer the drafter drafts 1, ..., K
tokens, so what each length would have earned is known. Text is not kept: only positions, logits
and counts are.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import torch
from forespark.benchmarks.draft_trace import DraftTrace
from forespark.training.evaluate import autocast_for
from forespark.training.folder import load_checkpoint
from forespark.training.rows import Row
from forespark.training.target import Target
from forespark.training.trace import Trace, record
from tqdm import tqdm
from transformers import AutoTokenizer


def answers(
    target: Target, folder: Path, prompts: Path, documents: int, tokens: int, longest: int
) -> list[Row]:
    """Greedy answers of `tokens` tokens to the first prompts of at most `longest` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    opener = gzip.open if prompts.suffix == ".gz" else open
    encoded = []
    with opener(prompts, "rt", encoding="utf-8") as lines:
        for line in lines:
            chat = [{"role": "user", "content": json.loads(line)["prompt"]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) <= longest:
                encoded.append(ids)
            if len(encoded) == documents:
                break
    rows = []
    for start in tqdm(range(0, len(encoded), 16), desc="answers", unit="batch"):
        batch = encoded[start : start + 16]
        for ids, answer in zip(
            batch, target.greedy(batch, tokens, {tokenizer.eos_token_id}), strict=True
        ):
            if len(answer) > 16:
                rows.append(Row(ids + answer, [0] * len(ids) + [1] * len(answer)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with `prompt`")
    parser.add_argument("--documents", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help=".npz")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = load_checkpoint(args.drafter, args.target).to(device).eval()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = Target(args.target, model.target_layer_ids, device, dtype=dtype)
    rows = answers(
        target, args.target, args.prompts, args.documents, args.tokens, args.longest_prompt
    )
    most = model.config.num_speculative_tokens
    amp = autocast_for(device)
    parts: list[Trace] = [
        record(model, target, rows, length, amp=amp, batch_size=8)
        for length in tqdm(range(1, most + 1), desc="lengths")
    ]
    starts = np.array([row.loss_mask.index(1) for row in rows])
    trace = DraftTrace.of_lengths(parts, starts)
    trace.save(args.out)
    print(f"{len(rows)} answers, {trace.num_contexts} positions, K = {most}: {args.out}")


if __name__ == "__main__":
    main()
