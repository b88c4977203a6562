"""The messages that tfps raises, read from its sources: what docs/troubleshooting.md is made from.

A message is the first argument of a call of a class of tfps/errors.py, wherever the error is raised. Every part that is
known only at run time is an ellipsis: `slice_bytes must be positive, got …`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import pathlib
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tfps"
HOLE = "…"
DEPTH = 8  # how many functions and names a text is followed through
MOST_PHRASES = 8  # of one placeholder
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """What an error says.

    Args:
        kind: the class's name.
        text: with `HOLE` for what is known at run time only.
        path: the module, relative to the repository's root.
        line: where the error is made.
    """

    kind: str
    text: str
    path: str
    line: int


def error_classes(package: pathlib.Path = PACKAGE) -> list[str]:
    """Names of the classes of tfps/errors.py, in their order there."""
    tree = ast.parse((package / "errors.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


@functools.cache
def messages(package: pathlib.Path = PACKAGE) -> tuple[Message, ...]:
    """All of them, sorted, each text once per class.

    An error whose message is all made at run time (`kind(text)`, what arrives over the network) says nothing new: the
    text is that of an error made elsewhere.
    """
    found: dict[tuple[str, str], Message] = {}
    for kind, text, path, line in _Package(package).errors():
        if len(re.findall(r"\w{2,}", text)) > 1:
            found.setdefault((kind, text), Message(kind, text, path, line))
    return tuple(sorted(found.values()))


class _Package:
    """The sources: functions and constants by name, and what holds which node."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._kinds = set(error_classes(folder))
        self._trees: dict[str, ast.Module] = {}
        self._functions: dict[str, list[_Function]] = defaultdict(list)
        self._constants: dict[str, list[ast.expr]] = defaultdict(list)
        self._parents: dict[ast.AST, ast.AST] = {}
        self._row: dict[str, ast.expr] = {}  # of the table around the error that is read
        for path in sorted(folder.rglob("*.py")):
            if "protos" not in path.relative_to(folder).parts:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                self._trees[path.relative_to(folder.parent).as_posix()] = tree
                self._index(tree)

    def _index(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            self._parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, _Function):
                self._functions[node.name].append(node)
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and isinstance(target, ast.Name)
                and node.value is not None
            ):
                self._constants[target.id].append(node.value)

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What holds a node, from the inside out; the module is the last."""
        while (parent := self._parents.get(node)) is not None:
            yield parent
            node = parent

    def _module(self, node: ast.AST) -> ast.AST:
        return [node, *self._around(node)][-1]

    def errors(self) -> Iterator[tuple[str, str, str, int]]:
        """(class, text, module, line) of every error that is made."""
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and node.args and (kind := self._made(node.func)):
                    for row in self._rows(node):
                        self._row = row
                        for text in self._texts(node.args[0], DEPTH):
                            yield kind, text, path, node.lineno

    def _made(self, called: ast.expr) -> str:
        """The class of the errors that a call makes: itself, or by a method of its own; "" if of none."""
        of = called.value if isinstance(called, ast.Attribute) else called
        return next((name for name in (_name(called), _name(of)) if name in self._kinds), "")

    def _rows(self, node: ast.AST) -> list[dict[str, ast.expr]]:
        """What a loop around a node over a table, a constant, gives to its names, row by row; else one without any."""
        for loop in self._around(node):
            if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Name) and isinstance(loop.target, ast.Tuple):
                names = [_name(target) for target in loop.target.elts]
                tables = [table for table in self._constants[loop.iter.id] if isinstance(table, (ast.Tuple, ast.List))]
                rows = [row.elts for table in tables for row in table.elts if isinstance(row, ast.Tuple)]
                return [dict(zip(names, row, strict=False)) for row in rows] or [{}]
        return [{}]

    def _texts(self, node: ast.expr, depth: int) -> list[str]:
        """What an expression may be, with holes."""
        if depth == 0:
            return [HOLE]
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str) else []
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, depth) + self._texts(node.orelse, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined([self._texts(node.left, depth), self._texts(node.right, depth)])
        if isinstance(node, ast.JoinedStr):
            return _joined([self._part(part, depth) for part in node.values])
        given = self._given(node) if isinstance(node, ast.Name) else self._returned(node)
        return [text for value in given for text in self._texts(value, depth - 1)] or [HOLE]

    def _part(self, part: ast.expr, depth: int) -> list[str]:
        """Of an f-string: what it always says, or what a placeholder may say, as far as that is known."""
        if not isinstance(part, ast.FormattedValue):
            return self._texts(part, depth)
        found = [text for text in dict.fromkeys(self._texts(part.value, depth - 1)) if text]
        if not all(re.search(r"\w", text) for text in found):  # some are unknown: the others only if they are whole
            found = [*(text for text in found if HOLE not in text), HOLE]
        return found if 0 < len(found) <= MOST_PHRASES else [HOLE]

    def _given(self, name: ast.Name) -> list[ast.expr]:
        """What the loop or function that holds a name assigns to it, or one around that, or a module."""
        if name.id in self._row:
            return [self._row[name.id]]
        for holder in self._around(name):
            if not isinstance(holder, (*get_args(_Function), ast.For)):
                continue
            nodes = [holder]
            if not isinstance(holder, ast.For):  # loops around the name have had their turn
                nodes = [node for node in ast.walk(holder) if not isinstance(node, ast.For)]
            if found := [value for node in nodes for value in self._values(node, name.id)]:
                return found
        found = self._constants[name.id]
        return found if len(found) == 1 else []

    def _values(self, node: ast.AST, name: str) -> list[ast.expr]:
        """What one statement or expression gives to a name: an assignment, a loop over what is written there."""
        if isinstance(node, ast.Assign):
            return [node.value] if any(_name(target) == name for target in node.targets) else []
        if isinstance(node, ast.NamedExpr):
            return [node.value] if node.target.id == name else []
        if not isinstance(node, ast.For):
            return []
        rows: list[ast.expr] = [node.iter]
        if isinstance(node.iter, ast.Name):
            rows = self._constants[node.iter.id]
        items = [item for row in rows if isinstance(row, (ast.Tuple, ast.List)) for item in row.elts]
        if isinstance(node.target, ast.Name):
            return items if node.target.id == name else []
        targets = [_name(target) for target in node.target.elts] if isinstance(node.target, ast.Tuple) else []
        if name not in targets:
            return []
        return [item.elts[targets.index(name)] for item in items if isinstance(item, ast.Tuple)]

    def _returned(self, node: ast.expr) -> list[ast.expr]:
        """What the function that an expression calls may return, if its module or the package has one of that name."""
        if not isinstance(node, ast.Call):
            return []
        is_method = isinstance(node.func, ast.Attribute)
        called = self._functions[_name(node.func)]
        for fits in (
            lambda each: self._module(each) is self._module(node),
            lambda each: isinstance(self._parents[each], ast.ClassDef) == is_method,
        ):
            called = list(filter(fits, called)) or called
        if len(called) != 1:
            return []
        return [each.value for each in ast.walk(called[0]) if isinstance(each, ast.Return) and each.value is not None]


def _joined(parts: list[list[str]]) -> list[str]:
    return ["".join(each) for each in itertools.product(*parts)]


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
