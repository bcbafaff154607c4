"""`docs/results/gdn-h200.json` from a record of `benchmarks.kernels.gdn`: one key per id.

Every key holds its figure, what it was held against and how that was launched. Ids that the
benchmark does not measure (E3: closed-loop drift, a GPU test; K6: ReplaySSM) are null.
"""

from __future__ import annotations

from typing import Any

from forespark.hybrid.memory import GdnShape

LAYERS = GdnShape(layers=30, key_heads=16, value_heads=32, key_size=128, value_size=128)
REFERENCE = "float64 reference, one launch of the default tiles"


def gdn_evidence(record: dict[str, Any]) -> dict[str, Any]:
    """The committed keys. Cells of (n, w) that were not measured are left out."""
    rows = {(row["n"], row["w"]): row for row in record["rows"]}

    def cells(name: str, counts: tuple[int, ...], digits: int = 3) -> dict[str, float]:
        return {
            f"n{n}_w{w}": round(row[name], digits)
            for (n, w), row in rows.items()
            if n in counts and name in row
        }

    def key(figure: Any, baseline: str, launch: str = "default tiles, CUDA graph") -> Any:
        return {"figure": figure, "baseline": baseline, "launch": launch} if figure else None

    errors = {
        name: max(row[name] for row in rows.values() if name in row)
        for name in ("out_error", "z_error", "state_error")
        if any(name in row for row in rows.values())
    }
    stock = record["baseline"]
    return {
        "E2": key(errors, REFERENCE),
        "E3": None,
        "K1": key(cells("verify_us", (1,), 1), "bar: 170 us for 30 layers at every w"),
        "K2": key(cells("commit_us", (1,), 1), "bar: 45 us for 30 layers"),
        "K3": key(cells("speedup", (1,)), stock),
        "K4": key(cells("speedup", (16, 64)), stock),
        "K5": key(cells("share_of_peak", (16, 64)), "4.3 TB/s, measured on an H200"),
        "K6": None,
        "M1": key(
            {"bytes": LAYERS.request_bytes(15), "stock_bytes": LAYERS.stock_bytes(15)},
            "vLLM 0.32: one state a drafted token, 15 drafts",
            "arithmetic over the layers' pages and the factors' workspace",
        ),
    }
