"""`tfps_pserver --status`: the status of a pserver, as a live table or as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.message import Message

from tfps.config import Security, check_address
from tfps.errors import ConfigError, ConnectError, PserverLostError
from tfps.protos import tfps_pb2 as pb
from tfps.threads import Flag
from tfps.types import Json
from tfps.wire.control import Pserver

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIMEOUT_S = 10.0
_OF_PROCESS = ("version", "cpu_s", "uptime_s", "memory_bytes", "jobs")  # fields of a status
_OF_JOB = ("workers", "state", "reason", "buckets", "slices", "shard_bytes", "open_slices")
_OF_VIEW = ("generation", "lost_workers", "joined_workers")


class Rates(NamedTuple):
    """Rates of one member between two status requests."""

    steps_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    late_s: float = 0.0  # delay of this rank's pushes after the first rank's, mean over its slices


def rates(before: pb.MemberStatus | None, now: pb.MemberStatus, seconds: float) -> Rates:
    """Rates of the member `now`; all 0 if it was not there `before`."""
    if before is None or before.pid != now.pid or before.received_slices > now.received_slices or seconds <= 0:
        return Rates()
    slices = now.received_slices - before.received_slices
    return Rates(
        (now.step - before.step) / seconds,
        (now.received_bytes - before.received_bytes) / seconds,
        (now.sent_bytes - before.sent_bytes) / seconds,
        (now.wait_s - before.wait_s) / slices if slices else 0.0,
    )


class TableRates(NamedTuple):
    """What happens to a table: between two status requests, or so far if it was not updated in between."""

    asked_rows_per_update: float = 0.0
    early: float = 0.0  # part of the rows asked for that were answered before the step before had been applied
    gradient_rows_per_update: float = 0.0
    updated_rows_per_update: float = 0.0  # each once
    admitted: float = 1.0  # part of these that had a row, or got one


def table_rates(before: pb.TableStatus | None, now: pb.TableStatus) -> TableRates:
    if before is None or before.updates >= now.updates:
        before = pb.TableStatus()
    more = {field.name: getattr(now, field.name) - getattr(before, field.name) for field in _COUNTS}
    updates, asked, updated = (more[name] for name in ("updates", "asked_rows", "updated_rows"))
    if not updates:
        return TableRates(early=more["early_rows"] / asked if asked else 0.0)
    return TableRates(
        asked / updates,
        more["early_rows"] / asked if asked else 0.0,
        more["gradient_rows"] / updates,
        updated / updates,
        1 - more["refused_rows"] / updated if updated else 1.0,
    )


_COUNTS = [field for field in pb.TableStatus.DESCRIPTOR.fields if field.name != "name"]


class Look(NamedTuple):
    """Two successive statuses of a pserver."""

    address: str
    before: pb.StatusReply
    now: pb.StatusReply

    @property
    def seconds(self) -> float:
        return self.now.uptime_s - self.before.uptime_s

    @property
    def cpu(self) -> float:
        """Cores in use."""
        return (self.now.cpu_s - self.before.cpu_s) / self.seconds if self.seconds > 0 else 0.0

    def members(self) -> list[tuple[pb.MemberStatus, Rates, int]]:
        """Every member, its rates, and how many steps it is behind the leader."""
        earlier = {member.rank: member for member in self.before.members}
        first = max((member.step for member in self.now.members), default=0)
        return [
            (member, rates(earlier.get(member.rank), member, self.seconds), first - member.step)
            for member in self.now.members
        ]

    def tables(self) -> list[tuple[pb.TableStatus, TableRates]]:
        """Every table, and what happens to it."""
        same_job = self.before.jobs == self.now.jobs
        earlier = {(table.bucket, table.name): table for table in self.before.tables if same_job}
        return [(table, table_rates(earlier.get((table.bucket, table.name)), table)) for table in self.now.tables]

    def as_json(self) -> dict[str, Json]:
        def values(of: Message, names: Iterable[str] = ()) -> dict[str, Json]:
            return {name: getattr(of, name) for name in names or (field.name for field in of.DESCRIPTOR.fields)}

        members = [{**values(each), **rate._asdict(), "steps_behind": behind} for each, rate, behind in self.members()]
        tables = [{**values(each), **rate._asdict()} for each, rate in self.tables()]
        return {
            "pserver": self.address,
            **values(self.now, _OF_PROCESS),
            "errors": [values(each) for each in self.now.errors],
            "job": {"name": self.now.job, **values(self.now, _OF_JOB), "members": members, "tables": tables},
            "view": {
                **values(self.now, _OF_VIEW),
                "present": list(self.now.present),
                "changes": list(self.now.changes),
            },
            "cpu": self.cpu,
        }


class Watcher:
    """Polls the pserver at `address`. `stop` ends a wait from another thread or a signal handler."""

    def __init__(self, address: str, security: Security = Security()) -> None:  # noqa: B008 (it is immutable)
        self._pserver = Pserver(check_address(address), security)
        self._last: pb.StatusReply | None = None
        self._stop = Flag()
        self.stop, self.close = self._stop.set, self._pserver.close

    def look(self, interval_s: float) -> Look | None:
        """Waits, then asks for the status; the first time also before the wait. None once stopped."""
        before = self._last or self._ask()
        if self._stop.wait(interval_s):
            return None
        self._last = self._ask()
        return Look(self._pserver.address, before, self._last)

    def _ask(self) -> pb.StatusReply:
        try:
            return self._pserver.call("Status", pb.StatusRequest(details=True), _TIMEOUT_S)
        except PserverLostError as error:
            if why := self._pserver.misunderstanding():
                raise ConnectError(f"pserver {self._pserver.address} {why}") from None
            if self._last is None:
                self._pserver.check_reached(error)
            raise


def show(watcher: Watcher, interval_s: float) -> None:
    """Shows the status on stdout: in a terminal redrawn until the watcher is stopped, else once."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise ConfigError(
            "--status needs the package rich, which is missing: pip install 'tfps[console]' (--json needs nothing)"
        ) from error
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _WHOLE_WIDTH)  # a file or a pipe has room
        if (look := watcher.look(interval_s)) is not None:
            console.print(table(look))
        return
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while (look := watcher.look(interval_s)) is not None:
            live.update(table(look), refresh=True)


_WHOLE_WIDTH = 160
_CHANGES = 5  # of the view, that are shown
_TABLE_COLUMNS = (
    *("table", "rows", "memory", "asked/step", "early", "gradients/step", "unique/step", "made", "evicted", "expired"),
    *("refused", "admitted"),
)
_COLUMNS = "rank", "process", "state", "step", "steps/s", "behind", "in MB/s", "out MB/s", "queued", "in flight"


def table(look: Look) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = look.now
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in (*_COLUMNS, "late", "awaited"):
        found.add_column(name, justify="left" if name in ("process", "state") else "right", no_wrap=True)
    for member, rate, behind in look.members():
        slow = bool(behind or member.awaited_slices)
        cells = (
            str(member.rank),
            f"{member.host}:{member.pid}",
            f"{member.state}{', shared memory' if member.shared_memory else ''}",
            str(member.step),
            f"{rate.steps_per_s:.1f}",
            str(behind),
            f"{rate.received_bytes_per_s / 1e6:.1f}",
            f"{rate.sent_bytes_per_s / 1e6:.1f}",
            str(member.queued_slices),
            _size(member.in_flight_bytes),
            f"{rate.late_s * 1e3:.1f} ms",
            str(member.awaited_slices),
        )
        # As Text: in plain strings rich reads markup, and a host may be called "x[/x]".
        found.add_row(*map(Text, cells), style="yellow" if slow and status.state == "running" else "")
    name = f"job {status.job!r}" if status.job else "job"
    minutes, seconds = divmod(int(status.uptime_s), 60)
    process = (
        f"pserver {look.address}, tfps {status.version}, up {minutes // 60}:{minutes % 60:02}:{seconds:02}, "
        f"{look.cpu:.0%} of a core, {_size(status.memory_bytes)} of memory"
    )
    work = (
        f"{name} {status.state}: {len(status.members)} of {status.workers} workers, {status.buckets} buckets, "
        f"here {status.slices} slices with {_size(status.shard_bytes)}, {status.open_slices} of them wait for ranks"
    )
    lines: list[RenderableType] = [Text(line, no_wrap=True) for line in (process, work)]
    if status.state == "running" and (new := [str(member.rank) for member in status.members if not member.step]):
        lines.append(Text(f"rank {', '.join(new)}: no step yet, the first one is being built", no_wrap=True))
    if status.generation > 1 or status.changes:
        view = f"view {status.generation}: {len(status.present)} of {status.workers} workers take part; latest changes:"
        lines += [Text(line, style="yellow", no_wrap=True) for line in (view, *status.changes[-_CHANGES:])]
    if status.reason:
        lines.append(Text(f"{status.state}: {status.reason}", style="red" if status.state == "failed" else "yellow"))
    if status.members:
        lines += [Text(""), found]
    if status.tables:
        lines += [Text(""), _of_tables(look)]
    if status.errors:
        counts = ", ".join(f"{each.where}: {each.count} {each.error}" for each in status.errors)
        lines += [Text(""), Text(f"errors since the start: {counts}")]
    return Group(*lines)


def _of_tables(look: Look) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    found = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(_TABLE_COLUMNS):
        found.add_column(name, justify="right" if number else "left", no_wrap=True)
    for table, rate in look.tables():
        cells = (
            *(table.name, str(table.rows), _size(table.memory_bytes)),
            *(f"{rate.asked_rows_per_update:.0f}", f"{rate.early:.0%}", f"{rate.gradient_rows_per_update:.0f}"),
            *(f"{rate.updated_rows_per_update:.0f}", str(table.made_rows), str(table.evicted_rows)),
            *(str(table.expired_rows), str(table.refused_rows), f"{rate.admitted:.0%}"),
        )
        found.add_row(*map(Text, cells))
    return found


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"
