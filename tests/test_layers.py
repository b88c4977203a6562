"""Holds the order of the folders: which may import which, and what no module may contain."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
MAX_LINES = 620  # about 600
MAX_CLASS_LINES, MAX_METHODS = 400, 30  # with what a class inherits of tfps: cutting it into bases changes nothing
LIMITED = ("membership", "pserver", "recovery")
LARGER = {"TableSlice", "AppliesEach"}  # may only lose members
TOP, GROUND = "tfps", "ground"
USED_EVERYWHERE = {"compression", "config", "errors", "threads", "types", "__version__", "protos"}
LOWEST_WITH_TENSORFLOW, ALONE_WITH_TENSORFLOW = "graph", "tfps.callbacks"

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "protos" not in path.relative_to(PACKAGE).parts)
OTHERS = sorted(path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py"))
by_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))


def documented_order() -> list[str]:
    """The folders from top to bottom, as docs/design.md has them."""
    section = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Folders")[2].partition("\n## ")[0]
    return [*re.findall(r"^\| `(\w+)/` \|", section, re.MULTILINE), GROUND]


ORDER = documented_order()


def folder_of(name: str) -> str:
    """Of a module of tfps, `name` as it is imported."""
    parts = name.split(".")[1:]
    if not parts or parts[0] not in ORDER:
        return GROUND if parts and parts[0] in USED_EVERYWHERE else TOP
    return parts[0]


def name_of(path: Path) -> str:
    """As it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_imports(path: Path) -> dict[str, int]:
    """What is imported of tfps -> line."""
    return {name: line for line, name in imported(path) if name.split(".")[0] == "tfps"}


def test_every_folder_has_its_place_in_the_table() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))} - {"protos"}
    assert folders | {TOP, GROUND} == set(ORDER)


@by_source
def test_imports_go_downwards(path: Path) -> None:
    own = ORDER.index(folder_of(name_of(path)))
    assert not [
        f"line {line}: {name}" for name, line in own_imports(path).items() if ORDER.index(folder_of(name)) < own
    ]


def test_imports_within_a_folder_have_no_circles() -> None:
    modules = {name_of(path): path for path in SOURCES}
    graph = {
        name: {own if own in modules else own.rpartition(".")[0] for own in own_imports(path)} - {"tfps"}
        for name, path in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@by_source
def test_imports_name_the_package(path: Path) -> None:
    tree = parsed(path)
    assert not [f"line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@by_source
def test_only_folders_above_the_worker_and_callbacks_import_tensorflow(path: Path) -> None:
    name = name_of(path)
    if folder_of(name) not in ORDER[1 : ORDER.index(LOWEST_WITH_TENSORFLOW) + 1] and name != ALONE_WITH_TENSORFLOW:
        found = [
            f"line {line}: {name}" for line, name in imported(path) if name.split(".")[0] in ("tensorflow", "keras")
        ]
        assert not found


@by_source
def test_private_names_of_tensorflow_and_of_keras_are_imported_in_one_module_each(path: Path) -> None:
    private = {"tf_private": ("tensorflow.python", "tensorflow.core"), "keras_private": ("keras.src",)}
    others = tuple(prefix for owner, prefixes in private.items() if owner != path.stem for prefix in prefixes)
    assert not [f"line {line}: {name}" for line, name in imported(path) if name.startswith(others)]


def test_any_is_written_in_one_place() -> None:
    may = [
        path for path in [*SOURCES, *OTHERS] if re.search(r"\bAny\b|import typing", path.read_text(encoding="utf-8"))
    ]
    found = {path for path in may for _, name in imported(path) if name in ("typing.Any", "typing")}
    assert found == {PACKAGE / "types.py"}


@by_source
def test_the_package_has_no_assert_statements(path: Path) -> None:
    tree = parsed(path)
    assert not [f"line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@by_source
def test_files_are_short_enough_to_read(path: Path) -> None:
    assert lines(path) <= MAX_LINES


def test_files_of_tests_and_tools_are_short_enough_to_read() -> None:
    assert OTHERS
    assert not [f"{path.relative_to(ROOT)}: {lines(path)} lines" for path in OTHERS if lines(path) > MAX_LINES]


@pytest.mark.parametrize("folder", LIMITED)
def test_classes_are_small(folder: str) -> None:
    found = set[str]()
    for path in sorted((PACKAGE / folder).glob("*.py")):
        module = importlib.import_module(name_of(path))
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                own = [each for each in kind.__mro__ if each.__module__.split(".")[0] == "tfps"]
                methods = {
                    name
                    for each in own
                    for name, value in vars(each).items()
                    if callable(value) or isinstance(value, property)
                }
                if (
                    len(methods) > MAX_METHODS
                    or sum(len(inspect.getsourcelines(each)[0]) for each in own) > MAX_CLASS_LINES
                ):
                    found.add(name)
    assert found == (LARGER if folder == "pserver" else set())


@by_source
def test_every_module_has_its_tests_in_the_same_place_or_says_where(path: Path) -> None:
    if path.name == "__init__.py":
        return
    place = path.relative_to(PACKAGE)
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    named = re.findall(r"tests/[\w/]+\.py", text.partition("Tested in ")[2])
    tests = [ROOT / name for name in named] or [ROOT / "tests" / place.with_name(f"test_{place.name}")]
    assert not [str(test) for test in tests if not test.exists()]
