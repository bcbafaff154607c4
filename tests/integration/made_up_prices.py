"""A latency artifact of made-up prices: what this machine's steps take must not change plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GRAPH_TOKENS = 96  # the largest captured size of engines that run with graphs


def price_artifact(
    path: Path,
    prices: dict[str, Any],
    pair: Path,
    drafter: Path,
    tokens: int,
    dtype: str = "float32",
    ranks: int = 1,
    graphs: bool = False,
) -> Path:
    """Writes `prices` ((tokens, ms) of "draft" and "verify") to `path` as an artifact that is
    valid for the engine described by the other arguments; returns `path`."""
    import torch

    from forespark import __version__
    from forespark.core import LatencyTable
    from forespark.drafter.fingerprint import weights_fingerprint
    from forespark.plugin import SUPPORTED_VLLM
    from forespark.scheduler.latency import save_artifact

    draft, verify = (
        LatencyTable([s for s, _ in prices[stage]], [ms for _, ms in prices[stage]], 0, "made up")
        for stage in ("draft", "verify")
    )
    identity = {
        "model": str(pair / "target"),
        "drafter": str(drafter),
        "drafter_weights": weights_fingerprint(drafter),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "dtype": dtype,
        "tensor_parallel_size": ranks,
        "num_speculative_tokens": tokens,
        "largest_captured_size": GRAPH_TOKENS if graphs else 0,
        "vllm": SUPPORTED_VLLM,
        "forespark": __version__,
    }
    save_artifact(path, draft, verify, identity)
    return path
