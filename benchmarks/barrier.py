"""A barrier inside the engine: requests wait, with their first token, until all of a batch have it.

A batch that is measured token by token must start as one: without the barrier early requests decode
while late ones are prefilled. Requests of a batch carry `{"barrier": [name, count]}` in
`SamplingParams.extra_args`; until `count` of them have a first token (or have ended), those that
were prefilled are not scheduled. Other requests are not touched.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

KEY = "barrier"
SCHEDULER = "forespark.benchmarks.barrier.BarrierScheduler"  # for `scheduler_cls`


class BarrierScheduler(AsyncScheduler):
    """vLLM's scheduler with the barrier."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[str, set[str]] = {}  # open batches: every request scheduled so far
        self._released: set[str] = set()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's own choice among the requests that are not held."""
        held = self._held()
        self.running = [request for request in self.running if request not in held]
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.running = held + self.running

    def _held(self) -> list[Request]:
        batches: dict[str, tuple[int, list[Request]]] = {}
        for request in self.running:
            found = _batch_of(request)
            if found is not None and found[0] not in self._released:
                self._seen.setdefault(found[0], set()).add(request.request_id)
                batches.setdefault(found[0], (found[1], []))[1].append(request)
        held: list[Request] = []
        for name, (count, running) in batches.items():
            gone = len(self._seen[name] - self.requests.keys())
            if sum(1 for request in running if request.num_output_tokens) + gone >= count:
                self._released.add(name)
                del self._seen[name]
            else:
                held += [r for r in running if r.num_computed_tokens >= r.num_prompt_tokens]
        return held


def _batch_of(request: Request) -> tuple[str, int] | None:
    params = request.sampling_params
    found = (params.extra_args or {}).get(KEY) if params is not None else None
    return None if found is None else (str(found[0]), int(found[1]))
