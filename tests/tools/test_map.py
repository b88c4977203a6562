"""docs/design.md begins with a map that is made from the code: every folder, and the path of a gradient."""

from __future__ import annotations

import re

import pytest

from tools import make_map as page
from tools.make_map import MapError, Step

TEXT = page.PAGE.read_text(encoding="utf-8")
FOLDERS = page.folders(TEXT)


def test_the_picture_has_every_folder() -> None:
    drawn = re.findall(r">(\w+)/</text>", page.PICTURE.read_text(encoding="utf-8"))
    assert sorted(drawn) == sorted(FOLDERS), f"run {page.PROGRAM}"


def test_the_path_of_a_gradient_is_up_to_date() -> None:
    assert page.filled(TEXT) == TEXT, f"run {page.PROGRAM}"


def test_every_folder_has_a_section() -> None:
    headings = [line for line in TEXT.splitlines() if line.startswith("## ")]
    assert {name for line in headings for name in re.findall(r"`(\w+)/`", line)} == set(FOLDERS) - {page.TOP}


def test_a_class_that_is_gone_is_named() -> None:
    with pytest.raises(MapError, match=r"no module in tfps/graph has Gate\.lost; name in tools/make_map\.py"):
        page.path([Step("graph", ("Gate.lost",), "", "")])


def test_a_folder_without_a_row_is_named() -> None:
    without = re.sub(r"^\| `wire/` .*\n", "", TEXT, flags=re.MULTILINE)
    with pytest.raises(MapError, match=r"must have a row for each folder, differs: wire"):
        page.folders(without)


def test_arrows_go_down_and_leave_out_what_others_reach() -> None:
    boxes, arrows = page.boxes(FOLDERS), page.arrows(FOLDERS)
    assert {name for name, targets in arrows.items() if not targets} == {
        name for name, folder in FOLDERS.items() if not folder.uses
    }
    for name, targets in arrows.items():
        for target in targets:
            assert boxes[name].y + boxes[name].height < boxes[target].y
            assert not any(target in FOLDERS[other].uses for other in targets)


def test_boxes_do_not_overlap() -> None:
    found = list(page.boxes(FOLDERS).values())
    for number, one in enumerate(found):
        for other in found[:number]:
            beside = one.x + one.width <= other.x or other.x + other.width <= one.x
            assert beside or one.y + one.height < other.y or other.y + other.height < one.y


def test_sizes_are_not_compared() -> None:
    grown = page.drawn({name: folder._replace(lines=folder.lines + 5000) for name, folder in FOLDERS.items()})
    picture = page.drawn(FOLDERS)
    assert grown != picture
    assert page.without_sizes(grown) == page.without_sizes(picture)
