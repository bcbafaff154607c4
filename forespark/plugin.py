"""The `vllm.general_plugins` entry point: version gate, then patches, in every vLLM process."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from forespark import __version__
from forespark.config import is_forespark
from forespark.patching import Patch

SUPPORTED_VLLM = "0.32.0"
SKIP_VARIABLE = "FORESPARK_SKIP_VERSION_CHECK"


def supported(vllm_version: str) -> bool:
    """Whether this vLLM release (local build tags ignored) is the one the patches were made for."""
    return vllm_version.split("+")[0] == SUPPORTED_VLLM or os.environ.get(SKIP_VARIABLE) == "1"


def _refuse(vllm_version: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.speculative_config is not None and is_forespark(self.speculative_config):
                raise RuntimeError(
                    f"method: forespark {__version__} supports vLLM {SUPPORTED_VLLM}, found "
                    f"{vllm_version}; install vllm=={SUPPORTED_VLLM}, or set {SKIP_VARIABLE}=1 to "
                    "try anyway"
                )
            return original(self, *args, **kwargs)

        return create_engine_config

    return wrap


def register() -> None:
    """Called once per process by vLLM; calling it again does nothing.

    Without a ForeSpark configuration the patches change nothing. With another vLLM release only the
    refusal is installed, and it speaks only when ForeSpark is asked for.
    """
    import vllm

    if not supported(vllm.__version__):
        Patch(
            "vllm.engine.arg_utils:EngineArgs",
            "create_engine_config",
            "this vLLM release is not supported; refuse method forespark with the reason",
            wrap=functools.cache(_refuse)(vllm.__version__),
        ).apply()
        return
    from forespark import cpu_mode, patches
    from forespark.engine_args import install_engine_args
    from forespark.hybrid import patches as hybrid_patches

    cpu_mode.enable()
    for patch in [*patches.host_patches(), *hybrid_patches.host_patches()]:
        patch.apply()
    install_engine_args()
