"""Our folder `triton_kernels` is not Triton's package of that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = (
    "from forespark.plugin import register; register();"
    "import vllm.utils.import_utils as u; print('found', u._has_module('triton_kernels'))"
)


@pytest.mark.parametrize("folder", [ROOT, ROOT / "docs"])
def test_vllms_lookup_does_not_find_our_kernels(folder: Path) -> None:
    """Catches MoE models loading this project's kernels when started from its folder."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert "found False" in done.stdout, done.stderr[-2000:]
