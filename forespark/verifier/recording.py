"""Recording drafts inside a worker: raw logits, and what a full verification made of them.

`begin` and `take` run in the worker, between runs. While drafts are recorded the host reads results
of every step, so nothing measured then says how fast a step is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forespark.estimators.pre_draft import row_start

Row = tuple[str, int, int, np.ndarray, np.ndarray]  # request, position, accepted, z, l


@dataclass
class _Pending:
    position: int
    pre_logits: np.ndarray  # f32 [d]
    post_logits: np.ndarray  # f32 [d]


class DraftRecorder:
    """Drafts of exactly `draft_len` tokens, each with the verification that followed it."""

    def __init__(self, draft_len: int, directional: bool) -> None:
        begin = 0 if directional else row_start(draft_len)
        self._row = slice(begin, begin + draft_len)
        self._len = draft_len
        self._emitted: dict[str, int] = {}
        self._pending: dict[str, _Pending] = {}
        self.rows: list[Row] = []
        self.unverified = 0  # drafts that lost a token before verification: not recorded

    def step(
        self,
        requests: list[str],
        pre_logits: np.ndarray,  # f32 [n, K(K+1)/2] or [n, K] (directional)
        post_logits: np.ndarray,  # f32 [n, K]
        draft_lens: np.ndarray,  # int [n] drafted now
        num_sampled: np.ndarray,  # int [n] of the verification that preceded the draft
        num_rejected: np.ndarray,  # int [n] likewise
    ) -> None:
        """One step: the verification judges the drafts of the step before."""
        for i, name in enumerate(requests):
            before, sampled = self._pending.pop(name, None), int(num_sampled[i])
            if before is not None and sampled > 0:
                accepted = sampled - 1
                if accepted + int(num_rejected[i]) == self._len:
                    self.rows.append(
                        (name, before.position, accepted, before.pre_logits, before.post_logits)
                    )
                else:
                    self.unverified += 1
            emitted = self._emitted[name] = self._emitted.get(name, 0) + sampled
            if draft_lens[i] == self._len:
                self._pending[name] = _Pending(
                    emitted - 1, pre_logits[i, self._row].copy(), post_logits[i, : self._len].copy()
                )


def begin(worker: Any, draft_len: int) -> None:
    """Record drafts of `draft_len` tokens from now on; the policy must verify all of them."""
    speculator = worker.model_runner.speculator
    estimators, feedback = speculator.estimators, speculator.feedback
    recorder = DraftRecorder(draft_len, estimators.directional)
    seen: dict[str, Any] = {}
    scores: Callable[..., Any] = estimators.scores
    send: Callable[..., None] = feedback.send

    def keep(*args: Any, **kwargs: Any) -> Any:
        seen["z"] = scores(*args, **kwargs)
        return seen["z"]

    def record(draft: Any, tensors: dict[str, Any]) -> None:
        send(draft, tensors)
        names = ("draft_lens", "num_sampled", "num_rejected")
        recorder.step(
            list(draft.req_ids),
            seen["z"].float().cpu().numpy(),
            speculator.heads.post_logits(len(draft.req_ids)).float().cpu().numpy(),
            *(tensors[name].cpu().numpy() for name in names),
        )

    estimators.scores, feedback.send = keep, record
    worker.forespark_recorder = recorder


def take(worker: Any) -> tuple[list[Any], int]:
    """(rows, drafts not wholly verified) since `begin`; recording ends. Logits are lists: arrays
    inside a list do not survive the way out of the worker."""
    speculator = worker.model_runner.speculator
    del speculator.estimators.scores, speculator.feedback.send
    recorder: DraftRecorder = worker.forespark_recorder
    del worker.forespark_recorder
    rows = [(*row, z.tolist(), post.tolist()) for *row, z, post in recorder.rows]
    return rows, recorder.unverified
