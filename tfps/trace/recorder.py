"""Records what happens to slices, to find out why a step is slow."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from tfps.trace.capture import KINDS, NONE, Kind, Span

# A span as bytes, as a process keeps and sends it: its kind is a position in KINDS, or one of the two below.
_FORMAT = "Bqqqiqiqqii"
RECORD = np.dtype([(name, f"<{code}") for name, code in zip(("kind", *Span._fields[3:]), _FORMAT, strict=True)])
_pack = struct.Struct(f"<{_FORMAT}").pack
CAPACITY = 1_000_000  # spans that a recorder keeps, if it is not told otherwise
UNKNOWN = -(2**63)  # a time that was not recorded
_CODES = {kind: code for code, kind in enumerate(KINDS)}
SENT = 100  # a slice was queued at begin_ns (may be UNKNOWN) and sent at end_ns
ARRIVED = 101  # it arrived at the other end at that time


class Recorder:
    """A ring buffer of spans from any thread.

    Off until `start` is called; callers check `enabled` first, so that a recorder that is off costs one attribute read.
    Keeps the latest spans up to its capacity; each takes 65 bytes plus Python's 41.
    """

    def __init__(self, capacity: int = CAPACITY, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.enabled = False
        self.started_ns = 0  # by the last `start`
        self.clock = clock  # gives all times of this process in a capture, nanoseconds
        # Bytes, not tuples: fast to make, no work for the garbage collector, ready to send.
        self._spans: deque[bytes] = deque(maxlen=capacity)
        self.listeners: list[Callable[[bool], object]] = []  # are told when recording starts and stops; must be short

    def start(self) -> None:
        """Drops earlier spans and starts recording."""
        self._spans.clear()
        self.started_ns = self.clock()
        self.enabled = True
        self._tell(True)

    def stop(self) -> None:
        """Stops recording; what was recorded stays."""
        self.enabled = False
        self._tell(False)

    def _tell(self, on: bool) -> None:
        for listener in list(self.listeners):
            listener(on)

    def span(
        self, kind: Kind, begin_ns: int, end_ns: int, *, step: int = NONE, bucket: int = NONE,
        slice: int = NONE,  # noqa: A002
        variable: int = NONE, priority: int = NONE, nbytes: int = NONE, rank: int = NONE, pserver: int = NONE,
    ) -> None:  # fmt: skip
        """Adds a span of this process, times by `clock`; callable from any thread."""
        if self.enabled:
            code = _CODES[kind]
            row = _pack(code, begin_ns, end_ns, step, bucket, slice, variable, priority, nbytes, rank, pserver)
            self._spans.append(row)

    def sent(
        self, put_ns: int, taken_ns: int, step: int, bucket: int, index: int, priority: int, nbytes: int, rank: int,
        pserver: int,
    ) -> None:  # fmt: skip
        """A slice has left its queue and is now on the wire.

        Give `rank` or `pserver`, the other end; `put_ns` is UNKNOWN if it was queued before recording began.
        """
        if self.enabled:
            self._spans.append(
                _pack(SENT, put_ns, taken_ns, step, bucket, index, NONE, priority, nbytes, rank, pserver)
            )

    def arrived(self, at_ns: int, step: int, bucket: int, index: int, rank: int, pserver: int) -> None:
        """A slice has arrived from the wire. Give `rank` or `pserver`, the other end."""
        if self.enabled:
            self._spans.append(_pack(ARRIVED, at_ns, at_ns, step, bucket, index, NONE, NONE, NONE, rank, pserver))

    def records(self) -> bytes:
        """All spans so far, and what `sent` and `arrived` have added, as an array of RECORD."""
        return b"".join(self._spans.copy())  # copied at once: others may go on appending

    @property
    def full(self) -> bool:
        """Whether the first spans may have been dropped."""
        return len(self._spans) == self._spans.maxlen
