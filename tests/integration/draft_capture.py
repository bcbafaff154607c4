"""Keeps what a packed speculator computed for some of its drafts, for comparison elsewhere."""

from __future__ import annotations

from typing import Any


class DraftCapture:
    """Wraps a ForeSpark speculator that runs without graphs: states, candidates, both logits.

    `rows` holds one record a kept draft: `request`, `total` (tokens so far, the anchor included),
    `d`, `tokens` [d], `hidden` [d, H], `candidates` [d, k], `pre` [K(K+1)/2], `post` [d].
    """

    def __init__(self, runner: Any, every: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.every = every
        self._runner, self._spec = runner, runner.speculator
        self._seen = 0
        self._pre: Any = None
        self._hidden: Any = None
        self._candidates: Any = None
        self._scores = self._spec.estimators.scores
        self._run = self._spec.heads.run
        self._propose = self._spec.propose
        self._spec.estimators.scores = self._keep_scores
        self._spec.heads.run = self._keep_hidden
        self._spec.propose = self._keep_draft

    def _keep_scores(self, *args: Any, **kwargs: Any) -> Any:
        self._pre = self._scores(*args, **kwargs)
        return self._pre

    def _keep_hidden(self, hidden: Any, rows: int, num_reqs: int) -> None:
        self._hidden = hidden[self._spec.packed.sample_row[:rows]]
        self._candidates = self._spec.model.compute_candidates(self._hidden)[0]
        self._run(hidden, rows, num_reqs)

    def _keep_draft(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self._propose(batch, *args, **kwargs)
        if self._spec.planner is None or self._pre is None:
            return tokens
        totals = self._runner.req_states.total_len.gpu[batch.idx_mapping].tolist()
        post = self._spec.heads.post_logits(batch.num_reqs)
        first = 0
        for index, d in enumerate(self._spec.draft_lens[: batch.num_reqs].tolist()):
            rows = slice(first, first + d)
            first += d
            if d == 0:
                continue
            self._seen += 1
            if self._seen % self.every == 0:
                self.rows.append(
                    {
                        "request": batch.req_ids[index].split("-")[0],
                        "total": totals[index],
                        "d": d,
                        "tokens": tokens[index, :d].tolist(),
                        "hidden": self._hidden[rows].tolist(),
                        "candidates": self._candidates[rows].tolist(),
                        "pre": self._pre[index].tolist(),
                        "post": post[index, :d].tolist(),
                    }
                )
        return tokens
