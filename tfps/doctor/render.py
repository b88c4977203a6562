"""The report as text: a line per check, what to do at the end; in color where rich is installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tfps.doctor.report import Check, Report

if TYPE_CHECKING:
    from rich.console import Console

_COLORS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}
_STATUS, _NAME = 8, 14  # columns


def lines(report: Report) -> list[tuple[str, str]]:
    """The lines, and of those of checks their status, which is the first word."""
    found: list[tuple[str, str]] = []
    for group in report.groups:
        found.append((group.title, ""))
        found += [(_line(check), check.status) for check in group.checks]
        found.append(("", ""))
    return found + [(line, "") for line in _end(report)]


def show(report: Report) -> None:
    """Prints it."""
    console = _console()
    for line, status in lines(report):
        if console is None or not status:
            sys.stdout.write(line + "\n")
            continue
        from rich.text import Text

        shown = Text(line, no_wrap=True, overflow="ignore")
        shown.stylize(_COLORS[status], 2, 2 + len(status))
        console.print(shown, crop=False, soft_wrap=True)
    sys.stdout.flush()


def _console() -> Console | None:
    """Of rich, if that is installed and somebody looks."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return console if console.is_terminal else None


def _line(check: Check) -> str:
    return f"  {check.status:{_STATUS}} {check.name:{_NAME}} {check.text}"


def _end(report: Report) -> list[str]:
    to_do = report.to_do()
    if not to_do and not report.groups[1:]:
        return ["Nothing to do on this host. No pserver was checked."]
    if not to_do:
        return ["Nothing to do: a job would run here."]
    head = "A job would run here. Look at:" if report.healthy else "A job would not run here. To do:"
    return [head, *(f"  {number}. {line}" for number, line in enumerate(to_do, 1))]
