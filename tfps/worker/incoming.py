"""Handles one pserver's frames on a worker: passes replies to waiting buckets.

Tested in tests/worker/test_worker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfps.errors import ProtocolError
from tfps.exchange.interface import FailureState
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import SHARED, Header, Kind
from tfps.wire.shared_memory import Place
from tfps.worker.bucket import Push, PushedBucket


class Incoming:
    """A `tfps.wire.stream.Receiver`, used by the thread that receives from this pserver.

    Args:
        buckets: all declared buckets, by number; grows over time.
        workers: returns the job's number of workers, once this one has joined.
        start_next: begins the next push of a bucket; called with the bucket's lock held.
        on_notice: gets every LAYOUT and TRACE.
    """

    def __init__(
        self,
        pserver: int,
        buckets: Sequence[PushedBucket],
        state: FailureState,
        recorder: Recorder,
        workers: Callable[[], int],
        start_next: Callable[[int, PushedBucket], None],
        on_notice: Callable[[int, Header, memoryview], None],
    ) -> None:
        self._pserver, self._buckets, self._state, self._recorder = pserver, buckets, state, recorder
        self._workers, self._start_next, self._on_notice = workers, start_next, on_notice

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        if header.kind != Kind.REPLY or header.flags & SHARED:
            return None
        bucket, push = self._pushed(header)
        return None if push is None else bucket.place(self._pserver, push, header, nbytes)

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        bucket, push = self._pushed(header)
        if self._recorder.enabled:
            now_ns = self._recorder.clock()
            self._recorder.arrived(now_ns, header.step, header.bucket, header.index, NONE, self._pserver)
        if push is None:
            return
        reply = bucket.take(self._pserver, push, header, payload, place, self._workers())
        if reply is None:
            if push.on_part is not None and (begun := bucket.begun(push)) is not None:
                push.on_part(*begun)
            return
        with bucket.lock:
            if bucket.current is not push:
                return  # already answered by a failure
            bucket.current = None
            self._start_next(header.bucket, bucket)
        push.on_reply(reply)

    def notice(self, header: Header, payload: memoryview) -> None:
        self._on_notice(self._pserver, header, payload)

    def _pushed(self, header: Header) -> tuple[PushedBucket, Push | None]:
        """Returns the bucket and push that a reply answers; no push once the exchange has ended.

        Raises:
            ProtocolError: the reply matches no push.
        """
        if not 0 <= header.bucket < len(self._buckets):
            raise ProtocolError(f"bucket must be one of the {len(self._buckets)} declared ones, got {header.bucket}")
        bucket = self._buckets[header.bucket]
        with bucket.lock:
            push = bucket.current
            if push is None:
                if self._state.end is not None:
                    return bucket, None
                raise ProtocolError(f"a reply of bucket '{bucket.spec.name}' must follow a push, got one without")
            if header.step != push.step:
                raise ProtocolError(f"step of bucket '{bucket.spec.name}' must be {push.step}, got {header.step}")
            return bucket, push
