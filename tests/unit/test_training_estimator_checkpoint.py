"""The estimators/ folder: what is written is what serves, and nothing else is accepted."""

import json

import pytest
import torch
from safetensors.torch import save_file

from forespark.estimators.checkpoint import load_estimators, save_calibration, save_estimators
from forespark.estimators.post_draft import PostDraftEstimator
from forespark.estimators.pre_draft import PreDraftEstimator, triangle_size

SIZES = {"hidden_size": 12, "embed_size": 10, "selector_rank": 6}


def write_folder(path, block=5, directional=False):
    torch.manual_seed(0)
    save_file({"fc.weight": torch.randn(3, 3)}, str(path / "model.safetensors"))
    pre = PreDraftEstimator(12, 10, block, rank=8, directional=directional)
    post = PostDraftEstimator(12, 6)
    save_estimators(path, pre, post, dtype=torch.float32)
    return pre, post


def edit_config(path, **changes):
    file = path / "estimators" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_round_trip_gives_equal_logits(tmp_path):
    """Catches a tensor saved under a wrong name, transposed or left out."""
    pre, post = write_folder(tmp_path)
    loaded = load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)
    context, anchor, previous = torch.randn(4, 12), torch.randn(4, 10), torch.randn(4, 6)
    assert torch.equal(loaded.pre_draft(context, anchor), pre(context, anchor))
    assert torch.equal(loaded.post_draft(context, previous), post(context, previous))
    assert loaded.scale is None and loaded.temperature is None


@pytest.mark.parametrize("directional", [False, True])
def test_smaller_block_serves_the_first_rows(tmp_path, directional):
    """Catches serving at K < trained K with rows of another draft length."""
    pre, _ = write_folder(tmp_path, directional=directional)
    entries = 5 if directional else triangle_size(5)
    save_calibration(
        tmp_path,
        scale=torch.arange(entries) + 1.0,
        bias=torch.zeros(entries),
        temperature=torch.arange(5) + 1.0,
    )
    loaded = load_estimators(tmp_path, num_speculative_tokens=3, **SIZES)
    kept = 3 if directional else 6
    context, anchor = torch.randn(2, 12), torch.randn(2, 10)
    torch.testing.assert_close(
        loaded.pre_draft(context, anchor), pre(context, anchor)[:, :kept], rtol=0, atol=1e-6
    )
    assert loaded.scale.tolist() == [i + 1.0 for i in range(kept)]
    assert loaded.temperature.tolist() == [1.0, 2.0, 3.0]


def test_no_folder_is_a_plain_drafter(tmp_path):
    """Catches refusing a stock DFlash2 checkpoint instead of serving without estimators."""
    assert load_estimators(tmp_path, num_speculative_tokens=5, **SIZES) is None


def test_larger_block_is_refused(tmp_path):
    """Catches reading past the trained triangle when K is raised."""
    write_folder(tmp_path)
    with pytest.raises(ValueError, match=r"num_speculative_tokens: 6 .* 5 .* use 1\.\.5"):
        load_estimators(tmp_path, num_speculative_tokens=6, **SIZES)


@pytest.mark.parametrize("key", ["hidden_size", "embed_size", "selector_rank"])
def test_wrong_size_names_the_key(tmp_path, key):
    """Catches a shape error deep in torch where the message should name the mismatch."""
    write_folder(tmp_path)
    with pytest.raises(ValueError, match=rf"^{key}: .* 99;"):
        load_estimators(tmp_path, num_speculative_tokens=5, **(SIZES | {key: 99}))


def test_another_drafter_is_refused(tmp_path):
    """Catches estimators served beside weights they were not trained with."""
    write_folder(tmp_path)
    save_file({"fc.weight": torch.zeros(3, 3)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="^drafter_sha256: "):
        load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("model.safetensors", b"not a tensor file", "cannot be read"),
        ("config.json", b"{", "cannot be read"),
        ("config.json", b"[1]", "not an object"),
        ("calibration.json", b'{"schema": 1, "scale": [1.0]}', "scale: .* 15 finite numbers"),
        ("calibration.json", b'{"schema": 1, "temperature": [1,1,1,1,0]}', "must be > 0"),
        ("calibration.json", b'{"schema": 2}', "schema"),
    ],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, name, content, match):
    """Catches a traceback of a library, or a silent fallback, on a damaged file."""
    write_folder(tmp_path)
    (tmp_path / "estimators" / name).write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)
    assert "\n" not in str(caught.value)


def test_unknown_schema_and_missing_key_are_refused(tmp_path):
    """Catches reading a later format as if it were this one."""
    write_folder(tmp_path)
    edit_config(tmp_path, schema=2)
    with pytest.raises(ValueError, match="schema"):
        load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)
    edit_config(tmp_path, schema=1, rank=0)
    with pytest.raises(ValueError, match="rank: .* >= 1"):
        load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)


def test_a_failed_save_keeps_the_old_estimators(tmp_path, monkeypatch):
    """Catches a save that truncates the files it replaces (disk full, a kill)."""
    pre, _ = write_folder(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("forespark.estimators.checkpoint.save_file", fail)
    with pytest.raises(OSError):
        save_estimators(tmp_path, PreDraftEstimator(12, 10, 5, rank=8), PostDraftEstimator(12, 6))
    monkeypatch.undo()
    loaded = load_estimators(tmp_path, num_speculative_tokens=5, **SIZES)
    assert torch.equal(loaded.pre_draft.out.weight, pre.out.weight)
