"""Who decides the lengths of drafts and verification: the device, the host, or nobody (K each).

Most attention backends read query lengths on the device. Some plan a step on the host (FlashInfer
below SM100, the sparse MLA indexers without variable-length kernels): for them the host's lengths
must be the device's. Backends with recurrent states read more than lengths and take neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from forespark.engine_args import active_config

Groups = Iterable[Iterable[Any]]  # vLLM's attention groups, by KV cache group


class Split(Enum):
    """Where a budget becomes lengths."""

    DEVICE = "device"  # by the current step's estimates
    HOST = "host"  # by the previous step's, before anything is launched
    NONE = "none"  # every request drafts and verifies K


def planned_on_host(groups: Groups) -> list[Any]:
    """The attention backends among `groups` that need a batch's exact lengths on the host."""
    backends = [group.backend for kv_group in groups for group in kv_group]
    return [b for b in backends if not b.supports_device_cpu_query_lens_mismatch()]


def split_for(setting: str, groups: Groups) -> Split:
    """Where `scheduler.split: setting` puts it for these backends."""
    needing = planned_on_host(groups)
    if any(backend.is_ssm() for backend in needing):
        return Split.NONE
    if setting == "host" or (setting == "auto" and needing):
        return Split.HOST
    return Split.NONE if needing else Split.DEVICE


def setting_now() -> str | None:
    """`scheduler.split` of the engine that is being built; None outside ForeSpark."""
    engine = get_current_vllm_config_or_none()
    config = None if engine is None else active_config(engine.additional_config)
    return None if config is None else config.scheduler.split


def select_either(
    original: Callable[..., Any], setting: Callable[[], str | None] = setting_now
) -> Callable[..., Any]:
    """vLLM's choice of a backend, without its rule that trimming is done on the device.

    auto: a backend that reads lengths on the device where there is one, else any.
    """

    @functools.wraps(original)
    def select(backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        split = setting()
        if split in (None, "device") or not attn_selector_config.use_adaptive_verification:
            return original(backend, attn_selector_config, *args, **kwargs)
        exact = attn_selector_config._replace(use_adaptive_verification=False)
        if split == "host":
            return original(backend, exact, *args, **kwargs)
        try:
            return original(backend, attn_selector_config, *args, **kwargs)
        except ValueError:
            return original(backend, exact, *args, **kwargs)

    for name in ("cache_clear", "cache_info"):  # it is a cached function, and stays one
        if hasattr(original, name):
            setattr(select, name, getattr(original, name))
    return select
