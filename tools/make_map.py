#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes the map at the beginning of docs/design.md: a picture of the folders of tfps/, and the path of a gradient.

The picture, docs/map.svg, is made of the table of folders in docs/design.md and of the imports in tfps/. The path is
the list below; the modules of its classes are looked up. `--check` writes nothing and fails unless both are up to date;
lines of code do not count there.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE, PAGE, PICTURE = ROOT / "tfps", ROOT / "docs" / "design.md", ROOT / "docs" / "map.svg"
PROGRAM = "tools/make_map.py"
TOP = "tfps"  # the modules that are in no folder
_BEGIN, _END = f"<!-- written by {PROGRAM} -->\n", "<!-- end -->\n"
_TENSORFLOW = {"tensorflow", "keras"}


class MapError(Exception):
    """The map cannot be made; the message says of what, and what to do."""


class Step(NamedTuple):
    """A step on the path of a gradient.

    Args:
        folder: where the code is.
        names: functions or `Class.method`s there, all in one module.
        runs: the thread, or the graph, that does it.
        what: a sentence without a full stop.
    """

    folder: str
    names: tuple[str, ...]
    runs: str
    what: str


PATH = (
    Step(
        "strategy",
        ("Extended._replica_ctx_all_reduce",),
        "tracing, once",
        "Keras' optimizer asks for the sum of its gradients. Local devices are summed; for the sum over workers it "
        "gets a pull, which TensorFlow prunes if only updates use it",
    ),
    Step("strategy", ("Extended._replica_ctx_update",), "tracing", "the optimizer updates a variable with that sum"),
    Step("updates", ("UpdateScheduler.defers",), "tracing", "the update does not run: it becomes a pending update"),
    Step(
        "updates",
        ("UpdateScheduler.emit",),
        "tracing",
        "when all gradients of the call have one, small variables are fused into buckets",
    ),
    Step("updates", ("PlannedBucket.trace",), "tracing", "the bucket's update becomes a function of the summed bytes"),
    Step("updates", ("PlannedBucket.send",), "tracing", "the ops that close the variables' gates and send are added"),
    Step("graph", ("close_gates", "send"), "the step's graph", "a gradient exists: its bytes go into a queue"),
    Step("runtime", ("Runtime.push",), 'thread "tfps-pump"', "has taken the bytes out of the queue; hands them on"),
    Step(
        "worker",
        ("PushedBucket.frames",),
        '"tfps-pump"',
        "`Worker.push` has the bucket cut into slices, each with the pserver that owns it",
    ),
    Step("wire", ("SendQueue.put",), '"tfps-pump"', "a queue per pserver: the most urgent slice first"),
    Step("wire", ("Connection.send",), 'thread "tfps-send"', "slices travel as frames (over gRPC: `GrpcPath`)"),
    Step("pserver", ("Rounds.push",), 'thread "tfps-data-recv"', "finds the slice that the frame is for"),
    Step("pserver", ("RoundSlice.take",), '"tfps-data-recv"', "takes the push into its round"),
    Step("exchange", ("SumRound.add",), '"tfps-data-recv"', "adds it"),
    Step(
        "pserver",
        ("SumSlice", "Answer"),
        '"tfps-data-recv"',
        "completes the sum at the last push",
    ),
    Step("wire", ("SendQueue.put",), '"tfps-data-recv"', "answers to each rank, the most urgent first"),
    Step("worker", ("Incoming.data", "PushedBucket.take"), 'thread "tfps-recv"', "puts the slice into the bucket"),
    Step("runtime", ("UpdateExecutor.add",), '"tfps-recv"', "the last slice has come: the update is due"),
    Step("runtime", ("DeferredUpdate.finish",), 'thread "tfps-apply"', "runs the bucket's update function"),
    Step("graph", ("open_gate",), "that function", "each variable's gate opens as soon as the variable is updated"),
    Step("updates", ("GatedVariable.value",), "the next step's graph", "forward reads it, behind `pass_gate`"),
)


class Folder(NamedTuple):
    """A folder of tfps/.

    Args:
        says: what lives there, from the table.
        lines: of Python.
        uses: other folders that it imports from.
        tensorflow: whether it imports TensorFlow or Keras, by itself or through other folders.
    """

    name: str
    says: str
    lines: int
    uses: frozenset[str]
    tensorflow: bool


def folders(page: str) -> dict[str, Folder]:
    """Those in the table of docs/design.md, by name, from top to bottom.

    Raises:
        MapError: the table lacks one, or names one that does not exist.
    """
    section = page.partition("\n## Folders\n")[2].partition("\n## ")[0]
    said = dict(re.findall(r"^\| `(\w+)/` \| (.+?) \|$", section, re.MULTILINE))
    there = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py")) and path.name != "protos"} | {TOP}
    if wrong := there ^ set(said):
        raise MapError(
            f'docs/design.md, "Folders", must have a row for each folder, differs: {", ".join(sorted(wrong))}'
        )
    found: dict[str, Folder] = {}
    for name, says in reversed(said.items()):  # those below come first
        files = [*PACKAGE.glob("*.py")] if name == TOP else [*(PACKAGE / name).rglob("*.py")]
        imported = {each for path in files for each in _imported(path)}
        below = {parts[1] for each in imported if (parts := each.split("."))[0] == TOP and len(parts) > 1}
        below &= set(found)  # imports only go downwards (tests/test_layers.py)
        found[name] = Folder(
            name,
            re.sub(r"[`*]", "", says),
            sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
            frozenset(below),
            any(each.split(".")[0] in _TENSORFLOW for each in imported)
            or any(found[each].tensorflow for each in below),
        )
    return {name: found[name] for name in said}


def _imported(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows(found: dict[str, Folder]) -> dict[str, list[str]]:
    """Of each folder those below it, without those that it reaches through another one."""
    below: dict[str, set[str]] = {}
    for name in reversed(found):
        below[name] = set(found[name].uses).union(*(below[each] for each in found[name].uses))
    return {
        name: [each for each in found if each in uses and not any(each in below[other] for other in uses)]
        for name, uses in ((name, folder.uses) for name, folder in found.items())
    }


def _levels(found: dict[str, Folder]) -> dict[str, int]:
    """How high each folder stands: just below the lowest that imports it, 0 at the bottom."""
    least: dict[str, int] = {}
    for name in reversed(found):
        least[name] = 1 + max((least[each] for each in found[name].uses), default=-1)
    levels: dict[str, int] = {}
    for name in found:
        above = [levels[each] for each, folder in found.items() if name in folder.uses]
        levels[name] = min(above) - 1 if above else least[name]
    return levels


def _lane(name: str, found: dict[str, Folder]) -> int:
    """0: with TensorFlow; 1: without it, in a worker or a pserver; 2: in neither."""
    if found[name].tensorflow:
        return 0
    in_jobs, waiting = set(), [TOP]
    while waiting:
        in_jobs.add(each := waiting.pop())
        waiting += found[each].uses - in_jobs
    return 1 if name in in_jobs else 2


class Box(NamedTuple):
    """Where a folder is drawn; `says`: in lines."""

    folder: Folder
    x: float
    y: float
    width: float
    height: float
    says: Sequence[str]


_WIDTH, _MARGIN, _GAP = 960, 16, 10
_LANES = ((16.0, 310.0), (342.0, 380.0), (738.0, 206.0))  # x, width
_HEADS = ("With TensorFlow", "Without TensorFlow", "Beside a job")
_LEGEND = (
    ("Arrows: a folder imports from the folders that they reach, at once or further down.", "#444"),
    ("Orange: steps on the path of a gradient, below.", "#b35900"),
)
_FILLS = ("#dcebf7", "#e2f2e6", "#f1efe6")
_STROKES = ("#0072B2", "#009E73", "#8a8468")
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_LINE, _BETWEEN, _CHARACTER = 14, 26, 5.55


def boxes(found: dict[str, Folder]) -> dict[str, Box]:
    """Each folder's, by name: those that import above those that are imported."""
    levels = _levels(found)
    made, y = {}, 54.0
    for level in range(max(levels.values()), -1, -1):
        row = [name for name in found if levels[name] == level]
        placed = []
        for lane, (x, width) in enumerate(_LANES):
            names = [name for name in row if _lane(name, found) == lane]
            if names == [TOP]:
                width = _WIDTH - 2 * _MARGIN
            each = (width - _GAP * (len(names) - 1)) / max(1, len(names))
            for index, name in enumerate(names):
                says = textwrap.wrap(found[name].says, int((each - 16) / _CHARACTER))
                placed.append((name, x + index * (each + _GAP), each, says))
        height = 26 + _LINE * max(len(says) for *_, says in placed)
        for name, x, each, says in placed:
            made[name] = Box(found[name], x, y, each, height, says)
        y += height + _BETWEEN
    return made


def drawn(found: dict[str, Folder]) -> str:
    """The picture, an SVG."""
    made = boxes(found)
    bottom = max(box.y + box.height for box in made.values()) + _MARGIN
    size = f"0 0 {_WIDTH} {bottom:.0f}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" {_FONT} role="img">',
        "  <title>The folders of tfps: who imports from whom</title>",
        '  <defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '    <path d="M0 0 L8 4 L0 8 z" fill="#666"/></marker></defs>',
        f'  <rect width="{_WIDTH}" height="{bottom:.0f}" rx="8" fill="#ffffff"/>',
        *(_text(_MARGIN, 22 + 17 * number, line, 12, fill) for number, (line, fill) in enumerate(_LEGEND)),
    ]
    for name, targets in arrows(found).items():
        for target in targets:
            begin, end = made[name], made[target]
            x1, x2 = _ends(begin, end)
            out.append(
                f'  <line x1="{x1:.0f}" y1="{begin.y + begin.height:.0f}" x2="{x2:.0f}" y2="{end.y:.0f}" '
                'stroke="#888" stroke-width="1.2" marker-end="url(#to)"/>'
            )
    for lane, (left, _) in enumerate(_LANES):
        own = [box for name, box in made.items() if _lane(name, found) == lane and name != TOP]
        if own:
            top = min(box.y for box in own)
            out.append(_text(left, top - 7, _HEADS[lane], 12, _STROKES[lane], bold=True))
    for name, box in made.items():
        lane = _lane(name, found)
        out.append(
            f'  <rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" rx="5" '
            f'fill="{_FILLS[lane]}" stroke="{_STROKES[lane]}"/>'
        )
        out.append(_text(box.x + 8, box.y + 17, f"{name}/", 13, "#111", bold=True))
        lines = f"{round(box.folder.lines, -2):,} lines"
        out.append(_text(box.x + box.width - 8, box.y + 17, lines, 11, "#555", anchor="end"))
        for number, line in enumerate(box.says):
            out.append(_text(box.x + 8, box.y + 32 + _LINE * number, line, 11, "#333"))
        if numbers := ", ".join(str(number) for number, step in enumerate(PATH, 1) if step.folder == name):
            out.append(_text(box.x + box.width / 2, box.y + 17, numbers, 11, "#b35900", bold=True, anchor="middle"))
    return "\n".join([*out, "</svg>", ""])


def _ends(begin: Box, end: Box) -> tuple[float, float]:
    """Where an arrow leaves and where it arrives: straight down if the boxes stand above each other."""
    left, right = max(begin.x, end.x), min(begin.x + begin.width, end.x + end.width)
    if right - left >= 20:
        return (left + right) / 2, (left + right) / 2
    inset = 24
    if end.x > begin.x:
        return begin.x + begin.width - inset, end.x + inset
    return begin.x + inset, end.x + end.width - inset


def _text(x: float, y: float, text: str, size: int, fill: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'  <text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def path(steps: Iterable[Step] = PATH) -> str:
    """The path of a gradient, a table.

    Raises:
        MapError: a class or function is not there any more.
    """
    rows = ["| | module | class or function | runs in | what happens |\n|---:|---|---|---|---|\n"]
    for number, step in enumerate(steps, 1):
        names = ", ".join(f"`{name}`" for name in step.names)
        rows.append(f"| {number} | `{_module(step)}` | {names} | {step.runs} | {step.what} |\n")
    return "".join(rows)


def _module(step: Step) -> str:
    """The module that has the names of `step`."""
    for module in sorted((PACKAGE / step.folder).glob("*.py")):
        if set(step.names) <= set(_defined(ast.parse(module.read_text(encoding="utf-8")).body)):
            return f"{step.folder}/{module.name}"
    raise MapError(f"no module in tfps/{step.folder} has {', '.join(step.names)}; name in {PROGRAM} what has its place")


def _defined(body: Iterable[ast.stmt], within: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from _defined(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield within + node.name


def filled(page: str) -> str:
    """docs/design.md with the path as it is now."""
    before, begin, rest = page.partition(_BEGIN)
    if not begin or _END not in rest:
        raise MapError(f"docs/design.md must have a place for the path of a gradient: {_BEGIN.strip()}, {_END.strip()}")
    return before + begin + "\n" + path() + "\n" + _END + rest.partition(_END)[2]


def without_sizes(picture: str) -> str:
    """For comparing: lines of code change every day."""
    return re.sub(r">[\d,]+ lines<", "><", picture)


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks picture and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless both are up to date")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    old = PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else ""
    try:
        picture, after = drawn(folders(page)), filled(page)
    except MapError as error:
        sys.exit(f"{PROGRAM}: {error}")
    current = page == after and without_sizes(old) == without_sizes(picture)
    if options.check and not current:
        sys.exit(f"{PROGRAM}: docs/map.svg and docs/design.md must be up to date; run {PROGRAM} and commit the result")
    if not options.check:
        PICTURE.write_text(picture, encoding="utf-8")
        PAGE.write_text(after, encoding="utf-8")
    print(f"{PROGRAM}: {'up to date' if current else 'wrote docs/map.svg and docs/design.md'}")


if __name__ == "__main__":
    main()
