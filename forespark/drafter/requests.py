"""What the host knows about every request slot: how far it may draft, and whether it wants to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from forespark.core import IntArray

OPT_OUT_KEY = "forespark"


def wants_drafts(extra_args: Mapping[str, Any] | None) -> bool:
    """False for a request sent with `extra_args={"forespark": {"enabled": false}}` (or `false`).

    Anything else under the key keeps drafting: a typo must not fail a request that is being served.
    """
    setting = (extra_args or {}).get(OPT_OUT_KEY, True)
    if isinstance(setting, Mapping):
        setting = setting.get("enabled", True)
    return setting is not False


class RequestLimits:
    """Longest draft of each request, from upper bounds on how far it has got.

    With asynchronous scheduling the host does not know how many tokens the previous step accepted;
    it counts all it could have, so a limit is never too long: no draft passes `max_model_len` or
    the tokens the request may still emit.
    """

    def __init__(self, max_num_reqs: int, num_speculative_tokens: int, max_model_len: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.max_model_len = max_model_len
        self._end = np.zeros(max_num_reqs, dtype=np.int64)  # tokens at which the request stops
        self._enabled = np.ones(max_num_reqs, dtype=bool)
        self._last = np.zeros(max_num_reqs, dtype=np.int64)  # limit of the last draft

    def add(self, slot: int, max_seq_len: int, enabled: bool) -> None:
        """A request was admitted into `slot`; it ends at `max_seq_len` tokens at the latest."""
        self._end[slot] = min(int(max_seq_len), self.max_model_len)
        self._enabled[slot] = enabled
        self._last[slot] = 0

    def last(self, slots: IntArray) -> IntArray:
        """[n] limits of the requests' last drafts."""
        return self._last[slots]

    def update(
        self,
        slots: IntArray,  # [n]
        num_computed: IntArray,  # [n] tokens before this step, at most
        num_scheduled: IntArray,  # [n] rows scheduled this step, drafts included
        num_drafts: IntArray,  # [n] drafts among them
        sampling: IntArray,  # bool [n]: the request samples a token this step
    ) -> IntArray:
        """int32 [n]: the limits of this step's drafts, remembered for the next step."""
        accepted = np.minimum(num_drafts, self._last[slots])
        # Rows computed, at most, plus the token sampled now: the anchor.
        length = num_computed + num_scheduled - num_drafts + accepted + 1
        room = self._end[slots] - length - 1
        limits = np.clip(room, 0, self.num_speculative_tokens)
        limits[~(sampling & self._enabled[slots])] = 0
        self._last[slots] = limits
        return limits.astype(np.int32)
