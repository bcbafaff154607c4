"""Latency artifacts notice other weights under the same name."""

from __future__ import annotations

from pathlib import Path

from forespark.drafter.fingerprint import weights_fingerprint


def test_a_fingerprint_changes_with_the_weights(tmp_path: Path) -> None:
    """Catches another checkpoint in the same folder, and a size or end that is not looked at."""
    assert weights_fingerprint(tmp_path) is None
    assert weights_fingerprint("organisation/drafter") is None
    file = tmp_path / "model.safetensors"
    seen = set()
    body = bytes(300_000)
    for content in (body, body + b"x", b"y" + body[1:], body[:-1] + b"z"):
        file.write_bytes(content)
        seen.add(weights_fingerprint(tmp_path))
    (tmp_path / "estimators").mkdir()
    file.rename(tmp_path / "estimators" / "model.safetensors")
    seen.add(weights_fingerprint(tmp_path))
    assert len(seen) == 5 and None not in seen
