"""A pserver's part in captures: it records, keeps what workers have uploaded, and hands both to rank 0."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from tfps.errors import ClosedError, ProtocolError, TfpsError
from tfps.protos import tfps_pb2 as pb
from tfps.trace.recorder import CAPACITY, RECORD, Recorder
from tfps.wire.control import record_messages

_PART_BYTES = 1024  # that an uploaded part takes beside its bytes
_MOST_UPLOADED = CAPACITY * RECORD.itemsize + 2**20  # bytes of a rank: what its recorder keeps


class Recording:
    """The capture of a job as a pserver sees it; any thread. ClosedError: it is unknown or over."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._changed = threading.Condition()  # guards all below; notified when `collect` may have something to give
        self.number = 0  # of the current capture, until all is collected; 0 if none
        self._runs = False
        self._parts: deque[pb.Records] = deque()
        self._expected: set[int] = set()  # ranks that may still upload
        self._uploaded: dict[int, int] = {}  # bytes of each rank so far
        self._failure: TfpsError | None = None

    def start(self, number: int, uploading: Iterable[int]) -> None:
        """Starts recording; drops an earlier capture. The ranks `uploading` will upload to this pserver."""
        with self._changed:
            self.number, self._runs = number, True
            self._parts.clear()
            self._expected, self._uploaded = set(uploading), {}
            self._recorder.start()
            self._changed.notify_all()

    def stop(self, number: int, index: int) -> None:
        """Stops recording; `index` is this pserver's place in the workers' list."""
        with self._changed:
            self._check(number)
            if self._runs:
                self._runs = False
                self._recorder.stop()
                self._parts.extend(record_messages(self._recorder, pserver=True, number=index))
                self._changed.notify_all()

    def upload(self, number: int, rank: int, part: pb.Records) -> None:
        with self._changed:
            self._check(number)
            if rank not in self._expected or len(part.records) % RECORD.itemsize:
                raise ProtocolError(
                    f"an upload must be of a rank that has not ended its own, in whole records of {RECORD.itemsize} "
                    f"bytes, got {len(part.records)} bytes of rank {rank}"
                )
            uploaded = self._uploaded[rank] = self._uploaded.get(rank, 0) + part.ByteSize() + _PART_BYTES
            if uploaded > _MOST_UPLOADED:
                raise ProtocolError(f"a rank must upload at most {_MOST_UPLOADED} bytes, got {uploaded} of rank {rank}")
            self._parts.append(part)
            if part.last:
                self._expected.discard(rank)
            self._changed.notify_all()

    def collect(self, number: int, timeout_s: float) -> pb.Records | None:
        """Waits for the next part. None ends the capture: all is collected, or the time is up."""
        with self._changed:
            self._check(number)
            self._changed.wait_for(
                lambda: self._parts or not self._expected or self.number != number or self._failure, timeout_s
            )
            self._check(number)
            if self._parts:
                return self._parts.popleft()
            self._end()
            return None

    def departed(self, rank: int) -> int:
        """`rank` has left: stops waiting for its spans. Returns the capture that this ends (if rank 0 left), or 0."""
        with self._changed:
            self._expected.discard(rank)
            ended = self.number if rank == 0 else 0
            if rank == 0:
                self._end()
            self._changed.notify_all()
            return ended

    def fail(self, error: TfpsError) -> None:
        with self._changed:
            self._failure = error
            self._end()
            self._changed.notify_all()

    def _end(self) -> None:
        if self._runs:
            self._recorder.stop()
        self.number, self._runs = 0, False
        self._parts.clear()
        self._expected.clear()

    def _check(self, number: int) -> None:
        if self._failure is not None:
            raise self._failure
        if number != self.number or not number:
            raise ClosedError(f"the pserver does not know capture {number}, or not any more")
