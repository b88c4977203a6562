"""Records what happens to slices, for people who ask why a step is slow."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from tfps.trace.capture import KINDS, NONE, Kind, Span

# A span as bytes: what a process keeps, and what it sends to whoever collects a capture.
RECORD = np.dtype(
    [
        ("kind", "u1"),  # position in KINDS, or one of the two below
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("step", "<i8"),
        ("bucket", "<i4"),
        ("slice", "<i8"),
        ("variable", "<i4"),
        ("priority", "<i8"),
        ("nbytes", "<i8"),
        ("rank", "<i4"),
        ("pserver", "<i4"),
    ]
)
_pack = struct.Struct("<Bqqqiqiqqii").pack
UNKNOWN = -(2**63)  # a time that nobody has recorded
_CODES = {kind: code for code, kind in enumerate(KINDS)}
SENT = 100  # a slice was put into a queue (begin_ns, may be UNKNOWN) and taken to be sent (end_ns)
ARRIVED = 101  # it has come to the other end, at that time


class Recorder:
    """A ring buffer of spans, whatever thread recorded them.

    Off until `start` is called; callers check `enabled` first, so that a recorder that is off costs one attribute read.

    Args:
        capacity: how many are kept, the latest. A span takes 65 bytes, and Python's 41.
        clock: all times of this process in a capture, nanoseconds.
    """

    def __init__(self, capacity: int = 1_000_000, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.enabled = False
        self.started_ns = 0  # the last time
        self.clock = clock
        # Bytes and not tuples: quickly made, nothing for the garbage collector, ready to be sent.
        self._spans: deque[bytes] = deque(maxlen=capacity)

    def start(self) -> None:
        """Forgets what was before and starts recording."""
        self._spans.clear()
        self.started_ns = self.clock()
        self.enabled = True

    def stop(self) -> None:
        """Stops recording; what was recorded stays."""
        self.enabled = False

    def span(
        self,
        kind: Kind,
        begin_ns: int,
        end_ns: int,
        *,
        step: int = NONE,
        bucket: int = NONE,
        slice: int = NONE,  # noqa: A002
        variable: int = NONE,
        priority: int = NONE,
        nbytes: int = NONE,
        rank: int = NONE,
        pserver: int = NONE,
    ) -> None:
        """Adds a span of this process, times by `clock`; callable from any thread."""
        if self.enabled:
            self._spans.append(
                _pack(
                    _CODES[kind], begin_ns, end_ns, step, bucket, slice, variable, priority, nbytes, rank, pserver
                )
            )  # fmt: skip

    def sent(
        self, put_ns: int, taken_ns: int, step: int, bucket: int, index: int, priority: int, nbytes: int, rank: int,
        pserver: int,
    ) -> None:  # fmt: skip
        """A slice has left its queue: the end of its time there and the begin of that on the wire.

        Of `rank` and `pserver` the other end is given; `put_ns` is UNKNOWN if it was put there before recording began.
        """
        if self.enabled:
            self._spans.append(
                _pack(SENT, put_ns, taken_ns, step, bucket, index, NONE, priority, nbytes, rank, pserver)
            )

    def arrived(self, at_ns: int, step: int, bucket: int, index: int, rank: int, pserver: int) -> None:
        """A slice has come: the end of its time on the wire. Of `rank` and `pserver` the other end is given."""
        if self.enabled:
            self._spans.append(_pack(ARRIVED, at_ns, at_ns, step, bucket, index, NONE, NONE, NONE, rank, pserver))

    def records(self) -> bytes:
        """All spans so far, and what `sent` and `arrived` have added, as an array of RECORD."""
        return b"".join(self._spans.copy())  # copied at once: others may go on appending

    @property
    def full(self) -> bool:
        """Whether the first spans may have had to go."""
        return len(self._spans) == self._spans.maxlen

    def spans(self) -> list[Span]:
        """The spans so far, in the order in which they ended up here; without what `sent` and `arrived` have added.

        Times are of this recorder's clock; process and lane are not known here.
        """
        records = np.frombuffer(self.records(), RECORD)
        found = records[records["kind"] < len(KINDS)]
        return [Span(KINDS[code], NONE, "", *rest) for code, *rest in found.tolist()]
