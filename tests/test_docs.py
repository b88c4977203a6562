"""What the documents point to exists: tests, and files of the repository. Their lines are short enough to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def test_every_test_that_a_page_names_exists() -> None:
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
            source = ROOT / path
            assert source.exists(), f"{page.name}: {path}"
            assert not name or f"def {name}(" in source.read_text(encoding="utf-8"), f"{page.name}: {path}::{name}"


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_lines_are_short_but_for_tables() -> None:
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        long = [number for number, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]
        assert not long, f"{page.name}: {long}"


def test_every_folder_has_a_section_in_the_design() -> None:
    folders = {path.name for path in (ROOT / "tfps").iterdir() if any(path.glob("*.py"))} - {"protos"}
    headings = [line for line in DESIGN.splitlines() if line.startswith("## ")]
    assert {name for line in headings for name in re.findall(r"`(\w+)/`", line)} == folders


def test_what_a_gradient_passes_is_where_the_design_says() -> None:
    section = " ".join(DESIGN.partition("## The path of a gradient")[2].partition("\n## ")[0].split())
    found = re.findall(r"`([\w.]+)` (?:\(|in )`(\w+/\w+\.py)`", section)
    assert len(found) > 15
    for name, module in found:
        source = ast.parse((ROOT / "tfps" / module).read_text(encoding="utf-8"))
        assert name in set(defined(source.body)), f"{module}: {name}"


def defined(body: Iterable[ast.stmt], within: str = "") -> Iterator[str]:
    """Classes, functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from defined(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield within + node.name
