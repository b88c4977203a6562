"""Assembles a capture from the records of its processes: aligns clocks, joins sends with arrivals. No I/O.

A slice's time on the wire begins in one process and ends in another. No message arrives before it was sent, which
bounds the difference of the two clocks, usually more tightly than measured round trips do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tfps.trace.capture import KINDS, NONE, Capture, CapturedBucket, Kind, Process, Setting, Span, lane_of
from tfps.trace.recorder import ARRIVED, RECORD, SENT, UNKNOWN
from tfps.types import Array

_KEY = ("step", "bucket", "slice", "rank", "pserver")
_ANY = 2**62  # more than any clock difference


@dataclass(frozen=True, slots=True)
class Recorded:
    """The records of one process.

    Args:
        process: with measured `clock_offset_ns` and `clock_error_ns`. The offset is added to a pserver's times to get
            rank 0's, and to a worker's to get pserver 0's.
        records: an array of `tfps.trace.recorder.RECORD`.
    """

    process: Process
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages in one direction recorded at both ends, one per row: the sender's record and the arrival time."""

    sent: Array
    arrived_ns: NDArray[np.int64]

    def between(self, rank: int, pserver: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns send and arrival times of the messages between two processes."""
        chosen = (self.sent["rank"] == rank) & (self.sent["pserver"] == pserver)
        return self.sent["end_ns"][chosen], self.arrived_ns[chosen]


def assemble(
    recorded: Sequence[Recorded],
    buckets: Sequence[CapturedBucket],
    name: str = "",
    steps: Sequence[int] = (),
    settings: Mapping[str, Setting] | None = None,
) -> Capture:
    """Returns the capture, without spans of unknown buckets and messages recorded at one end only.

    Args:
        recorded: one per process of the job, workers by rank, then pservers by number.
    """
    arrays = [_array(one, buckets) for one in recorded]
    workers = sum(one.process.role == "worker" for one in recorded)
    of_workers, of_pservers = np.concatenate(arrays[:workers]), np.concatenate([_EMPTY, *arrays[workers:]])
    pushes, replies = _messages(of_workers, of_pservers), _messages(of_pservers, of_workers)
    processes = _aligned([one.process for one in recorded], pushes, replies)
    spans: list[Span] = []
    for number, (process, array) in enumerate(zip(processes, arrays, strict=True)):
        moved = array.copy()
        moved["begin_ns"] += np.where(array["begin_ns"] == UNKNOWN, 0, process.clock_offset_ns)
        moved["end_ns"] += process.clock_offset_ns
        for code, kind in enumerate(KINDS):
            spans.extend(_spans(kind, number, moved[array["kind"] == code]))
        queued = moved[(array["kind"] == SENT) & (array["begin_ns"] != UNKNOWN)]
        spans.extend(_spans("queued" if process.role == "worker" else "reply_queued", number, queued))
    for number, process in enumerate(processes):
        if process.role == "worker":
            at_pservers = {other.number: other.clock_offset_ns for other in processes[workers:]}
            own = pushes.sent["rank"] == process.number
            spans.extend(_wires("wire", number, process, at_pservers, "pserver", pushes, own))
        else:
            at_workers = {other.number: other.clock_offset_ns for other in processes[:workers]}
            own = replies.sent["pserver"] == process.number
            spans.extend(_wires("reply_wire", number, process, at_workers, "rank", replies, own))
    return Capture(tuple(processes), tuple(buckets), tuple(spans), tuple(steps), dict(settings or {}), name)


_EMPTY = np.empty(0, RECORD)


def _array(recorded: Recorded, buckets: Sequence[CapturedBucket]) -> Array:
    """Returns the records, with the process's number as rank (for a worker) or pserver."""
    array = np.frombuffer(recorded.records, RECORD)
    array = array[array["bucket"] < len(buckets)]
    variables = np.array([len(bucket.variables) for bucket in buckets] + [0])  # the last: for no bucket
    array["variable"][array["variable"] >= variables[array["bucket"]]] = NONE
    array["end_ns"] = np.maximum(array["begin_ns"], array["end_ns"])
    array["rank" if recorded.process.role == "worker" else "pserver"] = recorded.process.number
    return array


def _messages(senders: Array, receivers: Array) -> _Messages:
    sent, arrived = senders[senders["kind"] == SENT], receivers[receivers["kind"] == ARRIVED]
    both = np.concatenate([sent, arrived])
    order = np.lexsort((both["kind"], *(both[field] for field in _KEY)))
    first, second = order[:-1], order[1:]
    pairs = (both["kind"][first] == SENT) & (both["kind"][second] == ARRIVED)
    for field in _KEY:
        pairs &= both[field][first] == both[field][second]
    return _Messages(both[first[pairs]], both["end_ns"][second[pairs]])


def _aligned(processes: Sequence[Process], pushes: _Messages, replies: _Messages) -> list[Process]:
    """Returns the processes with their clock offsets to rank 0 and the maximum errors of these."""
    workers = [process for process in processes if process.role == "worker"]
    pservers = [process for process in processes if process.role == "pserver"]
    found: list[Process] = []
    for pserver in pservers:
        low, high = _bounds(pushes, replies, 0, pserver.number)
        found.append(_within(pserver, pserver.clock_offset_ns, [(-high, -low)]))
    most = max((pserver.clock_error_ns for pserver in found), default=0)
    moved = [replace(workers[0], clock_offset_ns=0, clock_error_ns=0)]
    for worker in workers[1:]:
        bounds = []
        for pserver in found:
            low, high = _bounds(pushes, replies, worker.number, pserver.number)
            bounds.append((low + pserver.clock_offset_ns, high + pserver.clock_offset_ns))
        # Each bound is relative to a pserver, whose offset may be wrong by up to `most` in either direction.
        one = _within(worker, worker.clock_offset_ns + found[0].clock_offset_ns, bounds, slack_ns=2 * most)
        moved.append(replace(one, clock_error_ns=one.clock_error_ns + most))
    return [*moved, *found]


def _bounds(pushes: _Messages, replies: _Messages, rank: int, pserver: int) -> tuple[int, int]:
    """Returns the bounds of a worker's clock offset to a pserver: nothing arrives before it is sent."""
    sent, arrived = pushes.between(rank, pserver)
    high = int((arrived - sent).min()) if len(sent) else _ANY
    sent, arrived = replies.between(rank, pserver)
    low = int((sent - arrived).max()) if len(sent) else -_ANY
    return low, high


def _within(process: Process, measured_ns: int, bounds: Sequence[tuple[int, int]], slack_ns: int = 0) -> Process:
    """Returns `process` with the middle of the range that its measured offset and the bounds allow.

    Lower and upper limits may cross by `slack_ns`. An empty range means that a clock has drifted: then the bounds
    alone count, which are from the capture itself; if these contradict each other, too, the measured offset.
    """
    error_ns = process.clock_error_ns
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    around = max(low, measured_ns - error_ns), min(high, measured_ns + error_ns)
    for least, most in (around, (low, high), (measured_ns - error_ns, measured_ns + error_ns)):
        if least <= most + slack_ns:
            left_ns = max(most - least, 0)
            return replace(process, clock_offset_ns=(least + most) // 2, clock_error_ns=(left_ns + 1) // 2)
    return process  # never: an error is not negative


def _wires(
    kind: Kind,
    number: int,
    process: Process,
    offsets: Mapping[int, int],
    other: str,
    messages: _Messages,
    chosen: NDArray[np.bool_],
) -> Iterator[Span]:
    """Yields spans of the messages that a process has sent to others with these clock offsets."""
    rows, arrived_ns = messages.sent[chosen].copy(), messages.arrived_ns[chosen]
    rows["begin_ns"] = rows["end_ns"] + process.clock_offset_ns
    there = np.array([offsets[one] for one in rows[other].tolist()], np.int64)
    rows["end_ns"] = np.maximum(rows["begin_ns"], arrived_ns + there)
    yield from _spans(kind, number, rows)


def _spans(kind: Kind, process: int, rows: Array) -> Iterator[Span]:
    lanes: dict[tuple[int, int], str] = {}
    for _, begin, end, *rest in rows.tolist():
        key = rest[-2], rest[-1]
        if (lane := lanes.get(key)) is None:
            lane = lanes[key] = lane_of(kind, rank=key[0], pserver=key[1])
        yield Span(kind, process, lane, begin, end, *rest)
