"""What is public: `tfps.__all__` and docs/api.md name the same things, and nothing else has a public name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

import tfps
import tfps.ray
from tfps import errors
from tfps.types import Function

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def rows(section: str) -> dict[str, list[str]]:
    """What the table of a section has: name -> the cells beside it. A call stands for the name that is called."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:3] == "| `"]
    return {cell[0].strip("`").partition("(")[0]: cell for cell in cells}


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def signature(of: Function) -> str:
    """Names and defaults, as the page has them."""
    taken = inspect.signature(of)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in taken.parameters.values()]
    shown = taken.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    return re.sub(r"\(self(, )?", "(", str(shown)).replace("'", '"')


def test_the_package_exports_what_the_page_names() -> None:
    assert set(tfps.__all__) == set(rows("tfps"))
    assert len(tfps.__all__) == len(set(tfps.__all__))


@pytest.mark.parametrize("name", tfps.__all__)
def test_every_name_leads_to_something_with_a_docstring(name: str) -> None:
    assert name == "__version__" or inspect.getdoc(getattr(tfps, name))


def test_every_error_is_exported() -> None:
    kinds = {name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == "tfps.errors"}
    assert kinds == {name for name in tfps.__all__ if name.endswith("Error")}


def test_a_strategy_has_the_attributes_that_the_page_names_beside_those_of_tensorflow() -> None:
    strategy = tfps.Strategy()
    try:
        own = public(dir(strategy)) - set(dir(tf.distribute.Strategy))
    finally:
        strategy.close()
    assert own == set(rows("tfps.Strategy")) - {"Strategy"}


@pytest.mark.parametrize("section", ["tfps.Strategy", "tfps.callbacks"])
def test_the_page_has_the_arguments_of_what_is_called(section: str) -> None:
    home = tfps.Strategy if section == "tfps.Strategy" else tfps.callbacks
    for name, cells in rows(section).items():
        what = tfps.Strategy if name == "Strategy" else getattr(home, name, None)  # `config` has an instance only
        if callable(what):
            assert cells[0] == f"`{name}{signature(what)}`"


def test_the_page_has_every_setting_with_its_default() -> None:
    known = {field.name: f"`{field.default!r}`".replace("'", '"') for field in dataclasses.fields(tfps.Config)}
    assert {name: cells[1] for name, cells in rows("tfps.Config").items()} == known


def test_the_page_has_every_callback() -> None:
    classes = {name for name, each in vars(tfps.callbacks).items() if inspect.isclass(each)}
    own = {name for name in classes if getattr(tfps.callbacks, name).__module__ == "tfps.callbacks"}
    assert public(own) == set(rows("tfps.callbacks"))


def test_the_page_has_every_layer() -> None:
    assert set(tfps.layers.__all__) == set(rows("tfps.layers"))


def test_the_page_has_what_is_for_ray() -> None:
    assert set(tfps.ray.__all__) == set(rows("tfps.ray"))


def test_the_page_has_every_command() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert set(re.findall(r'"(tfps_\w+)=tfps\.', setup)) == set(rows("Commands and files"))
