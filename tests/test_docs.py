"""What the documents point to exists: tests, and files of the repository. Their lines are short enough to read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@by_page
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
        source = ROOT / path
        assert source.exists(), path
        assert not name or f"def {name}(" in source.read_text(encoding="utf-8"), f"{path}::{name}"


@by_page
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@by_page
def test_lines_are_short_but_for_tables_and_what_a_tool_writes(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    if not any(line.startswith("Written by `tools/") for line in lines[:5]):
        assert not [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
