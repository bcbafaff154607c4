"""Drafts one by one and their parquet file: what is kept, and what is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from forespark.calibration.drafts import Drafts
from forespark.calibration.drafts_file import load_drafts, save_drafts
from forespark.calibration.origin import Origin
from forespark.calibration.trace_file import load_trace, save_trace
from forespark.calibration.traces import DraftTrace
from pyarrow import parquet

from forespark.estimators.pre_draft import row_start

K = 4
ORIGIN = Origin(K, False, "d" * 64, "e" * 64)


def some(count: int = 300, seed: int = 0) -> Drafts:
    """Drafts of mixed lengths, in no order of request, length or load."""
    random = np.random.default_rng(seed)
    length = random.integers(1, K + 1, count).astype(np.int16)
    return Drafts(
        random.integers(0, 40, count),
        random.choice([1, 32, 512], count).astype(np.int32),
        random.integers(0, 200, count).astype(np.int32),
        length,
        (random.random(count) * (length + 1)).astype(np.int16),
        random.normal(0, 2, length.sum()).astype(np.float32),
        random.normal(0, 2, length.sum()).astype(np.float32),
        ORIGIN,
    )


def test_a_file_gives_back_every_draft(tmp_path: Path) -> None:
    """Catches logits shifted between drafts of different lengths, or an origin that is lost."""
    drafts = some()
    save_drafts(drafts, tmp_path / "t.parquet")
    found = load_drafts(tmp_path / "t.parquet")
    for name in ("request", "load", "position", "length", "accepted", "pre_logits", "post_logits"):
        assert np.array_equal(getattr(found, name), getattr(drafts, name)), name
    assert found.origin == ORIGIN
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_one_length_is_read_draft_by_draft() -> None:
    """Catches an off-by-one in where a draft's logits begin."""
    drafts = some()
    begin = 0
    expected: dict[int, list[np.ndarray]] = {d: [] for d in range(1, K + 1)}
    for d in drafts.length.tolist():
        expected[d].append(drafts.pre_logits[begin : begin + d])
        begin += d
    for d, rows in expected.items():
        assert np.array_equal(drafts.at_length(d).pre_logits, np.stack(rows))
        assert np.array_equal(drafts.at_length(d).accepted, drafts.accepted[drafts.length == d])


def test_a_request_is_on_one_side_of_the_split_in_every_run() -> None:
    """Catches one answer both fitted on and measured, which hides overfitting."""
    drafts = some()
    fitted_on, held_out = drafts.halves()
    assert not set(fitted_on.request) & set(held_out.request)
    assert fitted_on.length.size + held_out.length.size == drafts.length.size
    one_sided = drafts.select(drafts.request % 2 == 0)
    with pytest.raises(ValueError, match="no request with an odd number"):
        one_sided.halves()


def test_whole_positions_become_drafts_of_every_length(tmp_path: Path) -> None:
    """Catches rows of the triangle handed to the wrong length when a collected trace is stored."""
    random = np.random.default_rng(1)
    size = K * (K + 1) // 2
    accepted = np.array([[0, 1, 2, 1, 3], [0, 0, 1, 3, 2], [0, 1, 0, 2, 4]], dtype=np.int8)
    pre, post = random.normal(size=(2, 3, size)).astype(np.float32)
    trace = DraftTrace(
        np.array([0, 0, 1], np.int32), np.array([0, 1, 0], np.int32), accepted, pre, post,
        ORIGIN.drafter, ORIGIN.estimators,
    )  # fmt: skip
    save_trace(trace, tmp_path / "t.parquet")
    found = load_trace(tmp_path / "t.parquet")
    assert found.origin == ORIGIN
    for d in range(1, K + 1):
        row = slice(row_start(d), row_start(d) + d)
        for held in (found.at_length(d), trace.at_length(d)):
            assert np.array_equal(held.pre_logits, pre[:, row])
            assert np.array_equal(held.post_logits, post[:, row])
            assert np.array_equal(held.accepted, accepted[:, d])


def test_an_archive_keeps_its_origin(tmp_path: Path) -> None:
    """Catches an archive that any later estimators of the same drafter would take for theirs."""
    size = K * (K + 1) // 2
    zeros = np.zeros((1, size), np.float32)
    first = np.zeros(1, np.int32)
    accepted = np.zeros((1, K + 1), np.int8)
    trace = DraftTrace(first, first, accepted, zeros, zeros, "d" * 64, "e" * 64, True)
    save_trace(trace, tmp_path / "t.npz")
    assert load_trace(tmp_path / "t.npz").origin == replace(ORIGIN, directional=True)


def poison(name: str, value: float) -> Callable[[Drafts], Drafts]:
    def change(drafts: Drafts) -> Drafts:
        column = getattr(drafts, name).copy()
        column[7] = value
        return replace(drafts, **{name: column})

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (poison("pre_logits", np.nan), "pre-draft logits that are NaN or infinite"),
        (poison("post_logits", np.inf), "post-draft logits that are NaN or infinite"),
        (poison("accepted", K + 1), "more accepted tokens than it drafted"),
        (poison("accepted", -1), "fewer than 0"),
        (poison("request", -1), "a negative request"),
        (lambda d: replace(d, pre_logits=d.pre_logits[:-1]), "pre-draft logits for"),
        (lambda d: replace(d, length=d.length + K), f"a length outside 1..K = {K}"),
        (lambda d: d.select(np.zeros(d.length.size, bool)), "it holds no drafts"),
    ],
)
def test_drafts_that_cannot_be_are_refused(change: Callable[[Drafts], Drafts], line: str) -> None:
    """Catches impossible drafts that would turn into a table as if they were measured."""
    with pytest.raises(ValueError, match=line) as caught:
        change(some())
    assert "\n" not in str(caught.value)


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    parquet.write_table(change(parquet.read_table(file)), file)


def column(name: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    return lambda t: t.set_column(t.column_names.index(name), name, values)


def head(**changes: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        held = json.loads(table.schema.metadata[b"forespark.drafts"]) | changes
        return table.replace_schema_metadata({b"forespark.drafts": json.dumps(held)})

    return change


def nan_inside(table: pa.Table) -> pa.Table:
    lists = table["z"].to_pylist()
    lists[5][0] = float("nan")
    return column("z", pa.array(lists, pa.list_(pa.float32())))(table)


def short_list(table: pa.Table) -> pa.Table:
    lists = table["l"].to_pylist()
    lists[5] = lists[5] + [0.0]
    return column("l", pa.array(lists, pa.list_(pa.float32())))(table)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.replace_schema_metadata(None), "no recorded drafts"),
        (head(schema=2), "schema 2, this version reads 1"),
        (head(num_speculative_tokens="4"), "K = '4'"),
        (head(surprise=1), "does not say where it is from"),
        (lambda t: t.drop_columns(["accepted"]), "column accepted as nothing"),
        (lambda t: column("load", t["load"].cast(pa.float64()))(t), "column load as double"),
        (column("load", pa.array([None] * 300, pa.int32())), "lacks values of load"),
        (nan_inside, "draft 5 has pre-draft logits that are NaN"),
        (short_list, "draft 5 has not as many values of l"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], line: str
) -> None:
    """Catches foreign or edited parquet read as drafts."""
    file = tmp_path / "t.parquet"
    save_drafts(some(), file)
    rewrite(file, change)
    with pytest.raises(ValueError, match=line) as caught:
        load_drafts(file)
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path: Path) -> None:
    """Catches a file cut short, or with a byte flipped on a page, that loads as less or as wrong
    data."""
    file = tmp_path / "t.parquet"
    save_drafts(some(), file)
    whole = file.read_bytes()
    for kept in (0, 3, len(whole) // 3, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="cannot be read") as caught:
            load_drafts(file)
        assert "\n" not in str(caught.value)
    drafts = some()
    for at in range(4, len(whole), len(whole) // 60):
        flipped = bytearray(whole)
        flipped[at] ^= 0xFF
        file.write_bytes(bytes(flipped))
        try:
            found = load_drafts(file)
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            # Statistics and the like may be off without the data being so.
            assert np.array_equal(found.pre_logits, drafts.pre_logits), at
            assert np.array_equal(found.accepted, drafts.accepted), at


def test_names_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    """Catches an hour of collecting that ends in a file nothing reads, or a bare traceback."""
    with pytest.raises(ValueError, match="must end in .parquet or .npz"):
        load_trace(tmp_path / "trace.csv")
    with pytest.raises(ValueError, match="is not there"):
        load_trace(tmp_path / "trace.parquet")
    (tmp_path / "junk.npz").write_bytes(b"junk" * 100)
    with pytest.raises(ValueError, match="cannot be read"):
        load_trace(tmp_path / "junk.npz")
