"""What was found: checks of this host and of pservers, and what to do about them, most important first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from tfps import __version__
from tfps.types import Json
from tfps.wire.control import PROTOCOL_VERSION

if TYPE_CHECKING:
    from rich.console import Console

Status = Literal["ok", "skipped", "warning", "failed"]
_TO_DO: tuple[Status, ...] = ("failed", "warning")  # in order of importance
_COLORS = {"ok": "green", "skipped": "dim", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line."""

    name: str  # of what was checked, the same in every report: "open files"
    status: Status  # "failed": a job would not run; "warning": it would, but something may surprise
    text: str  # what was found
    advice: str = ""  # what to do, for "warning" and "failed" only; a line by itself
    problem: str = ""  # a word for programs that says what is wrong; empty where one is enough per check
    values: Mapping[str, Json] = field(default_factory=dict)  # figures, units in their names

    def __post_init__(self) -> None:
        if bool(self.advice) != (self.status in _TO_DO):
            raise ValueError(f"advice belongs to checks that are warnings or have failed, got {self!r}")

    def as_json(self) -> dict[str, Json]:
        """See docs/doctor.md."""
        found = asdict(self)
        return {"check": found.pop("name").replace(" ", "_"), **found}


def warn_if(name: str, wrong: bool, text: str, advice: str, problem: str, values: Mapping[str, Json]) -> Check:
    """A warning, or a check that is fine and needs no advice."""
    return Check(name, "warning", text, advice, problem, values) if wrong else Check(name, "ok", text, values=values)


@dataclass(frozen=True, slots=True)
class Group:
    """The checks of one thing: this host (address "") or a pserver."""

    title: str
    checks: Sequence[Check]
    address: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found; the first group is this host."""

    host: str
    groups: Sequence[Group]

    @property
    def healthy(self) -> bool:
        """Whether a job would run."""
        return all(check.status != "failed" for group in self.groups for check in group.checks)

    def to_do(self) -> list[str]:
        """One line per problem. What is wrong at several pservers alike is said once, with their addresses."""
        lines: dict[tuple[Status, str], list[str]] = {}
        found = [(group.address, check) for group in self.groups for check in group.checks]
        for status in _TO_DO:
            for address, check in found:
                if check.status == status:
                    lines.setdefault((status, check.advice), []).append(address)
        return [
            f"pserver{'s' * (len(addresses) > 1)} {', '.join(addresses)}: {advice}" if all(addresses) else advice
            for (_, advice), addresses in lines.items()
        ]

    def as_json(self) -> dict[str, Json]:
        """See docs/doctor.md."""
        host, *pservers = self.groups
        return {
            "healthy": self.healthy,
            "tfps": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "host": self.host,
            "checks": [check.as_json() for check in host.checks],
            "pservers": [
                {"address": group.address, "checks": [check.as_json() for check in group.checks]} for group in pservers
            ],
            "to_do": self.to_do(),
        }


def lines(report: Report) -> Iterator[tuple[str, str]]:
    """The lines, and of those of checks their status, which is the first word."""
    for group in report.groups:
        yield group.title, ""
        yield from ((f"  {check.status:8} {check.name:14} {check.text}", check.status) for check in group.checks)
        yield "", ""
    if to_do := report.to_do():
        yield "A job would run here. Look at:" if report.healthy else "A job would not run here. To do:", ""
        yield from ((f"  {number}. {line}", "") for number, line in enumerate(to_do, 1))
    elif report.groups[1:]:
        yield "Nothing to do: a job would run here.", ""
    else:
        yield "Nothing to do on this host. No pserver was checked.", ""


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
