"""Makes a capture of what its processes have recorded: clocks aligned, the halves of messages joined. No I/O.

A slice's time on the wire begins in one process and ends in another. So every message also says that it cannot have
come before it was sent, which bounds how the clocks of both may differ, usually closer than measured round trips do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.interface import BucketSpec
from tfps.trace.capture import KINDS, NONE, Capture, CapturedBucket, Kind, Process, Setting, Span, lane_of
from tfps.trace.recorder import ARRIVED, RECORD, SENT, UNKNOWN

_KEY = ("step", "bucket", "slice", "rank", "pserver")
_ANY = 2**62  # more than clocks differ


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one process has recorded.

    Args:
        process: its `clock_offset_ns` and `clock_error_ns` are as measured: of a pserver what has to be added to its
            times to give rank 0's, of a worker what gives pserver 0's.
        records: an array of `tfps.trace.recorder.RECORD`.
    """

    process: Process
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages in one direction that were seen at both ends, one per row: as sent, and when they came."""

    sent: NDArray[Any]
    arrived_ns: NDArray[np.int64]

    def between(self, rank: int, pserver: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When those between two processes were sent and have come."""
        chosen = (self.sent["rank"] == rank) & (self.sent["pserver"] == pserver)
        return self.sent["end_ns"][chosen], self.arrived_ns[chosen]


def assemble(
    recorded: Sequence[Recorded],
    buckets: Sequence[CapturedBucket],
    name: str = "",
    steps: Sequence[int] = (),
    settings: Mapping[str, Setting] | None = None,
) -> Capture:
    """The capture.

    Spans of buckets that are not there are left out, and messages whose begin or end nobody has recorded.

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


def named(buckets: Sequence[CapturedBucket], specs: Sequence[BucketSpec]) -> list[CapturedBucket]:
    """The buckets of a capture: as described, and the others as they were declared."""
    others = specs[len(buckets) :]
    return [*buckets, *(CapturedBucket(one.name, one.names, one.priority, one.nbytes) for one in others)]


_EMPTY = np.empty(0, RECORD)


def _array(recorded: Recorded, buckets: Sequence[CapturedBucket]) -> NDArray[Any]:
    """Its records, each with the rank (of a worker's) and the pserver (of a pserver's) that they are of."""
    array = np.frombuffer(recorded.records, RECORD)
    array = array[array["bucket"] < len(buckets)]
    variables = np.array([len(bucket.variables) for bucket in buckets] + [0])  # the last: of no bucket
    array["variable"][array["variable"] >= variables[array["bucket"]]] = NONE
    array["end_ns"] = np.maximum(array["begin_ns"], array["end_ns"])
    array["rank" if recorded.process.role == "worker" else "pserver"] = recorded.process.number
    return array


def _messages(senders: NDArray[Any], receivers: NDArray[Any]) -> _Messages:
    sent, arrived = senders[senders["kind"] == SENT], receivers[receivers["kind"] == ARRIVED]
    both = np.concatenate([sent, arrived])
    order = np.lexsort((both["kind"], *(both[field] for field in _KEY)))
    first, second = order[:-1], order[1:]
    pairs = (both["kind"][first] == SENT) & (both["kind"][second] == ARRIVED)
    for field in _KEY:
        pairs &= both[field][first] == both[field][second]
    return _Messages(both[first[pairs]], both["end_ns"][second[pairs]])


def _aligned(processes: Sequence[Process], pushes: _Messages, replies: _Messages) -> list[Process]:
    """The processes with their clocks' offsets to rank 0's and by how much those may be wrong."""
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
        # Each of these is relative to a pserver, whose own offset may be wrong by `most`, in either direction.
        one = _within(worker, worker.clock_offset_ns + found[0].clock_offset_ns, bounds, slack_ns=2 * most)
        moved.append(replace(one, clock_error_ns=one.clock_error_ns + most))
    return [*moved, *found]


def _bounds(pushes: _Messages, replies: _Messages, rank: int, pserver: int) -> tuple[int, int]:
    """Least and most that may be added to a worker's times to give a pserver's: nothing comes before it is sent."""
    sent, arrived = pushes.between(rank, pserver)
    high = int((arrived - sent).min()) if len(sent) else _ANY
    sent, arrived = replies.between(rank, pserver)
    low = int((sent - arrived).max()) if len(sent) else -_ANY
    return low, high


def _within(process: Process, measured_ns: int, bounds: Sequence[tuple[int, int]], slack_ns: int = 0) -> Process:
    """With the middle of what its measured offset and the bounds leave; they may miss each other by `slack_ns`.

    If they leave nothing, a clock has drifted since: then what is left by the bounds counts, which are from the time
    of the capture itself, and if that is nothing, too, what was measured.
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
    """The messages that a process has sent, to others whose clocks have these offsets."""
    rows, arrived_ns = messages.sent[chosen].copy(), messages.arrived_ns[chosen]
    rows["begin_ns"] = rows["end_ns"] + process.clock_offset_ns
    there = np.array([offsets[one] for one in rows[other].tolist()], np.int64)
    rows["end_ns"] = np.maximum(rows["begin_ns"], arrived_ns + there)
    yield from _spans(kind, number, rows)


def _spans(kind: Kind, process: int, rows: NDArray[Any]) -> Iterator[Span]:
    lanes: dict[tuple[int, int], str] = {}
    for _, begin, end, *rest in rows.tolist():
        key = rest[-2], rest[-1]
        if (lane := lanes.get(key)) is None:
            lane = lanes[key] = lane_of(kind, rank=key[0], pserver=key[1])
        yield Span(kind, process, lane, begin, end, *rest)
