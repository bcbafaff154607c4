"""A trace by the ending of its name: .parquet holds drafts, .npz every length at each position."""

from __future__ import annotations

from pathlib import Path

from forespark.calibration.drafts import Recorded
from forespark.calibration.traces import DraftTrace


def check_name(file: Path) -> None:
    """ValueError for an ending that is no trace's."""
    if file.suffix not in (".npz", ".parquet"):
        raise ValueError(f"trace: {file} must end in .parquet or .npz (the simulator's)")


def save_trace(trace: DraftTrace, file: Path) -> None:
    """Write it in the format of the name."""
    check_name(file)
    if file.suffix == ".npz":
        trace.save(file)
    else:
        from forespark.calibration.drafts_file import save_drafts

        save_drafts(trace.drafts(), file)


def load_trace(file: Path) -> Recorded:
    """Read either format. Raises ValueError for a file that is missing, not whole or no trace."""
    check_name(file)
    if not file.is_file():
        raise ValueError(
            f"trace: {file} is not there; record one with `forespark calibrate collect`"
        )
    if file.suffix == ".npz":
        return DraftTrace.load(file)
    from forespark.calibration.drafts_file import load_drafts

    return load_drafts(file)
