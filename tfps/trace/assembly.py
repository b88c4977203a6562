"""Assembles a capture from the records of its processes: aligns clocks, joins sends with arrivals. No I/O.

A slice's time on the wire begins in one process and ends in another. No message arrives before it was sent, which
bounds the difference of the two clocks, usually more tightly than measured round trips do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tfps.trace.capture import KINDS, NONE, Capture, CapturedBucket, CapturedView, Kind, Process, Setting, Span, lane_of
from tfps.trace.recorder import ARRIVED, RECORD, SENT, UNKNOWN
from tfps.types import Array

_ANY = 2**62  # more than any clock difference


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of one process, an array of `tfps.trace.recorder.RECORD`.

    The process has its measured clock offset, which is added to a pserver's times to get rank 0's, and to a worker's to
    get pserver 0's.
    """

    process: Process
    records: bytes = b""


def assemble(
    recorded: Sequence[Recorded],
    buckets: Sequence[CapturedBucket],
    name: str = "",
    steps: Sequence[int] = (),
    settings: Mapping[str, Setting] | None = None,
    views: Sequence[CapturedView] = (),
    changes: Sequence[Span] = (),
) -> Capture:
    """Returns the capture of these processes: workers by rank, then pservers by number.

    `changes` of the view are those that rank 0 has seen, one for each of `views` but the first.

    Leaves out spans of unknown buckets, and messages that were recorded at one end only.
    """
    parts = [_rows(one, buckets) for one in recorded]
    rows, at = np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    workers = sum(one.process.role == "worker" for one in recorded)
    by_worker = at < workers
    sent, arrived = _messages(rows, by_worker)
    least_ns = np.full((len(parts), len(parts)), _ANY)  # from one process to another, each by its own clock
    np.minimum.at(least_ns, (at[sent], at[arrived]), rows["end_ns"][arrived] - rows["end_ns"][sent])
    processes = _aligned([one.process for one in recorded], workers, least_ns.tolist())
    offsets_ns = np.array([process.clock_offset_ns for process in processes])[at]
    queued = (rows["kind"] == SENT) & (rows["begin_ns"] != UNKNOWN)
    rows["begin_ns"] += offsets_ns
    rows["end_ns"] += offsets_ns
    wires = rows[sent]
    wires["begin_ns"], wires["end_ns"] = wires["end_ns"], np.maximum(wires["end_ns"], rows["end_ns"][arrived])
    spans = (
        *(span for code, kind in enumerate(KINDS) for span in _spans(kind, rows, at, rows["kind"] == code)),
        *changes,
        *_spans("queued", rows, at, queued & by_worker),
        *_spans("reply_queued", rows, at, queued & ~by_worker),
        *_spans("wire", wires, at[sent], by_worker[sent]),
        *_spans("reply_wire", wires, at[sent], ~by_worker[sent]),
    )
    return Capture(tuple(processes), tuple(buckets), spans, tuple(steps), dict(settings or {}), name, tuple(views))


def _rows(recorded: Recorded, buckets: Sequence[CapturedBucket]) -> Array:
    """Returns the records, with the process's number as rank (for a worker) or pserver."""
    rows: Array = np.frombuffer(recorded.records, RECORD)
    rows = rows[rows["bucket"] < len(buckets)]
    rows = rows[rows["kind"] != KINDS.index("change")]  # see `assemble`
    variables = np.array([len(bucket.variables) for bucket in buckets] + [0])  # the last: for no bucket
    rows["variable"][rows["variable"] >= variables[rows["bucket"]]] = NONE
    rows["end_ns"] = np.maximum(rows["begin_ns"], rows["end_ns"])
    rows["rank" if recorded.process.role == "worker" else "pserver"] = recorded.process.number
    return rows


def _messages(rows: Array, by_worker: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Returns where messages that were recorded at both ends were sent, and where they arrived: positions in `rows`.

    Several of the same slice (a part of the rows that were asked for, and the rest) arrive in the order in which they
    were sent. If some were recorded at one end only it is not known which, so all of these are left out.
    """
    ends = np.flatnonzero(np.isin(rows["kind"], (SENT, ARRIVED)))
    pushed = by_worker[ends] == (rows["kind"][ends] == SENT)
    names = ("pserver", "rank", "slice", "bucket", "step", "kind")
    keys = np.stack([pushed, *(rows[name][ends] for name in names)])
    order = np.lexsort(keys[::-1])  # as recorded where all keys are the same
    changes = np.diff(keys[:, order], prepend=-1)
    firsts = np.flatnonzero(changes.any(axis=0))  # of each run of the same keys
    lengths = np.diff(firsts, append=order.size)
    sent = ~changes[:-1, firsts[1:]].any(axis=0) & (changes[-1, firsts[1:]] == ARRIVED - SENT)
    sent = np.flatnonzero(sent & (lengths[:-1] == lengths[1:]))  # runs whose next one has the arrivals
    begins = np.repeat(firsts[sent], lengths[sent])
    nth = np.arange(begins.size) - np.repeat(np.cumsum(lengths[sent]) - lengths[sent], lengths[sent])
    return ends[order[begins + nth]], ends[order[begins + nth + np.repeat(lengths[sent], lengths[sent])]]


def _aligned(processes: Sequence[Process], workers: int, least_ns: list[list[int]]) -> list[Process]:
    """Returns the processes with their clock offsets to rank 0 and the maximum errors of these."""
    pservers = [
        _within(process, process.clock_offset_ns, [(-least_ns[0][at], least_ns[at][0])])
        for at, process in enumerate(processes[workers:], workers)
    ]
    most = max((pserver.clock_error_ns for pserver in pservers), default=0)
    aligned = [replace(processes[0], clock_offset_ns=0, clock_error_ns=0)]
    for at, worker in enumerate(processes[1:workers], 1):
        bounds = [
            (pserver.clock_offset_ns - least_ns[there][at], pserver.clock_offset_ns + least_ns[at][there])
            for there, pserver in enumerate(pservers, workers)
        ]
        # Each bound is relative to a pserver, whose offset may be wrong by up to `most` in either direction.
        one = _within(worker, worker.clock_offset_ns + pservers[0].clock_offset_ns, bounds, slack_ns=2 * most)
        aligned.append(replace(one, clock_error_ns=one.clock_error_ns + most))
    return [*aligned, *pservers]


def _within(process: Process, measured_ns: int, bounds: Sequence[tuple[int, int]], slack_ns: int = 0) -> Process:
    """Returns `process` with the middle of the range that its measured offset and the bounds allow.

    Lower and upper limits may cross by `slack_ns`. An empty range means that a clock has drifted: then the bounds
    alone count, which are from the capture itself; if these contradict each other, too, the measured offset.
    """
    measured = measured_ns - process.clock_error_ns, measured_ns + process.clock_error_ns
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    for least, most in ((max(low, measured[0]), min(high, measured[1])), (low, high), measured):
        if least <= most + slack_ns:
            break
    return replace(process, clock_offset_ns=(least + most) // 2, clock_error_ns=(max(most - least, 0) + 1) // 2)


def _spans(kind: Kind, rows: Array, at: NDArray[np.intp], chosen: NDArray[np.bool_]) -> Iterator[Span]:
    """Yields the chosen rows as spans; `at`: position of each row's process."""
    lanes: dict[tuple[int, int], str] = {}
    for process, (_, begin_ns, end_ns, *rest) in zip(at[chosen].tolist(), rows[chosen].tolist(), strict=True):
        key = rest[-2], rest[-1]
        if (lane := lanes.get(key)) is None:
            lane = lanes[key] = lane_of(kind, rank=key[0], pserver=key[1])
        yield Span(kind, process, lane, begin_ns, end_ns, *rest)
