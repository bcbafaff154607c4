"""The three layers: policy <- kernels <- adapter, imports only downward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = ("triton_kernels", "training", "calibration", "benchmarks")

POLICY = (
    "forespark/core.py",
    "forespark/config.py",
    "forespark/config_io.py",
    "forespark/config_sections.py",
    "forespark/drafter_config.py",
    "forespark/supported.py",
    "forespark/explain.py",
    "forespark/scheduler",
    "forespark/estimators",
    "calibration",
)
KERNELS = ("triton_kernels",)
TRAINING = ("training",)
ADAPTER = (
    "forespark.engine_args",
    "forespark.plugin",
    "forespark.patches",
    "forespark.cpu_mode",
    "forespark.drafter",
    "forespark.verifier",
    "forespark.hybrid",
)
# Answers prompts and measures acceptance through vLLM's public offline API, in its own process.
VLLM_CLIENTS = {"training/engine.py"}


def files(places: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return found


def imports(path: Path) -> set[str]:
    """Every module a file imports anywhere, also inside functions, by absolute name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # One level up is the file's own folder, so it cannot leave its layer.
            assert node.level <= 1, f"{path}: relative imports hide the layer"
            if node.level:
                continue
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def reaching(path: Path, *forbidden: str) -> list[str]:
    return sorted(
        name
        for name in imports(path)
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    )


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", files(POLICY), ids=identifier)
def test_policy_needs_neither_vllm_nor_a_gpu(path: Path) -> None:
    """Catches policy code that no longer runs on a laptop."""
    upward = (*ADAPTER, "forespark.triton_kernels", "vllm", "triton", "speculators")
    assert reaching(path, *upward) == []


@pytest.mark.parametrize("path", files(KERNELS), ids=identifier)
def test_kernels_never_import_vllm(path: Path) -> None:
    """Catches a kernel that cannot be tested and measured without the engine."""
    assert reaching(path, "vllm", *ADAPTER) == []


@pytest.mark.parametrize("path", files(TRAINING), ids=identifier)
def test_training_never_imports_vllm(path: Path) -> None:
    """Catches a trainer that needs the serving engine installed."""
    if identifier(path) in VLLM_CLIENTS:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any("vllm" in ast.unparse(node) for node in top)
        return
    assert reaching(path, "vllm", *ADAPTER) == []


def test_our_top_level_folders_are_imported_below_forespark() -> None:
    """Catches `import triton_kernels`, which works from the repo root and nowhere else."""
    everything = files(("forespark", "tests", *TOP_LEVEL))
    wrong = {
        identifier(path): found for path in everything if (found := reaching(path, *TOP_LEVEL))
    }
    assert wrong == {}


def test_files_stay_short() -> None:
    """Catches a file that has become two."""
    long = {
        identifier(path): lines
        for path in files(("forespark", *TOP_LEVEL))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 330
    }
    assert long == {}
