"""Drafts as a parquet file: one row a draft, checksums on every page, the origin in the footer.

A writer that was stopped leaves no footer, so what is not whole is never read as less data.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
from forespark.calibration.drafts import Drafts
from forespark.calibration.origin import Origin
from forespark.training.saving import replacing
from pyarrow import parquet

SCHEMA = 1
_KEY = b"forespark.drafts"
_COLUMNS = pa.schema(
    [
        ("request", pa.int64()),
        ("load", pa.int32()),
        ("position", pa.int32()),
        ("length", pa.int16()),
        ("accepted", pa.int16()),
        ("z", pa.list_(pa.float32())),
        ("l", pa.list_(pa.float32())),
    ]
)


def save_drafts(drafts: Drafts, file: Path) -> None:
    """Write `file` whole or not at all. Raises OSError when it cannot be written."""
    starts = np.concatenate(([0], drafts.length.cumsum(dtype=np.int64))).astype(np.int32)
    names = ("request", "load", "position", "length", "accepted")
    columns = [
        pa.array(getattr(drafts, name), type=_COLUMNS.field(name).type, safe=True)
        for name in names
    ] + [
        pa.ListArray.from_arrays(starts, pa.array(logits, type=pa.float32()))
        for logits in (drafts.pre_logits, drafts.post_logits)
    ]  # fmt: skip
    head = json.dumps({"schema": SCHEMA} | asdict(drafts.origin))
    table = pa.table(columns, schema=_COLUMNS.with_metadata({_KEY: head}))
    with replacing(file) as temporary:
        parquet.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def load_drafts(file: Path) -> Drafts:
    """Read it back. Raises ValueError, one line, for a file that is not whole or not a trace."""
    try:
        with parquet.ParquetFile(file, page_checksum_verification=True) as held:
            found = held.schema_arrow
            origin = _origin(found.metadata or {}, file)
            _check_columns(found, file)
            table = held.read(columns=_COLUMNS.names)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"trace: {file} cannot be read ({reason}); record it again") from None
    for name in _COLUMNS.names:
        if table[name].null_count:
            raise ValueError(f"trace: {file} lacks values of {name}; record it again")
    plain = {name: table[name].to_numpy() for name in _COLUMNS.names[:5]}
    logits = []
    for name in _COLUMNS.names[5:]:
        lists = table[name].combine_chunks()
        wrong = lists.value_lengths().to_numpy() != plain["length"]
        if wrong.any():
            raise ValueError(
                f"trace: {file}: draft {int(wrong.argmax())} has not as many values of {name} as "
                "it drafted tokens; record it again"
            )
        logits.append(lists.flatten().to_numpy(zero_copy_only=False))
    try:
        return Drafts(*plain.values(), *logits, origin)
    except ValueError as error:
        raise ValueError(f"{error} [{file}]") from None


def _origin(metadata: dict[bytes, bytes], file: Path) -> Origin:
    try:
        head = json.loads(metadata[_KEY])
        schema = head.pop("schema")
    except (KeyError, ValueError):
        raise ValueError(
            f"trace: {file} is parquet, but no recorded drafts; collect some"
        ) from None
    if schema != SCHEMA:
        raise ValueError(f"trace: {file} has schema {schema}, this version reads {SCHEMA}")
    try:
        origin = Origin(**head)
    except TypeError as error:
        raise ValueError(f"trace: {file} does not say where it is from ({error})") from None
    most = origin.num_speculative_tokens
    if type(most) is not int or most < 1:
        raise ValueError(f"trace: {file} has K = {most!r}; it must be an integer >= 1")
    return origin


def _check_columns(found: pa.Schema, file: Path) -> None:
    for field in _COLUMNS:
        own = found.field(field.name).type if field.name in found.names else None
        if own != field.type:
            raise ValueError(
                f"trace: {file} has column {field.name} as {own or 'nothing'}, not {field.type}; "
                "record it again"
            )
