"""Modes are objects: nobody asks which one it is, and a new one is one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import test_programs

PACKAGE = Path(__file__).resolve().parents[2] / "tfps"
MAY_ASK = ("policies/", "config.py")
POLICIES = {"Policy", "Independent", "Asynchronous", "DiLoCo", "LocalSGD"}


def questions(text: str) -> list[int]:
    """Returns the lines that compare a mode, a place of updates or a policy's class."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
            attributes = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
            within = [each.value for each in attributes]  # `spec.update.slots` asks for no mode
            asked = {each.attr for each in attributes if each not in within} & {"mode", "update"}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & POLICIES
        else:
            continue
        found += [node.lineno] * bool(asked)
    return found


def test_nobody_asks_which_mode_it_is() -> None:
    assert questions('a.mode == "sync"') == questions("isinstance(policy, DiLoCo)") == [1]
    for path in PACKAGE.rglob("*.py"):
        place = str(path.relative_to(PACKAGE))
        if not place.startswith(MAY_ASK):
            assert not questions(path.read_text(encoding="utf-8")), place


@pytest.mark.timeout(300)
def test_a_new_mode_is_one_module(tmp_path: Path) -> None:
    test_programs.check("epoch_means", test_programs.run([("toy_policy", "epoch_means")], tmp_path))
