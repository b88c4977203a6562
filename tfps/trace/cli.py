"""`tfps_trace`: the summary of a capture in the terminal, or as CSV."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tfps import __version__
from tfps.errors import TfpsError
from tfps.trace.capture_file import captures_below, read
from tfps.trace.summary import Summary, Totals, summarize

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHOWN = 10
_FEW = 2  # gates named of a part
_UNBROKEN = 10_000  # columns
_CSV = (
    "run", "step", "duration_ns", "compute_ns", "exposed_ns", "input_ns", "under_way_ns", "hidden_ns", "overlap",
    "slowest", "inversions", "messages",
)  # fmt: skip
_LINK_CSV = ("pushed_bytes", "replied_bytes", "push_busy_ns", "reply_busy_ns")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="tfps_trace", description="Shows where the time of captured steps went.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a capture, or a log directory: its newest capture"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a row per step to FILE ('-': the terminal) instead"
    )
    options = parser.parse_args(arguments)
    try:
        summaries = [summarize(read(_newest(path) if path.is_dir() else path)) for path in options.files]
        if options.csv is None:
            _show(summaries)
        elif str(options.csv) == "-":
            write_csv(summaries, sys.stdout)
        else:
            with options.csv.open("w", newline="", encoding="utf-8") as file:
                write_csv(summaries, file)
    except (TfpsError, OSError) as error:
        print(f"tfps_trace: {error}", file=sys.stderr)
        return 1
    return 0


def _newest(log_dir: Path) -> Path:
    if not (found := captures_below(log_dir)):
        raise TfpsError(f"no capture is in {log_dir}: record one with `tfps_launch --logdir {log_dir}` or TFPS_TRACE")
    return found[0]


def write_csv(summaries: Sequence[Summary], file: IO[str]) -> None:
    """One row per step, times in nanoseconds; columns of pservers at the end, as many as the largest run has."""
    pservers = range(max(len(summary.totals.links) for summary in summaries))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_CSV, *(f"pserver{number}_{name}" for number in pservers for name in _LINK_CSV)])
    for summary in summaries:
        for step in summary.steps:
            own = {"run": summary.name, "step": step.step}
            cells = [own.get(name, getattr(step.totals, name, None)) for name in _CSV]  # csv writes None as nothing
            writer.writerow([*cells, *(getattr(link, name) for link in step.totals.links for name in _LINK_CSV)])


def _show(summaries: Sequence[Summary]) -> None:
    try:
        from rich.console import Console
    except ImportError as error:
        raise TfpsError("tables need the package rich: pip install 'tfps[console]', or use --csv") from error
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBROKEN  # a file or a pipe has room; rich takes it for 80 columns
    for summary in summaries:
        for part in _parts(summary):
            console.print(part)


def _parts(summary: Summary) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        made = Table(box=None, header_style="dim", pad_edge=False)
        for number, head in enumerate(heads):
            made.add_column(head, justify="right" if number else "left", overflow="fold")
        for row in rows:
            made.add_row(*map(Text, row))  # in plain strings rich would read markup, and names are foreign
        return made

    totals, steps = summary.totals, len(summary.steps)
    settings = ", ".join(f"{name} {value}" for name, value in summary.settings.items())
    yield Text.assemble((summary.name, "bold"), " ", settings)
    if summary.view:
        yield Text(f"at the start: {summary.view}")
    for change in summary.changes:
        yield Text(f"at {change}")
    yield Text.assemble("limited by ", (summary.limit, "bold"), "\n")
    heads = ("step", "took", "computing", "exposed wait", "input", "overlap", "slowest", "out of order")
    yield "[dim]steps, means of workers[/dim]"
    yield table(heads, [*(_row(str(step.step), step.totals, 1) for step in summary.steps), _row("mean", totals, steps)])
    links = [
        (
            str(link.pserver),
            *(f"{link.pushed_bytes / steps / 1e6:.4g} MB", f"{link.push_busy_ns / totals.duration_ns:.1%}"),
            *(f"{link.replied_bytes / steps / 1e6:.4g} MB", f"{link.reply_busy_ns / totals.duration_ns:.1%}"),
        )
        for link in totals.links
    ]
    yield "\n[dim]pservers, per step[/dim]"
    yield table(("pserver", "pushed", "in use", "replied", "in use"), links)
    runs = steps * summary.workers
    if summary.tables:
        tables = [
            (
                *(each.table, _ms(each.wait_ns / runs), _ms(each.held_ns / max(each.questions, 1))),
                *(_kb(nbytes / runs) for nbytes in (each.asked_bytes, each.rows_bytes, each.gradient_bytes)),
            )
            for each in summary.tables
        ]
        yield "\n[dim]tables, per step and worker; held back: the mean of all questions for rows[/dim]"
        yield table(("table", "waited for rows", "held back", "asked", "rows", "gradients"), tables)
    if summary.parts:
        parts = [
            (each.part, _some(each.waits), _ms(each.ran_ns / runs), f"{each.compile_s:.3g} s") for each in summary.parts
        ]
        yield "\n[dim]parts that XLA compiles, per step and worker; compilation on rank 0[/dim]"
        yield table(("part", "waits at the gates of", "ran", "compiled in"), parts)
    costs = [(cost.variable, _ms(cost.exposed_ns / runs)) for cost in summary.costs[:_SHOWN]]
    yield "\n[dim]most waited for, per step and worker[/dim]"
    yield table(("variable", "exposed wait"), costs)
    if (pair := summary.inversion) is not None:
        yield Text(f"\nmost often out of order: {pair.sent} sent while {pair.waiting} waited ({pair.times} times)")


def _row(name: str, totals: Totals, steps: int) -> tuple[str, ...]:
    slowest = "-" if totals.slowest is None else f"worker {totals.slowest}"
    times = (totals.duration_ns, totals.compute_ns, totals.exposed_ns, totals.input_ns)
    wrong = f"{totals.inversions} of {totals.messages}"
    return (name, *(_ms(ns / steps) for ns in times), f"{totals.overlap:.1%}", slowest, wrong)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.4g} ms"


def _kb(nbytes: float) -> str:
    return f"{nbytes / 1e3:.4g} kB"


if __name__ == "__main__":
    sys.exit(main())
