"""The documentation says what the tree holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forespark.config import reference_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAPPED = ("forespark", "triton_kernels", "training", "calibration", "benchmarks", "tests", "docs")
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def folders() -> list[str]:
    """The top-level folders and those directly below forespark/ that hold files."""
    below = [f"forespark/{path.name}" for path in (ROOT / "forespark").iterdir() if path.is_dir()]
    kept = [name for name in below if not name.endswith("__pycache__")]
    return [*(name for name in MAPPED if (ROOT / name).is_dir()), *sorted(kept)]


@pytest.mark.parametrize("folder", folders())
def test_every_folder_is_on_the_map(folder: str) -> None:
    """Catches a new folder that no page explains."""
    assert f"`{folder}/`" in (DOCS / "map.md").read_text(encoding="utf-8")


def test_map_names_only_what_exists() -> None:
    """Catches a renamed file that the map still points at."""
    named = re.findall(r"`([\w./-]+\.(?:py|md)|[\w/]+/)`", (DOCS / "map.md").read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_settings_page_is_up_to_date() -> None:
    """Catches docs/config.md drifting from the schema; write it with `forespark config --page`."""
    assert (DOCS / "config.md").read_text(encoding="utf-8") == reference_page()


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in DOCS.glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    """Catches a link to a moved page."""
    path = ROOT / page
    targets = [t for t in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in t]
    assert [target for target in targets if not (path.parent / target).exists()] == []
