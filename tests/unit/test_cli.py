"""The command line: light start, reference page, one-line refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forespark.cli import app
from forespark.config import reference_yaml
from forespark.doctor import Finding, show

DRAFTER = Path(__file__).parents[1] / "assets" / "tiny-pair" / "drafter"
runner = CliRunner()


def test_help_imports_nothing_heavy() -> None:
    """Catches a top-level import that makes every `forespark --help` wait for torch or vLLM."""
    code = (
        "import sys; import forespark.cli; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_config_prints_the_reference() -> None:
    """Catches a reference that goes anywhere but stdout, where it is redirected into a file."""
    result = runner.invoke(app, ["config"])
    assert result.exit_code == 0
    assert result.stdout == reference_yaml()


def test_config_check_accepts_and_refuses(tmp_path: Path) -> None:
    """Catches a check that passes what the server would refuse."""
    file = tmp_path / "forespark.yaml"
    file.write_text(f"method: forespark\nmodel: {DRAFTER}\n")
    good = runner.invoke(app, ["config", "check", str(file)])
    assert good.exit_code == 0 and "K = 7 of 7" in good.stdout
    for change in ("num_speculative_tokens: 8", "schedular: {}"):
        file.write_text(f"method: forespark\nmodel: {DRAFTER}\n{change}\n")
        bad = runner.invoke(app, ["config", "check", str(file)])
        assert bad.exit_code == 2
        assert change.split(":")[0] in bad.stderr and "Traceback" not in bad.output


@pytest.mark.parametrize("content", [None, "not json\n"])
def test_explain_refuses_a_bad_trace_in_one_line(tmp_path: Path, content: str | None) -> None:
    """Catches a traceback for a missing or damaged trace file."""
    trace = tmp_path / "trace.jsonl"
    if content is not None:
        trace.write_text(content + content)
    result = runner.invoke(app, ["explain", str(trace)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and len(result.stderr.strip().splitlines()) == 1


def test_doctor_report_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches advice lost between the table and the reader."""
    show([Finding("torch", "2.13.0"), Finding("plugin", "missing", False, "pip install -e .")])
    assert "plugin: missing; pip install -e ." in capsys.readouterr().out


def test_report_redraws_from_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `forespark report` that needs flags to find the committed runs, or draws nothing."""
    monkeypatch.chdir(Path(__file__).parents[2])
    where = ["--out", str(tmp_path), "--evidence", str(tmp_path / "bench.json")]
    result = runner.invoke(app, ["report", *where])
    assert result.exit_code == 0, result.output
    assert any(tmp_path.glob("*-pareto.png")) and (tmp_path / "index.html").is_file()
    monkeypatch.chdir(tmp_path)
    refused = runner.invoke(app, ["report"])
    assert refused.exit_code != 0 and "is no folder" in str(refused.exception) + refused.output
