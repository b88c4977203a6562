"""Capture files: gzipped Chrome trace events for Perfetto, with the capture itself in the first line.

Reading needs only that line: columns of numbers, exact to the nanosecond. See docs/trace_format.md.

Tested in tests/trace/test_capture.py.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from tfps.errors import TfpsError
from tfps.trace.capture import KINDS, NONE, Capture, CapturedBucket, Kind, Process, Span, by_lane, rows
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
_PLAIN = ("step", "bucket", "slice", "variable", "priority", "nbytes", "rank", "pserver")
_QUEUES: Mapping[Kind, Kind] = {"queued": "wire", "reply_queued": "reply_wire"}  # and the next span
_AGAIN = "Do not use it; record the capture again"
_FLOW = ("wire", "aggregate", "reply_wire", "update")
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
        file.write(",\n".join(_events(capture)) + "\n]\n")
    partial.replace(path)


def read(path: str | Path) -> Capture:
    """Reads what `write_chrome` wrote, without loss.

    Raises:
        TfpsError: it is not a capture.
    """
    try:
        return from_columns(json.loads(read_columns(path)))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise TfpsError(f"'{path}' must be a capture of tfps, but its first line is damaged: {error!r}") from error


def read_columns(path: str | Path) -> bytes:
    """The first line of a file: the capture as a JSON object, as written.

    Raises:
        TfpsError: it is not a capture, or of a newer format, or was made to fill memory.
    """
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
    origin = spans[0].begin_ns if spans else 0
    begins, before = [], origin
    for span in spans:
        begins.append(span.begin_ns - before)
        before = span.begin_ns
    columns: dict[str, list[int]] = {
        "begin": begins,
        "duration": [span.end_ns - span.begin_ns for span in spans],
        "kind": [kinds[span.kind] for span in spans],
        "lane": [lanes.setdefault((span.process, span.lane), len(lanes)) for span in spans],
    }
    for name in _PLAIN:
        column = Span._fields.index(name)
        columns[name] = [cast("int", span[column]) for span in spans]
    return {
        "format": FORMAT,
        "name": capture.name,
        "processes": [asdict(process) for process in capture.processes],
        "buckets": [asdict(bucket) for bucket in capture.buckets],
        "steps": capture.steps,
        "settings": dict(capture.settings),
        "kinds": KINDS,
        "lanes": list(lanes),
        "origin_ns": origin,
        "columns": columns,
    }


def from_columns(content: dict[str, Json]) -> Capture:
    """The inverse of `to_columns`, after JSON.

    Raises:
        TfpsError, ValueError, KeyError, TypeError, IndexError: the content is not a capture.
    """
    columns, kinds, lanes = content["columns"], content["kinds"], content["lanes"]
    begin = content["origin_ns"]
    begins = []
    for difference in columns["begin"]:
        begin += difference
        begins.append(begin)
    ends = [first + duration for first, duration in zip(begins, columns["duration"], strict=True)]
    spans = zip(
        [kinds[kind] for kind in columns["kind"]],
        [lanes[lane][0] for lane in columns["lane"]],
        [lanes[lane][1] for lane in columns["lane"]],
        begins,
        ends,
        *(columns[name] for name in _PLAIN),
        strict=True,
    )
    return Capture(
        processes=tuple(Process(**process) for process in content["processes"]),
        buckets=tuple(CapturedBucket(**{**one, "variables": tuple(one["variables"])}) for one in content["buckets"]),
        spans=tuple(map(Span._make, spans)),
        steps=tuple(content["steps"]),
        settings=content["settings"],
        name=content["name"],
    )


def _events(capture: Capture) -> Iterator[str]:
    """Chrome events as JSON: names, complete events, flows, and counters for queues, as single waits are too many."""
    spans = capture.spans
    origin = spans[0].begin_ns if spans else 0
    threads: dict[int, int] = {}
    waited: dict[Hashable, int] = {}
    flows: dict[tuple[int, int, int], list[int]] = {}
    for position, process in enumerate(capture.processes):
        yield _named("process_name", position, 0, {"name": f"{process.name} {process.host}".rstrip()})
        yield _named("process_sort_index", position, 0, {"sort_index": position})
    first = 1
    for (process_number, lane), members in by_lane(spans).items():
        queued = [spans[member] for member in members if spans[member].kind in _QUEUES]
        waited |= {_message(span, _QUEUES[span.kind]): span.duration_ns for span in queued}
        yield from _counter(process_number, lane, queued, origin)
        # One thread per row: complete events of one thread may nest but not overlap.
        shown = [member for member in members if spans[member].kind not in _QUEUES]
        placed = rows((spans[each].begin_ns, max(spans[each].end_ns, spans[each].begin_ns + 1)) for each in shown)
        count = max(placed, default=-1) + 1
        for row in range(count):
            name = lane if row == 0 else f"{lane} ({row + 1})"
            yield _named("thread_name", process_number, first + row, {"name": name})
            yield _named("thread_sort_index", process_number, first + row, {"sort_index": first + row})
        for member, row in zip(shown, placed, strict=True):
            threads[member] = first + row
        first += count
    for position, span in enumerate(spans):
        if span.kind in _QUEUES:
            continue
        yield _span_event(capture, span, threads[position], origin, waited.get(_message(span, span.kind)))
        if span.kind in _FLOW and span.bucket >= 0:
            flows.setdefault((span.step, span.bucket, span.slice), []).append(position)
    number = 0
    for key in flows:
        for chain in _chains(spans, flows, key):
            number += 1
            time_ns = origin
            for at, position in enumerate(chain):
                phase = "s" if at == 0 else "f" if at == len(chain) - 1 else "t"
                span = spans[position]
                # An aggregate begins with another rank's push: arrows must not lead back in time.
                time_ns = min(max(time_ns, span.begin_ns), span.end_ns)
                end = ',"bp":"e"' if phase == "f" else ""
                yield (
                    f'{{"ph":"{phase}","cat":"flow","name":"slice","id":{number},"pid":{span.process},'
                    f'"tid":{threads[position]},"ts":{_us(time_ns - origin)}{end}}}'
                )


def _chains(
    spans: tuple[Span, ...], flows: dict[tuple[int, int, int], list[int]], key: tuple[int, int, int]
) -> Iterator[list[int]]:
    """Per rank, the spans of a slice in one step, from its push to the update."""
    step, bucket, index = key
    if index < 0:
        return
    both = *flows[key], *flows.get((step, bucket, NONE), ())  # the pieces of a gather are aggregated together
    shared = [position for position in both if spans[position].kind == "aggregate"]
    updates = {spans[position].rank: position for position in flows.get((step, bucket, NONE), ())}
    own: dict[int, list[int]] = {}
    for position in flows[key]:
        if spans[position].kind != "aggregate":
            own.setdefault(spans[position].rank, []).append(position)
    for rank, chain in own.items():
        whole = [*chain, *shared, *([updates[rank]] if rank in updates else [])]
        if len(whole) > 1:
            yield sorted(whole, key=lambda position: _FLOW.index(spans[position].kind))


def _span_event(capture: Capture, span: Span, thread: int, origin: int, queued_ns: int | None) -> str:
    title = f"{span.kind} {capture.variable_name(span)}".rstrip() + (f" [{span.slice}]" if span.slice >= 0 else "")
    known = dict(zip(Span._fields[5:], span[5:], strict=True))
    arguments: dict[str, int | float | str] = {name: value for name, value in known.items() if value != NONE}
    if span.bucket >= 0:
        arguments["key"] = span.key
    if queued_ns is not None:
        arguments["queued_us"] = queued_ns / 1e3
    phase = '"ph":"i","s":"t"' if span.kind == "ready" else f'"ph":"X","dur":{_us(span.duration_ns)}'
    return (
        f'{{{phase},"name":{_dump(title)},"cat":"{span.kind}","pid":{span.process},"tid":{thread},'
        f'"ts":{_us(span.begin_ns - origin)},"args":{_dump(arguments)}}}'
    )


def _message(span: Span, kind: Kind) -> Hashable:
    """The key that a span on the wire shares with the one in the queue before it."""
    return kind, span.process, span.step, span.bucket, span.slice, span.rank, span.pserver


def _counter(process: int, lane: str, queued: Sequence[Span], origin: int) -> Iterator[str]:
    """Counter events: how many wait, at each change."""
    changes = [(span.begin_ns, 1) for span in queued] + [(span.end_ns, -1) for span in queued]
    changes.sort(key=lambda change: (change[0], -change[1]))
    waiting = itertools.accumulate(change for _, change in changes)
    for (at_ns, _), count in zip(changes, waiting, strict=True):
        time = _us(at_ns - origin)
        yield f'{{"ph":"C","name":{_dump(lane)},"pid":{process},"ts":{time},"args":{{"slices":{count}}}}}'


def _named(what: str, process: int, thread: int, arguments: dict[str, int | str]) -> str:
    return f'{{"ph":"M","name":"{what}","pid":{process},"tid":{thread},"args":{_dump(arguments)}}}'


def _us(ns: int) -> str:
    """Microseconds, exact."""
    return f"{ns // 1000}.{ns % 1000:03d}"
