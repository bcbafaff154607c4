"""All kernel benchmarks in one process: a table, then one JSON line.

From the repository root: `python -m benchmarks.kernels.run [--out FILE]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from .timing import graph_us, need_gpu, print_json, print_rows, rounded

from forespark.benchmarks.provenance import provenance  # isort: skip
from . import envelope, grouped_conv, pack, pre_draft, rank  # isort: skip


def main() -> None:
    """Run every benchmark; a wrong result ends the run with the case that was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the records to this JSON file")
    args = parser.parse_args()
    device = need_gpu()
    word = torch.zeros(1, device=device)
    floor = graph_us(lambda: word.add_(1))
    records: list[dict[str, Any]] = []
    for module in (rank, envelope, pre_draft, grouped_conv, pack):
        print(f"{module.__name__.rsplit('.', 1)[-1]}:", flush=True)
        record = module.bench()
        print_rows(record["rows"])
        records.append(record)
    print(f"floor, one tiny torch kernel: {floor['us']:.2f} us, replay {floor['replay_us']:.2f} us")
    result = {
        "bench": "kernels",
        "floor": floor,
        "records": records,
        "provenance": provenance(),
    }
    if args.out:
        args.out.write_text(json.dumps(rounded(result), indent=1))
    print_json({**result, "records": [_targets(record) for record in records]})


def _targets(record: dict[str, Any]) -> dict[str, Any]:
    """What the last line keeps of a record: its largest and its n = 64 and n = 512 rows."""
    rows = [row for row in record["rows"] if row.get("n", 512) in (64, 512)]
    return {**record, "rows": rows[-8:]}


if __name__ == "__main__":
    main()
