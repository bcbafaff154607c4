"""Talking to a vLLM server: a streamed chat answer, counters, and the target's own opinion."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

TIE_NATS = 1e-3
"""Two tokens whose log-probabilities are closer than this are a tie: float32 sums in another
order (one row or K + 1 rows at once) move a logit by about 1e-5 to 1e-4."""

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer."""

    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    seconds: float  # from the first chunk to the last
    first_tokens: int  # tokens of the first chunk

    @property
    def tokens_per_s(self) -> float:
        """Speed of decoding: tokens after the first chunk over the time they took."""
        later = len(self.token_ids) - self.first_tokens
        return later / self.seconds if self.seconds > 0 else 0.0


def chat(
    url: str,
    prompt: str,
    max_tokens: int,
    show: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Stream a greedy answer to one user message; `show` gets each piece of text."""
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
    }
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S
    ) as response:
        if response.status_code != 200:
            detail = response.read().decode("utf-8", "replace")
            raise ValueError(f"the server answered {response.status_code}: {detail}")
        return collect(response.iter_lines(), show, time.perf_counter)


def collect(
    lines: Iterable[str], show: Callable[[str], None], clock: Callable[[], float]
) -> Answer:
    """An answer from the lines of a server-sent event stream."""
    text = ""
    prompt_ids: list[int] = []
    token_ids: list[int] = []
    first_tokens, first_at, last_at = 0, 0.0, 0.0
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise ValueError(f"the server stopped answering: {chunk['error']}")
        prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
        for choice in chunk.get("choices", []):
            fresh = choice.get("token_ids") or []
            if fresh:
                last_at = clock()
                if not token_ids:
                    first_tokens, first_at = len(fresh), last_at
            token_ids += fresh
            piece = choice.get("delta", {}).get("content") or ""
            text += piece
            if piece:
                show(piece)
    return Answer(text, tuple(prompt_ids), tuple(token_ids), last_at - first_at, first_tokens)


def counters(text: str, prefix: str) -> dict[str, float]:
    """Counters of a Prometheus page whose name starts with `prefix`, summed over labels."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(prefix):
            series, _, value = line.rpartition(" ")
            name = series.split("{", 1)[0]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def read_counters(url: str, prefix: str) -> dict[str, float]:
    """Counters of a running server."""
    return counters(httpx.get(f"{url}/metrics", timeout=30.0).text, prefix)


def target_ranks(url: str, answer: Answer) -> list[dict[str, Any]]:
    """The target's top two log-probabilities and the answer token's own, at each position."""
    body = {
        "model": "model",
        "prompt": [*answer.prompt_ids, *answer.token_ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 2,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    response.raise_for_status()
    rows: list[dict[str, Any]] = response.json()["choices"][0]["prompt_logprobs"]
    return rows[len(answer.prompt_ids) :]


def all_top_or_tied(rows: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> bool:
    """Whether every token is the target's best, or its second best in a tie."""
    for row, token in zip(rows, token_ids, strict=True):
        own = row[str(token)]
        best = max(entry["logprob"] for entry in row.values())
        if own["rank"] > 2 or best - own["logprob"] > TIE_NATS:
            return False
    return True
