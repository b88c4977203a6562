"""Holds the order of the folders: which may import which, and what no module may contain."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
MAX_LINES, MAX_METHODS = 400, 30  # of a class with its bases of this package
# Classes above that, each with its reason. The list only shrinks.
LARGE = {
    "Extended",  # overrides what TensorFlow asks a strategy, in one class
    "GatedVariable",  # overrides what TensorFlow asks a variable, in one class
    "OuterOptimizer",  # a step of a fragment, traced and on the host: one protocol
    "Worker",  # the exchange's interface, each method a delegation
}
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


@functools.cache
def own_classes() -> dict[str, tuple[ast.ClassDef, tuple[str, ...]]]:
    """Each class of the package by its dotted name, and the dotted names of its bases."""
    found = {}
    for path in SOURCES:
        module = name_of(path)
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
        known = {name.rpartition(".")[2]: name for name in own_imports(path)}
        known |= {node.name: f"{module}.{node.name}" for node in nodes}
        for node in nodes:
            named = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases)
            bases = tuple(known[each] for each in named if each in known)
            found[known[node.name]] = node, tuple(each for each in bases if each != known[node.name])
    return found


def with_bases(name: str) -> set[str]:
    """A class and its bases that the package defines."""
    bases = own_classes()[name][1] if name in own_classes() else ()
    return {name}.union(*map(with_bases, bases))


def test_classes_are_small_with_what_they_inherit() -> None:
    large = {}
    for name in own_classes():
        parts = [own_classes()[each][0] for each in with_bases(name) if each in own_classes()]
        lines = sum((part.end_lineno or 0) - part.lineno + 1 for part in parts)
        methods = {each.name for part in parts for each in part.body if isinstance(each, ast.FunctionDef)}
        if lines > MAX_LINES or len(methods) > MAX_METHODS:
            large[name.rpartition(".")[2]] = f"{lines} lines, {len(methods)} methods"
    assert not large.keys() - LARGE, large
    assert not LARGE - large.keys(), "these have become small: take them from the list"


def test_no_base_is_a_part_of_a_class() -> None:
    docstrings = {name: ast.get_docstring(node) or "" for name, (node, _) in own_classes().items()}
    assert not [name for name, text in docstrings.items() if text.startswith("The part of")]


@by_source
def test_every_module_has_its_tests_in_the_same_place_or_says_where(path: Path) -> None:
    if path.name == "__init__.py":
        return
    place = path.relative_to(PACKAGE)
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    named = re.findall(r"tests/[\w/]+\.py", text.partition("Tested in ")[2])
    tests = [ROOT / name for name in named] or [ROOT / "tests" / place.with_name(f"test_{place.name}")]
    assert not [str(test) for test in tests if not test.exists()]
