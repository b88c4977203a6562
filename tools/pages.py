"""What the programs that write pages of docs/ share: plots, tables, and writing or checking what they made.

Equal figures give equal bytes, so a page can be checked against what it is made from: plots carry no dates, no random
ids, and their texts are outlines, which look the same everywhere.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Okabe and Ito's palette, which people with any colour vision can tell apart; lines differ in markers besides.
BLUE, ORANGE, GREEN, SKY, PURPLE, RED, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#56B4E9",
    "#CC79A7",
    "#D55E00",
    "#777777",
)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE = {
    "svg.hashsalt": "tfps",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
}


class PageError(Exception):
    """A page cannot be made; the message says of what, and what to do."""


def plot(rows: int, columns: int, height: float, draw: Callable[[Figure, list[Axes]], None]) -> bytes:
    """An SVG with rows x columns of axes, of a page's width; `height` in inches. `draw` gets them row by row."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        FigureCanvasSVG(figure)
        found = figure.subplots(rows, columns, squeeze=False)
        draw(figure, [axes for row in found for axes in row])
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return b"\n".join(line.rstrip() for line in out.getvalue().splitlines()) + b"\n"


def log_ticks(axes: Axes, which: str, values: Sequence[float]) -> None:
    """A logarithmic axis with ticks at some of `values`, written as plain numbers."""
    getattr(axes, f"set_{which}scale")("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}" if value < 1000 else f"{value:.0f}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def spread(values: Sequence[float], least: float = 1.3) -> list[float]:
    """Of `values`, what can be written beside each other on a logarithmic axis: none within `least` times the last."""
    kept: list[float] = []
    for value in sorted(set(values)):
        if not kept or value >= kept[-1] * least:
            kept.append(value)
    return kept


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column to the left, the others to the right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def update(folder: pathlib.Path, files: Mapping[str, bytes], ours: str, check: bool) -> list[str]:
    """Writes `files` (by path in `folder`), removes others that match the pattern `ours`; what has changed.

    `check`: changes nothing.
    """
    changed = []
    for path, content in files.items():
        if not (folder / path).is_file() or (folder / path).read_bytes() != content:
            changed.append(path)
            if not check:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
    for found in sorted(folder.glob(ours)):
        path = found.relative_to(folder).as_posix()
        if path not in files:
            changed.append(path)
            if not check:
                found.unlink()
    return changed


def command(
    description: str,
    program: str,
    ours: str,
    make: Callable[[pathlib.Path], dict[str, bytes]],
    arguments: Sequence[str] | None = None,
) -> None:
    """The main program of a page: `--check` exits with 1 unless everything is as `make` makes it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless everything is up to date")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs", metavar="FOLDER", help="default: docs")
    options = parser.parse_args(arguments)
    try:
        changed = update(options.docs, make(options.docs), ours, options.check)
    except PageError as error:
        sys.exit(f"{program}: {error}")
    if changed and options.check:
        sys.exit(f"{program}: must be up to date, differs: {', '.join(changed)}; run {program} and commit the result")
    print(f"{program}: {'wrote ' + ', '.join(changed) if changed else 'up to date'}")
