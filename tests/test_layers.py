"""The order of the folders, which import-linter holds, and what no module may contain that ruff does not know."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
MAX_LINES = 620  # about 600

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "protos" not in path.relative_to(PACKAGE).parts)
OTHERS = sorted(path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py"))


def linted(settings: Path) -> subprocess.CompletedProcess[str]:
    """What import-linter says to the contracts in a file."""
    command = [sys.executable, "-c", "import importlinter.cli as it; it.lint_imports_command()", "--no-cache"]
    return subprocess.run(
        [*command, "--config", str(settings)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_imports_keep_the_contracts_of_pyproject(tmp_path: Path) -> None:
    found = linted(ROOT / "pyproject.toml")
    assert found.returncode == 0, found.stdout
    swapped = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    swapped = swapped.replace(
        '    "wire",\n    "tables",\n    "exchange",\n', '    "exchange",\n    "wire",\n    "tables",\n'
    )
    (tmp_path / "pyproject.toml").write_text(swapped, encoding="utf-8")
    found = linted(tmp_path / "pyproject.toml")
    assert found.returncode == 1
    assert "tfps.exchange is not allowed to import tfps.wire" not in found.stdout
    assert "tfps.wire is not allowed to import tfps.exchange" in found.stdout


def test_docs_list_the_folders_in_the_order_of_the_contract() -> None:
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Folders")[2].partition("\n## ")[0]
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("layers = [")[2].partition("]")[0]
    documented = re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE)
    assert [name for name in documented if name != "tfps"] == re.findall(r'^    "(\w+)",', contract, re.MULTILINE)[1:]


def test_any_is_written_in_one_place() -> None:
    found = re.compile(r"^\s*(import typing|from typing import .*\bAny\b)", re.MULTILINE)
    assert [path for path in [*SOURCES, *OTHERS] if found.search(path.read_text("utf-8"))] == [PACKAGE / "types.py"]


def test_files_are_short_enough_to_read() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*SOURCES, *OTHERS]}
    assert not [f"{path.relative_to(ROOT)}: {count} lines" for path, count in sizes.items() if count > MAX_LINES]


def test_every_module_has_its_tests_in_the_same_place_or_says_where() -> None:
    for path in SOURCES:
        place = path.relative_to(PACKAGE)
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named = re.findall(r"tests/[\w/]+\.py", text.partition("Tested in ")[2])
        tests = [ROOT / name for name in named] or [ROOT / "tests" / place.with_name(f"test_{place.name}")]
        assert path.name == "__init__.py" or all(test.exists() for test in tests), place
