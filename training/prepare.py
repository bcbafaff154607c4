"""Preparing a set: prompts, the target's own answers to them, token rows (section A, Training)."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forespark.training.corpus import stdlib_prompts
from forespark.training.prompts import Conversation, Dropped, read_prompts
from forespark.training.recipe import Recipe
from forespark.training.rows import Row, identity, matches, save_rows
from forespark.training.target import Target
from transformers import AutoTokenizer, GenerationConfig

Say = Callable[[str], None]
_MIN_ANSWER = 2  # an anchor and a token to predict


def prepare(recipe: Recipe, say: Say = print) -> Path:
    """Make the prepared set of `recipe`, or reuse the one that is there; return its folder."""
    train, heldout, dropped = _prompts(recipe)
    say(
        f"prompts: {len(train)} train, {len(heldout)} held-out; "
        f"dropped: {dict(dropped.counts) or 'none'}"
    )
    turns = [conversation.turns for conversation in (*train, *heldout)]
    wanted = identity(recipe.target, recipe.generate.model_dump(), turns)
    if matches(recipe.prepared, wanted):
        say(f"prepared: {recipe.prepared} matches, nothing to do")
        return recipe.prepared
    encode = Encoder(recipe)
    prompts = [*encode("heldout", heldout, dropped), *encode("train", train, dropped)]
    greedy = sum(prompt.split == "heldout" for prompt in prompts)
    answers = _answer(recipe, [prompt.ids for prompt in prompts], num_greedy=greedy, say=say)
    splits = _rows(prompts, answers, dropped)
    tokens = sum(sum(row.loss_mask) for row in splits["train"])
    say(
        f"prepared: {len(splits['train'])} train rows with {tokens} answer tokens, "
        f"{len(splits['heldout'])} held-out rows; dropped: {dict(dropped.counts) or 'none'}"
    )
    save_rows(recipe.prepared, splits, wanted, dropped.listed)
    return recipe.prepared


@dataclass(frozen=True)
class Prompt:
    """An encoded prompt, its split, and where it comes from."""

    split: str
    source: str
    record: int
    ids: list[int]


def _rows(
    prompts: list[Prompt], answers: list[list[int]], dropped: Dropped
) -> dict[str, list[Row]]:
    """Rows of both splits; prompts without a usable answer go to `dropped`."""
    splits: dict[str, list[Row]] = {"heldout": [], "train": []}
    for prompt, answer in itertools.zip_longest(prompts, answers):
        if answer is None:
            dropped.add(prompt.source, prompt.record, "not answered in time")
        elif len(answer) < _MIN_ANSWER:
            dropped.add(prompt.source, prompt.record, f"answers under {_MIN_ANSWER} tokens")
        else:
            mask = [0] * len(prompt.ids) + [1] * len(answer)
            splits[prompt.split].append(Row(prompt.ids + answer, mask))
    for name, rows in splits.items():
        if not rows:
            raise ValueError(f"prepared: no {name} row is left ({dict(dropped.counts)})")
    return splits


def _prompts(recipe: Recipe) -> tuple[list[Conversation], list[Conversation], Dropped]:
    """Training and held-out conversations, disjoint, with what was dropped."""
    config = recipe.prompts
    dropped = Dropped()

    def read(source: str) -> list[Conversation]:
        if source == "stdlib":
            return [Conversation(source, i, [p]) for i, p in enumerate(stdlib_prompts())]
        result = read_prompts(source)
        for record, reason in result.listed:
            dropped.add(source, record, reason)
        numbered = zip(result.records, result.conversations, strict=True)
        return [Conversation(source, record, turns) for record, turns in numbered]

    conversations = read(config.source)
    if config.heldout_source:
        heldout = read(config.heldout_source)[: config.heldout]
        train = conversations
    else:
        heldout, train = conversations[: config.heldout], conversations[config.heldout :]
    secret = {conversation.turns[0] for conversation in heldout}
    kept = []
    for conversation in train:
        if conversation.turns[0] in secret:
            dropped.add(conversation.source, conversation.record, "also held out")
        else:
            kept.append(conversation)
    if not kept:
        raise ValueError(
            f"prompts: {config.source} leaves no training prompt beside {len(heldout)} held-out; "
            "lower prompts.heldout or add prompts"
        )
    return kept[: config.train], heldout, dropped


class Encoder:
    """First turns of conversations to prompt ids through the target's chat template."""

    def __init__(self, recipe: Recipe) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(recipe.target)
        self.limit = recipe.prompts.max_prompt_tokens
        self.system = recipe.generate.system

    def __call__(
        self, split: str, conversations: list[Conversation], dropped: Dropped
    ) -> list[Prompt]:
        """Encoded prompts; conversations over the length limit go to `dropped`."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        result = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(
                [*system, {"role": "user", "content": conversation.turns[0]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            source, record = conversation.source, conversation.record
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > self.limit:
                dropped.add(source, record, f"prompts over {self.limit} tokens")
            else:
                result.append(Prompt(split, source, record, ids))
        return result


def end_tokens(target: str | Path) -> set[int]:
    """Ids that end an answer: the generation config's, or the tokenizer's end token."""
    if (Path(target) / "generation_config.json").is_file():
        found: Any = GenerationConfig.from_pretrained(str(target)).eos_token_id
        if found is not None:
            return set(found if isinstance(found, list) else [found])
    return {AutoTokenizer.from_pretrained(target).eos_token_id}


def _answer(
    recipe: Recipe, prompts: list[list[int]], *, num_greedy: int, say: Say
) -> list[list[int]]:
    """Answers in prompt order, the first `num_greedy` never sampled.

    Fewer answers than prompts when `generate.seconds` ran out.
    """
    config = recipe.generate
    chooser = random.Random(config.seed)
    temperatures = [0.0] * num_greedy + [
        config.temperature if chooser.random() < config.sampled_share else 0.0
        for _ in prompts[num_greedy:]
    ]
    if config.engine == "vllm":
        return _answer_with_engine(recipe, prompts, temperatures)
    if any(temperatures):
        raise ValueError("generate.sampled_share: engine hf is greedy only; set it to 0")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = Target(recipe.target, [], device)
    ends = end_tokens(recipe.target)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    started = time.monotonic()
    for start in range(0, len(order), config.batch_size):
        batch = order[start : start + config.batch_size]
        rows = target.greedy([prompts[i] for i in batch], config.max_new_tokens, ends)
        answers.update(zip(batch, rows, strict=True))
        spent = time.monotonic() - started
        left = spent * (len(order) - len(answers)) / len(answers)
        tokens = sum(map(len, answers.values()))
        rate = f"{tokens / spent:.0f} tokens/s, {left:.0f} s left"
        say(f"answers: {len(answers)}/{len(order)}, {rate}")
    return [answers[i] for i in range(len(prompts))]


def _answer_with_engine(
    recipe: Recipe, prompts: list[list[int]], temperatures: list[float]
) -> list[list[int]]:
    """Answers from vLLM in a process of its own, whose memory is free again afterwards."""
    folder = Path(recipe.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    request, reply = folder / "generate-request.pt", folder / "generate-reply.pt"
    reply.unlink(missing_ok=True)
    config = recipe.generate
    torch.save(
        {
            "model": recipe.target,
            "prompts": prompts,
            "temperatures": temperatures,
            "max_tokens": config.max_new_tokens,
            "max_num_seqs": config.max_num_seqs,
            "seconds": config.seconds,
            "seed": config.seed,
        },
        request,
    )
    command = [sys.executable, "-m", "forespark.training.engine", "generate", request, reply]
    code = subprocess.run([str(part) for part in command], check=False).returncode
    if code or not reply.is_file():
        raise ValueError(
            f"generate: the vLLM process ended with status {code}; its output is above, prepared "
            "data and checkpoints are as they were"
        )
    answers: list[list[int]] = torch.load(reply, weights_only=True)
    return answers
