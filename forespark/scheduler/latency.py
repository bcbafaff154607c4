"""Latency artifacts: measured step costs on disk, with the identity they are valid for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forespark.core import LatencyTable

SCHEMA = 1
_STAGES = ("draft", "verify")


def save_artifact(
    path: str | Path,
    draft: LatencyTable,
    verify: LatencyTable,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write both tables atomically: to a temporary name, then renamed."""
    record = {
        "schema": SCHEMA,
        "identity": dict(identity),
        "provenance": dict(provenance or {}),
        **{
            name: {
                "sizes": table.sizes.tolist(),
                "ms": table.ms.tolist(),
                "captured_limit": table.captured_limit,
            }
            for name, table in zip(_STAGES, (draft, verify), strict=True)
        },
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, target)


def load_artifact(
    path: str | Path, identity: Mapping[str, Any]
) -> tuple[LatencyTable, LatencyTable]:
    """(T_draft, T_verify). Raises ValueError, one line, for a damaged or mismatched artifact.

    `identity` is what the caller runs; every field of it must be the one measured with.
    """
    key = f"latency.artifact: {path}"
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{key} cannot be read ({reason}); measure it again, or leave it out to measure at "
            "start-up"
        ) from None
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{key} has schema {found!r}, this version reads {SCHEMA}; measure again")
    measured = record.get("identity")
    measured = measured if isinstance(measured, dict) else {}
    for name, value in identity.items():
        if measured.get(name) != value:
            raise ValueError(
                f"{key} was measured with {name} {measured.get(name)!r}, but this server runs "
                f"{value!r}; measure it again here, or leave it out to measure at start-up"
            )
    return _table(record, "draft", path), _table(record, "verify", path)


def _table(record: Mapping[str, Any], stage: str, path: str | Path) -> LatencyTable:
    entry = record.get(stage)
    try:
        return LatencyTable(
            entry["sizes"],  # type: ignore[index]
            entry["ms"],  # type: ignore[index]
            int(entry["captured_limit"]),  # type: ignore[index]
            source=f"artifact {path}",
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"latency.artifact: {path}: the {stage} table is unusable ({reason}); measure again"
        ) from None
