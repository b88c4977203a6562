#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes the docstrings of all public names, with their signatures, to the end of docs/api.md.

tools/make_api_page.py [--check]    --check only says whether the page is up to date

It reads the sources and imports nothing. What stands above `HEAD` on the page is written by hand.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
PROGRAM = "python -m tools.make_api_page"
HEAD = "## Docstrings\n"
WIDTH = 120
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r"([\w.*, ]+?): (.*)", re.DOTALL)
_Definition = ast.ClassDef | ast.FunctionDef

_OF_EMBEDDING = ("embeddings", "read_rows", "load_rows", "export_rows", "to_embedding")
# Module, name, how it is called on the page, and which of its methods and properties are public: None: all without
# an underscore.
PUBLIC: tuple[tuple[str, str, str, tuple[str, ...] | None], ...] = (
    ("strategy/strategy", "Strategy", "tfps.Strategy", None),
    ("runtime/report", "Report", "What `Strategy.report` returns", None),
    ("config", "Config", "tfps.Config", ("from_environment",)),
    ("callbacks", "Metrics", "tfps.callbacks.Metrics", ()),
    ("callbacks", "Trace", "tfps.callbacks.Trace", ()),
    ("layers/embedding", "Embedding", "tfps.layers.Embedding", _OF_EMBEDDING),
    ("layers/distributed", "DistributedEmbedding", "tfps.layers.DistributedEmbedding", ()),
    ("layers/distributed_configs", "TableConfig", "tfps.layers.TableConfig", ()),
    ("layers/distributed_configs", "FeatureConfig", "tfps.layers.FeatureConfig", ()),
    ("ray/running", "run", "tfps.ray.run", ()),
    ("ray/train", "TensorflowConfig", "tfps.ray.TensorflowConfig", ()),
)


def made() -> str:
    """The part of the page that this program writes.

    Raises:
        LookupError: a name is not where it is said to be, or has no docstring.
    """
    parts = [HEAD, f"Written by `{PROGRAM}`.\n"]
    for module, name, title, members in PUBLIC:
        found = _find(_body(module), name)
        parts += _described(found, f"### {title}\n", name if title.startswith("tfps.") else "")  # else: not constructed
        for each in found.body if isinstance(found, ast.ClassDef) else []:
            if not isinstance(each, ast.FunctionDef) or each.name.startswith("_"):
                continue
            if members is None or each.name in members:
                is_property = any(ast.unparse(one) == "property" for one in each.decorator_list)
                parts += _described(each, f"#### {name}.{each.name}\n", "" if is_property else each.name)
    parts.append("### Errors\n")
    for each in _body("errors"):
        if isinstance(each, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, each.bases))
            parts.append(_wrapped(f"* **`tfps.{each.name}({bases})`**: {' '.join(_docstring(each).split())}", "  "))
    return "\n".join(parts) + "\n"


def _body(module: str) -> list[ast.stmt]:
    return ast.parse((ROOT / "tfps" / f"{module}.py").read_text(encoding="utf-8")).body


def _find(body: list[ast.stmt], name: str) -> _Definition:
    for each in body:
        if isinstance(each, _Definition) and each.name == name:
            return each
    raise LookupError(f"there is no {name}")


def _docstring(of: _Definition) -> str:
    text = ast.get_docstring(of)
    if not text:
        raise LookupError(f"{of.name} has no docstring")
    return inspect.cleandoc(text)


def _described(of: _Definition, heading: str, called: str) -> Iterator[str]:
    """Heading, signature under the name `called` ("": none), docstring."""
    yield heading
    if called:
        yield f"```\n{_signature(of, called)}\n```\n"
    yield from _markdown(_docstring(of))


def _signature(of: _Definition, called: str) -> str:
    returns = ""
    if isinstance(of, ast.ClassDef):
        init = next((each for each in of.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"), None)
        parts = _fields(of) if init is None else _parameters(init.args)
    else:
        parts = _parameters(of.args)
        returns = f" -> {ast.unparse(of.returns)}" if of.returns is not None else ""
    line = f"{called}({', '.join(parts)}){returns}".replace("'", '"')
    if len(line) <= WIDTH - 20:
        return line
    return "\n".join([f"{called}(", *(f"    {part}," for part in parts), f"){returns}"]).replace("'", '"')


def _fields(of: ast.ClassDef) -> list[str]:
    """Those of a dataclass."""
    return [ast.unparse(each) for each in of.body if isinstance(each, ast.AnnAssign)]


def _parameters(arguments: ast.arguments) -> list[str]:
    """As in a signature, without `self`."""
    plain = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    parts = [_parameter(*pair) for pair in zip(plain, defaults, strict=True) if pair[0].arg not in ("self", "cls")]
    if arguments.vararg is not None:
        parts.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_parameter(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return parts if arguments.kwarg is None else [*parts, f"**{ast.unparse(arguments.kwarg)}"]


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) if default is None else f"{ast.unparse(argument)} = {ast.unparse(default)}"


def _markdown(docstring: str) -> Iterator[str]:
    """Paragraphs and lists."""
    for block in docstring.split("\n\n"):
        first, _, rest = block.partition("\n")
        if not _SECTION.fullmatch(first):
            yield _wrapped(" ".join(block.split())) + "\n"
            continue
        name = {"Args": "Arguments"}.get(first[:-1], first[:-1])
        yield f"**{name}**\n"
        items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
        yield "\n".join(_wrapped(f"* {_item(' '.join(item.split()))}", "  ") for item in items) + "\n"


def _item(text: str) -> str:
    found = _ITEM.fullmatch(text)
    if found is None:
        return text
    return f"{', '.join(f'`{name}`' for name in found[1].split(', '))}: {found[2]}"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def fill(page: str) -> str:
    """The page with what this program writes."""
    return page.partition(HEAD)[0] + made()


def main() -> int:
    """Runs the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    new = fill(old)
    if options.check:
        print(f"{PAGE.name} is {'up to date' if old == new else f'not up to date: run {PROGRAM}'}")
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    print(f"{PROGRAM}: wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
