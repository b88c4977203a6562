"""Holds the order of the modules: who may import whom, and what no module may contain."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
MAX_LINES = 450

# A module imports from layers above its own in this list, and from its own as long as no circle arises.
LAYERS = (
    "version errors config memory shared_memory terminal supervisor progress threads",
    (
        "slicing placement aggregate exchange layout tuning report sparse picture intervals capture trace "
        "capture_file summary assembly"
    ),
    "protos frames send_queue stream membership control rounds status recording shard",
    "patience declaring tuner tracer worker server job embedded metrics console",
    (
        "tf_private keras_private graph_ops shares weighing moments variables deferred reductions "
        "initial_values transfers step_spans runtime combined cluster generators lockstep staging loops "
        "datasets graph_view extended logs loss_scaling saving predictions xplane trace_run strategy "
        "callbacks interrupts buckets compiling invariants names seeds"
    ),
    "__init__ cli launch trace_cli tensorboard plugin",
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
TENSORFLOW_LAYER = 4

SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "protos" not in path.relative_to(PACKAGE).parts)
by_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, also inside functions; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@by_source
def test_every_module_has_its_place_in_the_layers(path: Path) -> None:
    assert path.stem in LAYER_OF, f"put {path.name} into its layer in {Path(__file__).name}"


def own_imports(path: Path) -> dict[str, int]:
    """Module of tfps that is imported -> line."""
    found: dict[str, int] = {}
    for line, name in imported(path):
        package, _, rest = name.partition(".")
        if package == "tfps":
            # `from tfps import Config` means the package itself, which stands above nearly everything.
            module = rest.split(".")[0]
            found[module if module in LAYER_OF else "__init__"] = line
    return found


@by_source
def test_imports_go_downwards(path: Path) -> None:
    own = LAYER_OF[path.stem]
    assert not [f"line {line}: {name}" for name, line in own_imports(path).items() if LAYER_OF[name] > own]


def test_imports_within_a_layer_have_no_circles() -> None:
    graph = {path.stem: set(own_imports(path)) for path in SOURCES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@by_source
def test_imports_name_the_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [f"line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


@by_source
def test_only_the_tensorflow_layer_imports_tensorflow(path: Path) -> None:
    if LAYER_OF[path.stem] != TENSORFLOW_LAYER:
        found = [
            f"line {line}: {name}" for line, name in imported(path) if name.split(".")[0] in ("tensorflow", "keras")
        ]
        assert not found


@by_source
def test_private_names_of_tensorflow_and_of_keras_are_imported_in_one_module_each(path: Path) -> None:
    private = {"tf_private": ("tensorflow.python", "tensorflow.core"), "keras_private": ("keras.src",)}
    others = tuple(prefix for owner, prefixes in private.items() if owner != path.stem for prefix in prefixes)
    assert not [f"line {line}: {name}" for line, name in imported(path) if name.startswith(others)]


@by_source
def test_the_package_has_no_assert_statements(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [f"line {node.lineno}" for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@by_source
def test_files_are_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_layers_name_only_modules_that_exist() -> None:
    assert [name for name in LAYER_OF if not any(PACKAGE.rglob(f"{name}.py")) and not (PACKAGE / name).is_dir()] == []
