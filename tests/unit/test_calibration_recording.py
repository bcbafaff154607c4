"""Drafts recorded in a worker: which verification belongs to which draft, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forespark.calibration.drafts import Drafts
from forespark.calibration.origin import Origin

from forespark.engine_collect import _parts_folder, collect
from forespark.verifier.recording import DraftRecorder

K = 3
ORIGIN = Origin(K, False, "d" * 64, "e" * 64)


def step(recorder: DraftRecorder, mark: float, requests: str, lens: list[int], sampled: list[int],
         rejected: list[int]) -> None:  # fmt: skip
    n = len(requests)
    z = np.full((n, 6), mark, np.float32) + np.arange(6) / 100
    post = np.full((n, K), -mark, np.float32)
    recorder.step(list(requests), z, post, *map(np.array, (lens, sampled, rejected)))


def test_a_draft_is_judged_by_the_next_step_of_its_request() -> None:
    """Catches outcomes shifted by a step or a request, another row of z, or wrong positions."""
    recorder = DraftRecorder(2, directional=False)
    step(recorder, 1, "ab", [2, 2], [1, 1], [0, 0])
    step(recorder, 2, "ba", [2, 2], [3, 1], [0, 2])  # the batch's order changed
    step(recorder, 3, "a", [2], [2], [1])
    found = [(name, position, accepted) for name, position, accepted, *_ in recorder.rows]
    assert found == [("b", 0, 2), ("a", 0, 0), ("a", 1, 1)]
    assert recorder.rows[0][3].tolist() == pytest.approx([1.01, 1.02])  # row 2 of the triangle
    assert recorder.rows[2][4].tolist() == [-2, -2]


def test_shorter_and_partly_verified_drafts_are_left_out() -> None:
    """Catches a censored draft (preempted, or cut by a budget) taken for a rejected one."""
    recorder = DraftRecorder(2, directional=False)
    step(recorder, 1, "abc", [2, 1, 2], [1, 1, 1], [0, 0, 0])
    step(recorder, 2, "abc", [0, 0, 0], [1, 1, 0], [1, 1, 0])  # c is prefilled again
    step(recorder, 3, "c", [2], [1], [0])
    assert recorder.rows == [] and recorder.unverified == 1


def test_parts_of_another_collection_are_refused(tmp_path: Path) -> None:
    """Catches a resumed run that mixes answers of two checkpoints or prompt files."""
    out = tmp_path / "t.parquet"
    assert _parts_folder(out, {"prompts": "a"}) == _parts_folder(out, {"prompts": "a"})
    with pytest.raises(ValueError, match="parts of another collection") as refusal:
        _parts_folder(out, {"prompts": "b"})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "loads", "line"), [("t.npz", [2], "must end in .parquet"), ("t.parquet", [0], "loads")]
)
def test_bad_input_stops_before_an_engine_starts(
    tmp_path: Path, name: str, loads: list[int], line: str
) -> None:
    """Catches minutes of start-up before a typo is named."""
    with pytest.raises(ValueError, match=line):
        collect(tmp_path, tmp_path, tmp_path, tmp_path / name, 2, 32, loads, {})


def test_joined_parts_must_have_one_origin() -> None:
    """Catches logits of two checkpoints fitted together, and drafts lost at a seam."""
    one, two = (
        Drafts(np.array([r]), np.array([2]), np.array([0]), np.array([d]), np.array([1]),
               np.full(d, r, np.float32), np.full(d, r, np.float32), ORIGIN)
        for r, d in ((1, 2), (2, 3))
    )  # fmt: skip
    joined = Drafts.join([one, two])
    assert joined.at_length(3).pre_logits.tolist() == [[2, 2, 2]]
    other = replace(two, origin=replace(ORIGIN, drafter="f" * 64))
    with pytest.raises(ValueError, match="recorded with drafter"):
        Drafts.join([one, other])
