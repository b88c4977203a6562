"""What benchmarks share: their outcome, the machine, medians, tables."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfps.types import Json


@dataclass(frozen=True)
class Outcome:
    """What a benchmark found: figures for its last line, and every single run."""

    headline: Mapping[str, float]
    runs: list[dict[str, Json]] = field(default_factory=list)


class Table(NamedTuple):
    """What it is about, and cells by row."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Aligned, for a terminal."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(line))
            for line in (list(zip(row, widths, strict=True)) for row in (self.heads, *self.rows))
        ]
        return "\n".join([self.title, *lines])


def machine() -> dict[str, Json]:
    """Processor, cores that this process may use, load at the moment."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    """Python and the packages that matter here."""
    found = {"python": platform.python_version()}
    for package in ("grpcio", "protobuf", "numpy", "tensorflow", "tensorflow-cpu", "keras"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def median(runs: Iterable[Mapping[str, Json]], key: str) -> float:
    """The median of one figure over runs."""
    return float(statistics.median(run[key] for run in runs))


def write_json(path: pathlib.Path, name: str, command: str, outcome: Outcome) -> None:
    """Writes everything a reader needs to compare: figures, runs, machine, versions."""
    content = {
        "bench": name,
        "command": command,
        "headline": dict(outcome.headline),
        "machine": machine(),
        "versions": versions(),
        "runs": outcome.runs,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:
        return []
