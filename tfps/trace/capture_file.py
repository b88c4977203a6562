"""Capture files: gzipped Chrome trace events for Perfetto, with the capture itself in the first line.

Reading needs only that line: columns of numbers, exact to the nanosecond. See docs/trace_format.md.

Tested in tests/trace/test_capture.py.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path

from tfps.errors import TfpsError
from tfps.trace.capture import (
    KINDS,
    NONE,
    ORDER,
    Capture,
    CapturedBucket,
    CapturedPart,
    CapturedView,
    Kind,
    Process,
    Span,
    by_lane,
    rows,
)
from tfps.types import Json

FORMAT = 1
SUFFIX = ".trace.json.gz"
_MOST_BYTES, _MOST_RATIO = 2**20, 25  # what the first line of a file may unpack to; captures reach a ratio of 7
# How many of some characters that line may have: so many, and one for each byte of the file. Each may become an object
# of up to 100 bytes. Recorded captures have 0.4 commas per byte; names and processes without spans have 1.3 of the
# others.
_MOST_CHARACTERS = ((b",", 2**19), (b'[{:"', 2**17))
# A metadata event that others ignore. Perfetto would stop at an unknown member of an outer object.
_START = b'[{"name":"tfps","ph":"M","pid":0,"tid":0,"args":'
_END = b"},\n"
# Written unchanged; others are coded: begin as differences, kind and (process, lane) as positions in lists.
_PLAIN = Span._fields[5:]
_QUEUES: Mapping[Kind, Kind] = {"queued": "wire", "reply_queued": "reply_wire"}  # and the next span
_INSTANTS: Mapping[Kind, Mapping[str, str]] = {"ready": {"ph": "i", "s": "t"}, "change": {"ph": "i", "s": "g"}}
_AGAIN = "Do not use it; record the capture again"
_dump = json.JSONEncoder(separators=(",", ":")).encode


def chrome_path(log_dir: str | Path, run: str) -> Path:
    """The path of a run's capture: `<log_dir>/plugins/tfps/<run>.trace.json.gz`."""
    return Path(log_dir) / "plugins" / "tfps" / f"{run}{SUFFIX}"


def captures_below(log_dir: Path) -> list[Path]:
    """The captures of all programs that logged to `log_dir` or below it, newest first."""
    found = []
    for folder, _, names in os.walk(log_dir):
        here = Path(folder)
        if here.parts[-2:] == ("plugins", "tfps"):
            found += [here / name for name in names if name.endswith(SUFFIX)]
    dated = sorted(((file.stat().st_mtime_ns, file) for file in found if file.exists()), reverse=True)
    return [file for _, file in dated]


def write_chrome(capture: Capture, path: str | Path) -> None:
    """Writes a capture atomically; creates missing folders."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with gzip.open(partial, "wt", compresslevel=5, encoding="utf-8", newline="\n") as file:
        file.write(_START.decode() + _dump(to_columns(capture)) + _END.decode())
        file.write(",\n".join(map(_dump, _events(capture))) + "\n]\n")
    partial.replace(path)


def read(path: str | Path) -> Capture:
    """Reads what `write_chrome` wrote, without loss; another file is a TfpsError."""
    try:
        content = json.loads(read_columns(path))
        columns, kinds, lanes = content["columns"], content["kinds"], content["lanes"]
        begins = list(accumulate(columns["begin"], initial=content["origin_ns"]))[1:]
        spans = zip(
            [kinds[kind] for kind in columns["kind"]],
            [lanes[lane][0] for lane in columns["lane"]],
            [lanes[lane][1] for lane in columns["lane"]],
            begins,
            [begin + duration for begin, duration in zip(begins, columns["duration"], strict=True)],
            *(columns[name] for name in _PLAIN),
            strict=True,
        )
        return Capture(
            processes=tuple(Process(**process) for process in content["processes"]),
            buckets=tuple(
                CapturedBucket(**{**one, "variables": tuple(one["variables"])}) for one in content["buckets"]
            ),
            spans=tuple(map(Span._make, spans)),
            steps=tuple(content["steps"]),
            settings=content["settings"],
            name=content["name"],
            views=tuple(map(_view, content.get("views", ()))),  # older files have none, nor parts
            parts=tuple(map(_part, content.get("parts", ()))),
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise TfpsError(f"'{path}' must be a capture of tfps, but its first line is damaged: {error!r}") from error


def _view(one: dict[str, Json]) -> CapturedView:
    lacking = {name: tuple(slices) for name, slices in one["lacking"].items()}
    return CapturedView(**{**one, "ranks": tuple(one["ranks"]), "lacking": lacking})


def _part(one: dict[str, Json]) -> CapturedPart:
    return CapturedPart(**{**one, "waits": tuple(one["waits"]), "sends": tuple(one["sends"])})


def read_columns(path: str | Path) -> bytes:
    """The first line of a file: the capture as a JSON object, as written. Refuses one that was made to fill memory."""
    try:
        size = Path(path).stat().st_size
        limit = _MOST_BYTES + _MOST_RATIO * size
        with gzip.open(path, "rb") as file:
            start = file.read(len(_START))
            line = file.readline(limit) if start == _START else b""
    except (OSError, EOFError, zlib.error) as error:
        raise TfpsError(f"cannot read the capture '{path}': {error}") from error
    if len(line) >= limit and not line.endswith(_END):
        raise TfpsError(
            f"the first line of the capture '{path}' must unpack to at most {limit} bytes, {_MOST_RATIO} times its "
            f"size; got more: it was made to fill memory. {_AGAIN}"
        )
    if not line.endswith(_END):
        raise TfpsError(
            f"'{path}' must be a capture of tfps, got another file: "
            f"a capture is gzipped, and its first line starts with {_START.decode()}"
        )
    if not line.startswith(b'{"format":%d,' % FORMAT):
        raise TfpsError(f"'{path}' must be of format {FORMAT}, got {line[:20]!r}: open it with a newer tfps")
    for characters, least in _MOST_CHARACTERS:
        most, found = least + size, sum(map(line.count, characters))
        if found > most:
            raise TfpsError(
                f"the first line of the capture '{path}' must have at most {most} of '{characters.decode()}', as the "
                f"file has {size} bytes; got {found}: it was made to fill memory. {_AGAIN}"
            )
    return line[: -len(_END)]


def to_columns(capture: Capture) -> dict[str, Json]:
    """The capture as lists of numbers; see docs/trace_format.md."""
    spans = capture.spans
    lanes: dict[tuple[int, str], int] = {}
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    begins = [span.begin_ns for span in spans]
    origin = begins[0] if begins else 0
    columns: dict[str, list[int]] = {
        "begin": [after - before for before, after in pairwise([origin, *begins])],
        "duration": [span.duration_ns for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "lane": [lanes.setdefault((span.process, span.lane), len(lanes)) for span in spans],
    }
    return {
        "format": FORMAT,
        "name": capture.name,
        "processes": [asdict(process) for process in capture.processes],
        "buckets": [asdict(bucket) for bucket in capture.buckets],
        "views": [asdict(view) for view in capture.views],
        "parts": [asdict(part) for part in capture.parts],
        "steps": capture.steps,
        "settings": dict(capture.settings),
        "kinds": KINDS,
        "lanes": list(lanes),
        "origin_ns": origin,
        "columns": columns | {name: [getattr(span, name) for span in spans] for name in _PLAIN},
    }


def _events(capture: Capture) -> Iterator[dict[str, Json]]:
    """Chrome events: names, complete events, flows, and counters for queues, as single waits are too many."""
    spans = capture.spans
    origin = spans[0].begin_ns if spans else 0
    threads: dict[int, dict[str, int]] = {}  # position of a span -> where it is drawn
    waited: dict[Hashable, int] = {}
    for position, process in enumerate(capture.processes):
        there = {"ph": "M", "pid": position, "tid": 0}
        yield {**there, "name": "process_name", "args": {"name": f"{process.name} {process.host}".rstrip()}}
        yield {**there, "name": "process_sort_index", "args": {"sort_index": position}}
    first = 1
    for (number, lane), members in by_lane(spans).items():
        queued = [spans[member] for member in members if spans[member].kind in _QUEUES]
        waited |= {_message(span, _QUEUES[span.kind]): span.duration_ns for span in queued}
        ends = sorted((at_ns, left) for span in queued for at_ns, left in ((span.begin_ns, False), (span.end_ns, True)))
        waiting = 0
        for at_ns, left in ends:
            waiting += -1 if left else 1
            yield {"ph": "C", "name": lane, "pid": number, "ts": (at_ns - origin) / 1e3, "args": {"slices": waiting}}
        # One thread per row: complete events of one thread may nest but not overlap.
        shown = [member for member in members if spans[member].kind not in _QUEUES]
        placed = rows((spans[each].begin_ns, max(spans[each].end_ns, spans[each].begin_ns + 1)) for each in shown)
        for row in range(max(placed, default=-1) + 1):
            there = {"ph": "M", "pid": number, "tid": first + row}
            yield {**there, "name": "thread_name", "args": {"name": lane if row == 0 else f"{lane} ({row + 1})"}}
            yield {**there, "name": "thread_sort_index", "args": {"sort_index": first + row}}
        threads |= {member: {"pid": number, "tid": first + row} for member, row in zip(shown, placed, strict=True)}
        first += max(placed, default=-1) + 1
    views = dict(zip((at for at, span in enumerate(spans) if span.kind == "change"), capture.views[1:], strict=True))
    for position, thread in sorted(threads.items()):
        span = spans[position]
        slice_ = f" [{span.slice}]" if span.slice >= 0 and span.bucket not in capture.tables else ""
        arguments: dict[str, Json] = {name: value for name in _PLAIN if (value := getattr(span, name)) != NONE}
        if span.bucket >= 0:
            arguments["key"] = span.key
        if span.kind == "change":
            arguments |= asdict(views[position])
        if (queued_ns := waited.get(_message(span, span.kind))) is not None:
            arguments["queued_us"] = queued_ns / 1e3
        yield {
            **(_INSTANTS.get(span.kind) or {"ph": "X", "dur": span.duration_ns / 1e3}),
            "name": capture.title(span) + slice_,
            "cat": span.kind,
            **thread,
            "ts": (span.begin_ns - origin) / 1e3,
            "args": arguments,
        }
    for number, chain in enumerate(_chains(capture), 1):
        time_ns, phases = origin, {chain[0]: {"ph": "s"}, chain[-1]: {"ph": "f", "bp": "e"}}
        for position in chain:
            # An aggregate begins with another rank's push: arrows must not lead back in time.
            time_ns = min(max(time_ns, spans[position].begin_ns), spans[position].end_ns)
            flow = {"cat": "flow", "name": "slice", "id": number, "ts": (time_ns - origin) / 1e3}
            yield {**phases.get(position, {"ph": "t"}), **flow, **threads[position]}


def _chains(capture: Capture) -> Iterator[list[int]]:
    """Per slice, step and rank, the positions of its spans from push to update; of a table also per pserver.

    Of rows that were asked for: from the ids to the last of the rows.
    """
    spans = capture.spans
    messages: dict[tuple[int, int, int, int, int], list[int]] = defaultdict(list)
    sums: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    updates: dict[tuple[int, int, int], list[int]] = {}
    for position, (kind, *_, step, bucket, slice_, _, _, _, rank, pserver) in enumerate(spans):
        owner = pserver if bucket in capture.tables else NONE  # each numbers its slices itself
        if kind == "aggregate":
            sums[step, bucket, slice_, owner].append(position)
        elif kind == "update":
            updates[step, bucket, rank] = [position]
        elif kind in ("wire", "reply_wire", "held") and slice_ >= 0:
            messages[step, bucket, slice_, rank, owner].append(position)
    for (step, bucket, slice_, rank, owner), own in messages.items():
        chain = own
        if not capture.is_lookup(spans[own[0]]):
            # The pieces of a gather are aggregated together, as are the gradients of a table.
            shared = sums[step, bucket, slice_, owner] + sums[step, bucket, NONE, owner]
            chain = [*own, *shared, *updates.get((step, bucket, rank), [])]
        if len(chain) > 1:
            yield sorted(chain, key=lambda position: ORDER[spans[position].kind])


def _message(span: Span, kind: Kind) -> Hashable:
    """The key that a span on the wire shares with the one in the queue before it."""
    return kind, span.process, span.step, span.bucket, span.slice, span.rank, span.pserver
