"""What a running worker measured, as plain records: for artifacts written outside the engine."""

from __future__ import annotations

from typing import Any


def export_prices(worker: Any) -> dict[str, Any] | None:
    """Runs in the worker: both latency tables and what they are valid for; None without prices."""
    from forespark.verifier.profile import busy
    from forespark.verifier.setup import artifact_identity

    runner = worker.model_runner
    draft, verify = getattr(runner.speculator, "prices", (None, None))
    if draft is None or verify is None:
        return None
    tables = {
        name: {
            "sizes": table.sizes.tolist(),
            "ms": table.ms.tolist(),
            "captured_limit": table.captured_limit,
        }
        for name, table in (("draft", draft), ("verify", verify))
    }
    return {"identity": artifact_identity(runner), "busy": busy(runner.speculator), **tables}
