"""What is replaced of Keras and TensorFlow stands in one table, with a reason and tests, and nothing else is."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import keras

import tfps
from tfps.graph.patches import Patch, install
from tfps.strategy.patches import TABLE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tfps"
# AutoGraph's setting, which is no function.
ALLOWED = {"graph/tf_private.py: autograph_config.CONVERSION_RULES"}
PRIVATE = ("tfps.graph.tf_private", "tfps.keras_hooks.keras_private")
THEIRS = ("keras", "tensorflow", *PRIVATE)


def test_each_attribute_is_replaced_once_for_a_reason_and_tested() -> None:
    assert len({(patch.owner, patch.name) for patch in TABLE}) == len(TABLE)
    for patch in TABLE:
        assert len(patch.why.split()) > 1, patch.place
        assert (ROOT / patch.test).exists(), patch.place


def replaced() -> Iterator[tuple[str, object]]:
    """(place, function) of every function of Keras or TensorFlow, in a module or class, that is code of tfps."""
    for module in [each for name, each in sys.modules.items() if name.partition(".")[0] in ("tensorflow", "keras")]:
        for owner in (module, *(each for each in vars(module).values() if isinstance(each, type))):
            if owner.__module__.startswith("tfps.") if isinstance(owner, type) else False:
                continue
            for name, value in list(vars(owner).items()):
                if isinstance(value, types.FunctionType) and is_own(value):
                    yield f"{owner}.{name}", value


def is_own(function: types.FunctionType) -> bool:
    """Whether its code is of tfps, or what that hands to contextlib."""
    of_context = getattr(function.__closure__, "__len__", lambda: 0)() and Path(function.__code__.co_filename).name
    cells = function.__closure__ or () if of_context == "contextlib.py" else ()
    inner = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, types.FunctionType)]
    return any(Path(each.__code__.co_filename).is_relative_to(PACKAGE) for each in (function, *inner))


def test_nothing_is_replaced_that_the_table_does_not_have() -> None:
    tfps.Strategy().close()
    known = {id(vars(patch.owner)[patch.name]) for patch in TABLE}
    found = {place: id(value) for place, value in replaced()}
    assert known <= set(found.values())
    assert not [place for place, value in found.items() if value not in known]


def assigned(text: str) -> list[str]:
    """Attributes of what is imported from Keras or TensorFlow, and of names for it, that a module assigns."""
    tree, found = ast.parse(text), []
    names = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith(THEIRS)
    }
    for node in ast.walk(tree):  # names for it, such as `kind = keras.Model`
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and root(node.value) in names:
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    for node in ast.walk(tree):
        owner: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            owner = node.args[0]
        if owner is not None and root(owner) in names:
            found.append(ast.unparse(node))
    return found


def root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_assigns_attributes_of_keras_or_tensorflow_by_itself() -> None:
    assert assigned("import keras\nkeras.Model.save = 1\nkind = keras.Model\nkind.fit, b = 1, 2") == [
        "keras.Model.save",
        "kind.fit",
    ]
    assert assigned("from tfps.keras_hooks.keras_private import nn_module\nsetattr(nn_module, 'conv', 1)")
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {f"{path.relative_to(PACKAGE)}: {each}" for path in paths for each in assigned(path.read_text("utf-8"))}
    assert found == ALLOWED


def test_a_replacement_has_the_name_and_documentation_of_the_original() -> None:
    class Owner:
        @staticmethod
        def method() -> str:
            """What it does."""
            return "original"

    def wrap(original):  # type: ignore[no-untyped-def]
        def replacement() -> str:
            return f"not {original()}"

        return replacement

    install([Patch(Owner, "method", wrap, "", "")])
    assert Owner.method.__doc__ == "What it does."
    assert (Owner.method.__name__, Owner.method.__wrapped__()) == ("method", "original")  # type: ignore[attr-defined]
    tfps.Strategy().close()
    assert keras.Model.fit.__name__ == "fit"
