"""docs/api.md has the docstring and the signature of every public name. tests/test_api.py tests its tables."""

from __future__ import annotations

import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import inspect

import pytest

import tfps
from tools import make_api_page as page

TEXT = page.PAGE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert page.fill(TEXT) == TEXT, f"run {page.PROGRAM}"


@pytest.mark.parametrize("name", sorted(set(tfps.__all__) - {"callbacks", "layers", "__version__"}))
def test_every_public_name_has_its_docstring_there(name: str) -> None:
    first = (inspect.getdoc(getattr(tfps, name)) or "").partition("\n")[0]
    part = page.made()
    assert re.search(rf"^### tfps\.{name}$|\*\*`tfps\.{name}\(", part, re.MULTILINE)
    assert first.split(".")[0] in " ".join(part.split())


@pytest.mark.parametrize("section", ["tfps.Strategy", "tfps.Config", "tfps.callbacks", "tfps.layers", "tfps.ray"])
def test_what_the_tables_name_is_described(section: str) -> None:
    table = TEXT.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert names
    for name in names:
        assert re.search(rf"^####? [\w.]*\b{name}$|^\* [\w`, ]*`{name}`", page.made(), re.MULTILINE), name


def test_a_signature_is_that_which_python_sees() -> None:
    shown = re.search(r"```\n(Strategy\(.*?\))\n```", page.made(), re.DOTALL)
    assert shown is not None
    names = re.findall(r"^    (\w+):", shown[1], re.MULTILINE)
    assert names == [each for each in inspect.signature(tfps.Strategy).parameters if each != "self"]


def test_names_in_lists_are_code_and_lines_are_short() -> None:
    _, made = page._markdown("Args:\n    a, b: both, in\n        bytes.\n    *rest: a: b.")
    assert made.splitlines() == ["* `a`, `b`: both, in bytes.", "* `*rest`: a: b."]
    assert all(len(line) <= page.WIDTH for line in page.made().splitlines() if "https://" not in line)
