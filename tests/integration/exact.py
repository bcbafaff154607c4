"""The target's exact distribution over its first three tokens, in plain torch."""

from __future__ import annotations

import torch
from serving import PAIR

TOP = 4
OTHER = -1


def triple_probabilities(prompt: str) -> dict[tuple[int, ...], float]:
    """Probability of every (t1, t2, t3) at temperature 1, tokens outside the TOP ones as OTHER.

    Once a token is OTHER the rest is not told apart: (OTHER,), (t1, OTHER), (t1, t2, OTHER).
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    ids = tokenizer(prompt).input_ids

    def following(prefix: tuple[int, ...]) -> dict[int, float]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *prefix]])).logits[0, -1]
        best = logits.double().softmax(-1).topk(TOP)
        chances = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return {**chances, OTHER: 1.0 - sum(chances.values())}

    cells: dict[tuple[int, ...], float] = {}

    def grow(prefix: tuple[int, ...], chance: float) -> None:
        for token, p in following(prefix).items():
            path = (*prefix, token)
            if token == OTHER or len(path) == 3:
                cells[path] = chance * p
            else:
                grow(path, chance * p)

    grow((), 1.0)
    return cells


def cell_of(tokens: tuple[int, ...], cells: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    """The cell that an emitted triple falls into."""
    for length in range(1, 4):
        path = (*tokens[: length - 1], OTHER)
        if tokens[:length] not in {cell[:length] for cell in cells}:
            return path
    return tokens


def p_value(counts: dict[str, int], cells: dict[tuple[int, ...], float]) -> float:
    """Chi-square goodness of fit; cells expected under five times are pooled into one."""
    from scipy.stats import chisquare

    seen = dict.fromkeys(cells, 0)
    for key, count in counts.items():
        seen[cell_of(tuple(int(t) for t in key.split()), cells)] += count
    total = sum(seen.values())
    pairs = [(seen[cell], total * chance) for cell, chance in cells.items()]
    large = [pair for pair in pairs if pair[1] >= 5]
    small = [pair for pair in pairs if pair[1] < 5]
    if sum(expected for _, expected in small) > 0:
        large.append((sum(n for n, _ in small), sum(expected for _, expected in small)))
    observed, expected = zip(*large, strict=True)
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


def entropy(cells: dict[tuple[int, ...], float]) -> float:
    """Nats of the cell distribution: how much there is to get wrong."""
    probabilities = torch.tensor([p for p in cells.values() if p > 0])
    return float(-(probabilities * probabilities.log()).sum())
