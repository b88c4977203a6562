#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes docs/benchmarks.md and its plots from docs/benchmarks/*.json, which `tools/bench.py NAME --json FILE` writes.

A benchmark without a file is named and left out. `--check` fails if the page is not what the files give.
"""

from __future__ import annotations

import ast
import json
import pathlib
from collections.abc import Mapping, Sequence

from tfps.types import Json
from tools import benchmark_plots, benchmark_tables, pages
from tools.benchmark_plots import Section
from tools.pages import PageError

PROGRAM = "tools/make_benchmarks_page.py"
NAMES = (
    *("schedule", "tuning", "scale", "wire", "overtaking", "compress", "remote_update", "modes", "overhead", "staging"),
    *("tables", "chaos", "security", "peers"),
)
_DRAWERS = {**benchmark_plots.DRAWERS, **benchmark_tables.DRAWERS}
_HEAD = f"""# Benchmarks

Written by `{PROGRAM}` from the files in [benchmarks/](benchmarks); do not edit. Figures in tables are medians.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    pages.command((__doc__ or "").split("\n")[0], PROGRAM, "benchmarks/*.svg", make, arguments)


def make(docs: pathlib.Path) -> dict[str, bytes]:
    """The page and its plots, by path in `docs`.

    Raises:
        PageError: a file has not the form that tools/bench.py writes.
    """
    files: dict[str, bytes] = {}
    parts = [_HEAD]
    for name in NAMES:
        path = docs / "benchmarks" / f"{name}.json"
        if not path.exists():
            parts.append(f"## {name}\n\nNot measured yet: `{_bench(name)}`.\n")
            continue
        content = _read(path)
        try:
            section = _DRAWERS[name](content["runs"])
        except KeyError as error:
            raise PageError(f"every run in {path.name} must have {error}; measure again: {_bench(name)}") from None
        files |= {f"benchmarks/{plot}": data for plot, data in section.plots.items()}
        parts.append(_part(name, content, section))
    return {"benchmarks.md": "\n".join(parts).encode(), **files}


def _read(path: pathlib.Path) -> Mapping[str, Json]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PageError(f"{path.name} must be JSON: {error}; measure again: {_bench(path.stem)}") from None
    keys = ("bench", "command", "headline", "machine", "runs", "versions")
    if not isinstance(content, dict) or not set(keys) <= set(content) or content["bench"] != path.stem:
        raise PageError(f"{path.name} must be what tools/bench.py writes, with {', '.join(keys)}: {_bench(path.stem)}")
    if not content["runs"]:
        raise PageError(f"{path.name} must have runs, got none; measure again: {_bench(path.stem)}")
    found: Mapping[str, Json] = content
    return found


def _bench(name: str) -> str:
    return f"tools/bench.py {name} --json docs/benchmarks/{name}.json"


def _part(name: str, content: Mapping[str, Json], section: Section) -> str:
    machine, versions = content["machine"], content["versions"]
    where = f"{machine['cores']} cores of {machine['processor']}, load {machine['load']:.1f} at the end"
    lines = [
        f"## {name}\n",
        _docstring(name) + "\n",
        f"- Command: `{content['command']}`",
        f"- Machine: {where}",
        f"- Versions: {', '.join(f'{key} {value}' for key, value in versions.items())}",
        f"- Runs: {len(content['runs'])}",
        "",
        section.text,
        "Headline: " + ", ".join(f"`{key}` {value:.4g}" for key, value in content["headline"].items()) + "\n",
    ]
    return "\n".join(lines)


def _docstring(name: str) -> str:
    """What a benchmark measures, in its own words; it is not imported, as that may need TensorFlow."""
    path = pathlib.Path(__file__).resolve().parent / "benchmarks" / f"{name}.py"
    if not path.exists():
        return ""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    main()
