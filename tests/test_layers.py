"""The order of the folders, which import-linter holds, the size of classes, and what ruff does not know."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
MAX_LINES, MAX_METHODS = 400, 30  # of a class with its bases of this package
# Classes above that, each with its reason. The list only shrinks.
LARGE = {
    "Extended",  # overrides what TensorFlow asks a strategy, in one class
    "GatedVariable",  # overrides what TensorFlow asks a variable, in one class
    "OuterOptimizer",  # a step of a fragment, traced and on the host: one protocol
}

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
    swapped = swapped.replace('    "wire",\n    "exchange",\n', '    "exchange",\n    "wire",\n')
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


@functools.cache
def own_classes() -> dict[str, tuple[ast.ClassDef, tuple[str, ...]]]:
    """Each class of the package by its dotted name, and the dotted names of its bases."""
    found = {}
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        known = {  # `from a import b`: b -> a.b; so modules are known, too
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        known |= {node.name: f"{module}.{node.name}" for node in classes}
        for node in classes:
            named = (ast.unparse(base).partition("[")[0].partition(".") for base in node.bases)
            bases = (known.get(first, first) + dot + rest for first, dot, rest in named)
            found[known[node.name]] = node, tuple(each for each in bases if each != known[node.name])
    return found


def with_bases(name: str) -> set[str]:
    """A class and its bases that the package defines."""
    return {name}.union(*map(with_bases, own_classes()[name][1])) if name in own_classes() else set()


def test_classes_are_small_with_what_they_inherit() -> None:
    large = {}
    for name in own_classes():
        parts = [own_classes()[each][0] for each in with_bases(name)]
        lines = sum((part.end_lineno or 0) - part.lineno + 1 for part in parts)
        methods = {each.name for part in parts for each in part.body if isinstance(each, ast.FunctionDef)}
        if lines > MAX_LINES or len(methods) > MAX_METHODS:
            large[name.rpartition(".")[2]] = f"{lines} lines, {len(methods)} methods"
    assert not large.keys() - LARGE, large
    assert not LARGE - large.keys(), "these have become small: take them from the list"


def test_no_base_is_a_part_of_a_class() -> None:
    docstrings = {name: ast.get_docstring(node) or "" for name, (node, _) in own_classes().items()}
    assert not [name for name, text in docstrings.items() if text.startswith("The part of")]


def test_every_module_has_its_tests_in_the_same_place_or_says_where() -> None:
    for path in SOURCES:
        place = path.relative_to(PACKAGE)
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named = re.findall(r"tests/[\w/]+\.py", text.partition("Tested in ")[2])
        tests = [ROOT / name for name in named] or [ROOT / "tests" / place.with_name(f"test_{place.name}")]
        assert path.name == "__init__.py" or all(test.exists() for test in tests), place
