"""Every private name of TensorFlow and Keras that tfps uses has been checked when it was imported.

What is found: attributes that begin with one underscore (also those of `getattr` and its like), what is used of
TensorFlow's and Keras' private modules, methods that override theirs, and functions of theirs that are replaced. A name
that tfps defines too, in another class, is taken for its own.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import tfps
from tfps.graph.tf_private import needed, needs

PACKAGE = Path(__file__).resolve().parent.parent / "tfps"
# Generated code; and what cannot be imported without its extra.
OUTSIDE = {"protos"} if importlib.util.find_spec("ray") else {"protos", "ray"}
SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py" and not OUTSIDE.intersection(path.relative_to(PACKAGE).parts)
)
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_exit"}  # of namedtuples and of os
BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "Patch", "replaces"}
PRIVATE_MODULES = ("tensorflow.python.", "tensorflow.core.", "keras.src.")


@functools.cache
def trees() -> dict[Path, ast.Module]:
    importlib.import_module("tfps.strategy.strategy")  # which checks
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    """(line, owner, name) of every attribute that is used, also by `getattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            owner, name, *_ = node.args
            if isinstance(name, ast.Constant):
                yield node.lineno, owner, str(name.value)


def is_self(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def defined(tree: ast.AST) -> set[str]:
    """What a class or module defines, its methods' attributes of `self` included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def classes(path: Path, tree: ast.AST) -> Iterator[tuple[ast.ClassDef, type]]:
    module = module_of(path)
    within = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node not in within:
            yield node, getattr(module, node.name)


def module_of(path: Path) -> types.ModuleType:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return importlib.import_module(name.removesuffix(".__init__"))


def is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "tfps"


@functools.cache
def own() -> dict[type, set[str]]:
    """What each class of tfps defines."""
    return {cls: defined(node) for path, tree in trees().items() for node, cls in classes(path, tree)}


@functools.cache
def own_anywhere() -> set[str]:
    return set().union(*map(defined, trees().values()))


def checked() -> set[str]:
    trees()
    return set().union(*needed.values())


def unchecked_attributes(tree: ast.AST) -> list[str]:
    """Private attributes of anything but the `self` of a class; that of a function which replaces a method counts."""
    of_classes = {id(node) for each in ast.walk(tree) if isinstance(each, ast.ClassDef) for node in ast.walk(each)}
    known = checked() | own_anywhere() | DOCUMENTED
    return [
        f"line {line}: {ast.unparse(owner)}.{name}"
        for line, owner, name in attributes(tree)
        if is_private(name) and not (is_self(owner) and id(owner) in of_classes) and name not in known
    ]


def unchecked_of_self(tree: ast.AST, own: set[str]) -> list[str]:
    """Private attributes of `self` that are not among `own`."""
    known = checked() | own
    return [
        f"line {line}: self.{name}"
        for line, owner, name in attributes(tree)
        if is_private(name) and is_self(owner) and name not in known
    ]


def unchecked_of_modules(tree: ast.AST, module: types.ModuleType) -> list[str]:
    """What is used of private modules that `module` has imported."""
    found = []
    for line, owner, name in attributes(tree):
        imported = vars(module).get(owner.id) if isinstance(owner, ast.Name) else None
        if isinstance(imported, types.ModuleType) and f"{imported.__name__}.".startswith(PRIVATE_MODULES):
            value = getattr(imported, name, None)
            is_checked = name in needed.get(imported, ()) or (isinstance(value, type) and value in needed)
            found += [] if is_checked else [f"line {line}: {imported.__name__}.{name}"]
    return found


def test_private_attributes_of_others_have_been_checked() -> None:
    found = {path.name: unchecked_attributes(tree) for path, tree in trees().items()}
    assert not {name: each for name, each in found.items() if each}


def test_private_attributes_that_classes_have_from_others_have_been_checked() -> None:
    found = {
        cls: unchecked_of_self(node, set().union(*(own()[each] for each in cls.__mro__ if is_own(each))))
        for path, tree in trees().items()
        for node, cls in classes(path, tree)
    }
    assert not {cls: each for cls, each in found.items() if each}


def test_what_is_used_of_private_modules_has_been_checked() -> None:
    found = {path.name: unchecked_of_modules(tree, module_of(path)) for path, tree in trees().items()}
    assert not {name: each for name, each in found.items() if each}


def test_private_attributes_that_override_those_of_others_have_been_checked() -> None:
    """What has the same name by chance is found too."""
    found = {}
    for cls, names in own().items():
        known = set().union(*(names for owner, names in needed.items() if owner in cls.__mro__))
        for base in cls.__mro__:
            if not is_own(base) and base is not object:
                found[cls, base] = {name for name in names if is_private(name) and has(base, name)} - known
    assert found
    assert not {key: each for key, each in found.items() if each}


def has(base: type, name: str) -> bool:
    try:
        needs(base, name)
    except ImportError:
        return False
    return True


def test_functions_that_are_replaced_have_been_checked() -> None:
    tfps.Strategy().close()
    ids = {id(getattr(owner, name, None)) for owner, names in needed.items() for name in names}
    found = []
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("tensorflow", "keras")]:
        owners = [module, *(each for each in vars(module).values() if isinstance(each, type))]
        found += [
            (owner, name)
            for owner in owners
            for name, value in list(vars(owner).items())
            if isinstance(value, types.FunctionType)
            and Path(value.__code__.co_filename).is_relative_to(PACKAGE)
            and value.__module__.partition(".")[0] != "tfps"  # wrapped
        ]
    assert len({name for _, name in found}) >= 20
    assert not [(owner, name) for owner, name in found if id(getattr(owner, name)) not in ids]


def test_what_is_checked_is_used() -> None:
    used = own_anywhere().union(*({name for _, _, name in attributes(tree)} for tree in trees().values()))
    assert not checked() - used


@pytest.mark.parametrize(
    "source",
    [
        "variable._nowhere",
        "variable._nowhere = 1",
        "del a.b()._nowhere",
        "getattr(a, '_nowhere', None)",
        "hasattr(a, '_nowhere')",
        "super()._nowhere()",
        "def replaces_a_method(self):\n  self._nowhere",
    ],
)
def test_a_private_attribute_of_others_is_found(source: str) -> None:
    (found,) = unchecked_attributes(ast.parse(source))
    assert found.endswith("._nowhere")


def test_a_private_attribute_of_self_that_nobody_defines_is_found() -> None:
    source = "class C:\n def f(self):\n  self._own = self._nowhere"
    assert unchecked_of_self(ast.parse(source), {"_own"}) == ["line 3: self._nowhere"]


def test_an_unchecked_name_of_a_private_module_is_found() -> None:
    module = importlib.import_module("tfps.updates.variables")
    found = unchecked_of_modules(ast.parse("values.MirroredVariable, values.OnReadPolicy, values.Mirrored"), module)
    assert found == ["line 1: tensorflow.python.distribute.values.OnReadPolicy"]


class Assigns:
    """Has attributes that no instance exists of."""

    def __init__(self) -> None:
        self._given = 1
        print(self._asked)  # type: ignore[attr-defined]


class Inherits(Assigns):
    """Has them from its base."""


def test_an_attribute_that_methods_assign_is_there_and_one_that_they_only_read_is_not() -> None:
    assert has(Assigns, "_given")
    assert has(Inherits, "_given")
    assert not has(Inherits, "_asked")
    assert has(tf.Operation, "_set_attr")
    with pytest.raises(ImportError, match=r"Inherits.* has no _asked"):
        needs(Inherits, "__init__", "_asked")
