"""The data model of a capture: what happened to every slice during some steps, on all workers and pservers.

Files are written and read by `tfps.trace.capture_file`; the format is described in docs/trace_format.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tfps.errors import TfpsError

Kind = Literal[
    "step", "forward", "backward", "gate", "input", "staging", "ready", "queued", "wire", "aggregate", "reply_queued",
    "reply_wire", "update", "change", "lookup", "held", "part",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)  # new ones at the end: records have their positions
WAITS: tuple[Kind, ...] = ("gate", "lookup")  # of a step, for what is exchanged
Role = Literal["worker", "pserver"]
Setting = str | int | float | bool | None

# The default lane of each kind of span, in the order in which lanes are drawn and slices pass.
LANES: Mapping[Kind, str] = {
    "step": "steps",
    "forward": "compute",
    "backward": "compute",
    "part": "parts",
    "gate": "gates",
    "lookup": "gates",
    "input": "input",
    "staging": "input",
    "ready": "gradients",
    "queued": "queue",
    "wire": "to pserver {pserver}",
    "held": "rows",
    "aggregate": "aggregate",
    "reply_queued": "reply queue",
    "reply_wire": "to worker {rank}",
    "update": "updates",
    "change": "view",
}
ORDER: Mapping[str, int] = {kind: place for place, kind in enumerate(LANES)}
_OF_TABLES: tuple[Kind, ...] = ("lookup", "held")
NONE = -1  # a field that does not apply to a span
FIRST_LOOKUP = 2**16  # of a table, the number of the first slice with ids that rows are asked for, and of its answers


class Span(NamedTuple):
    """Something that took time, or, where both times are equal, an instant. Numbers that do not apply are -1."""

    kind: Kind  # see docs/trace_format.md
    process: int  # position in `Capture.processes` of where it happened
    lane: str  # the line of that process it is drawn in; see `lane_of`
    begin_ns: int  # on rank 0's clock
    end_ns: int
    step: int = NONE  # its round of the exchange; of a gate, the round whose update it waits for
    bucket: int = NONE  # position in `Capture.buckets`
    slice: int = NONE  # its number in the bucket; NONE for the whole bucket
    variable: int = NONE  # position in `CapturedBucket.variables`, of a gate
    priority: int = NONE  # 0 is the most urgent
    nbytes: int = NONE  # of the payload
    rank: int = NONE  # whose push, queue, reply or gate it is; of an aggregate, the last worker to arrive
    pserver: int = NONE  # which owns the slice

    @property
    def key(self) -> str:
        """`bucket/slice`, or `bucket`, or nothing."""
        return f"{self.bucket}/{self.slice}" if self.slice >= 0 else str(self.bucket) if self.bucket >= 0 else ""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.begin_ns


def lane_of(kind: Kind, *, rank: int = NONE, pserver: int = NONE) -> str:
    """The usual lane of a kind: `compute`, `queue`, `to pserver 1`."""
    return LANES[kind].format(rank=rank, pserver=pserver)


@dataclass(frozen=True, slots=True)
class Process:
    """A worker or a pserver."""

    role: Role
    number: int  # the rank of a worker, the number of a pserver
    host: str = ""  # or address, for display
    clock_offset_ns: int = 0  # what was added to its times to convert them to rank 0's clock
    clock_error_ns: int = 0  # possible error of that: half the round trip of the measurement

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise TfpsError(f"role of a process must be 'worker' or 'pserver', got {self.role!r}")
        if self.number < 0 or self.clock_error_ns < 0:
            numbers = f"{self.number} and {self.clock_error_ns}"
            raise TfpsError(f"number and clock_error_ns of a process must be at least 0, got {numbers}")

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """Variables that share slices and an update."""

    name: str  # for display, as in messages of tfps
    variables: tuple[str, ...]  # their names, in forward order
    priority: int  # position of first use in the forward pass; 0 is the most urgent
    nbytes: int  # of one worker's gradient; 0 if it varies by step


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """A part of a step that XLA compiles, on rank 0. Its spans have its position in `Capture.parts` as `slice`."""

    name: str  # for display, with the layers of its variables: "part 3: dense_4 … dense_6, backward"
    waits: tuple[str, ...] = ()  # the variables that it reads, at whose gates it waits
    sends: tuple[str, ...] = ()  # the variables of which it computes the gradients
    compile_s: float = 0.0  # how long its first runs took; see `tfps.runtime.report.Report.xla_compile_s`


@dataclass(frozen=True, slots=True)
class CapturedView:
    """Who took part in the job from a moment on, and why it changed; of a capture's first view there is no reason."""

    generation: int
    ranks: tuple[int, ...]
    reason: str = ""  # as in the log
    note: str = ""  # as in the log: what of a lost worker's last step counted
    lacking: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # bucket's name -> slices without that worker

    @property
    def title(self) -> str:
        return f"generation {self.generation}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Capture:
    """Some steps of a job. What its spans name must be there."""

    processes: tuple[Process, ...]  # workers by rank, then pservers by number
    buckets: tuple[CapturedBucket, ...]  # what is exchanged
    spans: tuple[Span, ...]  # all events, sorted by `begin_ns`; ties keep the given order
    steps: tuple[int, ...] = ()  # that were requested, ascending
    settings: Mapping[str, Setting] = field(default_factory=dict)  # of the run, for display and comparison
    name: str = ""  # of the run
    views: tuple[CapturedView, ...] = ()  # at its start, then one for each span of kind "change", in order of time
    parts: tuple[CapturedPart, ...] = ()  # that XLA compiles, in the order in which they can run
    tables: frozenset[int] = field(init=False, repr=False, compare=False)  # the buckets whose rows are looked up

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(sorted(self.spans, key=lambda span: span.begin_ns)))
        tables = frozenset(span.bucket for span in self.spans if span.kind in _OF_TABLES and span.bucket >= 0)
        object.__setattr__(self, "tables", tables)
        ranks = {process.number for process in self.workers} | {NONE}
        owners = {process.number for process in self.pservers} | {NONE}
        for span in self.spans:
            if span.begin_ns > span.end_ns:
                rule = "a span must not end before it begins"
            elif span.kind not in LANES:
                rule = f"kind of a span must be one of {', '.join(KINDS)}"
            elif not (0 <= span.process < len(self.processes) and NONE <= span.bucket < len(self.buckets)):
                rule = f"a span must be of one of {len(self.processes)} processes and {len(self.buckets)} buckets"
            elif span.rank not in ranks or span.pserver not in owners:
                rule = "rank and pserver of a span must be those of a process"
            elif span.variable >= (len(self.buckets[span.bucket].variables) if span.bucket >= 0 else 0):
                rule = "variable of a span must be one of its bucket's"
            else:
                continue
            raise TfpsError(f"{rule}, got {span}")
        changes = sum(span.kind == "change" for span in self.spans)
        if changes != len(self.views[1:]):
            raise TfpsError(f"a capture must have a view for each change, got {len(self.views[1:])} for {changes}")

    @property
    def workers(self) -> list[Process]:
        return [process for process in self.processes if process.role == "worker"]

    @property
    def pservers(self) -> list[Process]:
        return [process for process in self.processes if process.role == "pserver"]

    @property
    def changes(self) -> list[tuple[Span, CapturedView]]:
        """Each change of the view, in order of time, with the view from then on."""
        return list(zip((span for span in self.spans if span.kind == "change"), self.views[1:], strict=True))

    def title(self, span: Span) -> str:
        """The span's kind and what it is about."""
        if span.kind == "change":
            return next(view.title for one, view in self.changes if one is span)
        if span.kind == "part":
            return self.parts[span.slice].name if 0 <= span.slice < len(self.parts) else "part"
        name = self.variable_name(span)
        if span.bucket in self.tables and span.kind not in _OF_TABLES:
            what = "gradients" if not self.is_lookup(span) else "ids" if span.kind in ("queued", "wire") else "rows"
            return f"{span.kind} {what} of {name}"
        return f"{span.kind} {name}".rstrip()

    def is_lookup(self, span: Span) -> bool:
        """Whether it is of a table, and about rows that are asked for, not about gradients."""
        return span.kind in _OF_TABLES or (span.bucket in self.tables and span.slice >= FIRST_LOOKUP)

    def variable_name(self, span: Span) -> str:
        """The variable's name, else the bucket's, else empty."""
        if span.bucket < 0:
            return ""
        bucket = self.buckets[span.bucket]
        return bucket.variables[span.variable] if span.variable >= 0 else bucket.name


def rows(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Packs (begin, end), ascending by begin, into as few rows as possible without overlap; returns their rows."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    placed = []
    for begin, end in spans:
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        placed.append(heapq.heappop(free) if free else len(busy))
        heapq.heappush(busy, (end, placed[-1]))
    return placed


def by_lane(spans: Sequence[Span]) -> dict[tuple[int, str], list[int]]:
    """(process, lane) -> positions of its spans; lanes ordered by their first kind, then by the other end."""
    found: dict[tuple[int, str], list[int]] = {}
    for position, span in enumerate(spans):
        found.setdefault((span.process, span.lane), []).append(position)

    def place(key: tuple[int, str]) -> tuple[object, ...]:
        process, lane = key
        of = {(spans[member].kind, spans[member].pserver, spans[member].rank) for member in found[key]}
        return process, min((ORDER[kind], *other_end) for kind, *other_end in of), lane

    return {key: found[key] for key in sorted(found, key=place)}
