"""The send queue of one direction of one stream: most urgent first, bytes in flight limited by a window.

A slice may be encoded only when its sender comes to it (`Encoding`): what waits in a queue costs nothing yet.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from tfps.config import Policy
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.codecs import Bytes, Floats
from tfps.trace.capture import NONE
from tfps.trace.recorder import UNKNOWN, Recorder
from tfps.wire.frames import Header, encode
from tfps.wire.shared_memory import Target

LEAST_S = 0.02  # shorter measurements say nothing
_MAX_PARTS = 64  # per call of `take_parts`
_RECEIPT_BYTES = 2**20  # over a data connection an ACK is due after so many, if no frame carries the receipt


class Encoder(Protocol):
    """Makes bytes of numbers: a `Codec`, or a `Change` of parameters."""

    def wire_bytes(self, items: int) -> int:
        """Size of so many encoded numbers."""

    def encode(self, values: Floats, residual: Floats | None = None) -> Bytes:
        """Encodes `values`, which it does not change; see `Codec.encode`."""


class Encoding:
    """The encoded bytes of `values`, made once, by the first thread that asks; any thread.

    However often they are sent, the residual is counted once.

    Args:
        residual: see `Codec.encode`. Nobody else uses it until the encoding is made.
        failed: called with an error of encoding, such as a MemoryError; returns what to raise instead.
    """

    __slots__ = ("_data", "_encoder", "_error", "_failed", "_lock", "_residual", "_values", "nbytes")

    def __init__(
        self,
        encoder: Encoder,
        values: Floats,
        residual: Floats | None,
        failed: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self.nbytes = encoder.wire_bytes(values.size)
        self._encoder, self._residual, self._failed = encoder, residual, failed
        self._values: Floats | None = values
        self._lock = threading.Lock()  # guards what is below, and `residual`
        self._data: memoryview | None = None
        self._error: Exception | None = None

    @property
    def made(self) -> bool:
        """Whether `data` returns at once."""
        return self._data is not None

    def data(self) -> memoryview:
        """The bytes; makes them if nobody has.

        Raises:
            Exception: they could not be made.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._data is None and self._values is not None:
                try:
                    self._data = self._encoder.encode(self._values, self._residual).data
                except Exception as error:
                    self._error = self._failed(error)
                    if self._error is error:
                        raise
                    raise self._error from error
                self._values = self._residual = None  # frees the memory
            return memoryview(b"") if self._data is None else self._data


class Outgoing(NamedTuple):
    """A frame to send: header and `payload`, or everything already encoded in `frame`. `nbytes` is the payload's.

    With `target`, the payload goes there instead of into the frame. With `encoding`, that makes the payload.
    """

    header: Header
    nbytes: int
    payload: memoryview | None = None
    frame: bytes | None = None
    target: Target | None = None
    encoding: Encoding | None = None


class Next(NamedTuple):
    """What to send next: payload bytes `begin` to `end` of `item`, or an urgent encoded frame; None: a receipt (ACK).

    `received` is the total to write into the header.
    """

    item: Outgoing | bytes | None
    received: int = 0
    begin: int = 0
    end: int = 0


class Throughput(NamedTuple):
    """Bytes and the seconds they took."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0.0 if it was too short to say."""
        return self.nbytes / self.seconds if self.seconds >= LEAST_S else 0.0

    def since(self, earlier: Throughput) -> Throughput:
        """What has been added since `earlier`."""
        return Throughput(self.nbytes - earlier.nbytes, self.seconds - earlier.seconds)


class Load(NamedTuple):
    """What a queue carries: totals of data frames and their payload in both directions, and what is queued or in
    flight."""

    sent_slices: int
    sent_bytes: int
    received_slices: int
    received_bytes: int
    queued_slices: int
    in_flight_bytes: int
    window_bytes: int
    busy_bytes: int  # received by the other end while the link was busy,
    busy_s: float  # and how long it was


class SendQueue:
    """Orders outgoing frames by (priority, arrival) and keeps the bytes in flight within the window.

    A payload is in flight from `take` until the other end acknowledges it. The next frame is given out while fewer than
    `window_bytes` are in flight, so at most that plus one slice is. Receipts are totals of payload bytes since the
    stream began. One sender takes; any thread may call anything else.

    Args:
        piggyback: outgoing data frames carry receipts. Where they cannot (a reply's bytes are the same for all ranks,
            unless in shared memory) or none is going out, an ACK is due for every half window received, over a data
            connection for every MiB.
        rank, pserver: the other end of the stream; give one.
    """

    def __init__(
        self,
        window_bytes: int,
        policy: Policy,
        *,
        piggyback: bool,
        recorder: Recorder,
        rank: int = NONE,
        pserver: int = NONE,
    ) -> None:
        self._window_bytes = window_bytes
        self._receipt_bytes = max(window_bytes // 2, 1)
        self._urgent: deque[bytes] = deque()  # frames outside the window, before all others
        self._receipt_s = 0.0  # when the last receipt came
        self._sent_then = 0  # what had been sent by then
        self._backlog = False  # whether frames have been waiting since then
        self._busy = Throughput()
        self._by_priority = policy == "priority"
        self._piggyback = piggyback
        self._windowless = False
        self._recorder = recorder
        self._rank, self._pserver = rank, pserver
        self._changed = threading.Condition()  # guards all below; notified when `take` may have something to give
        # Priority, arrival, frame, when it was put (if recorded), payload bytes taken.
        self._heap: list[tuple[int, int, Outgoing, int, int]] = []
        self._arrivals = itertools.count()
        self._sent = 0
        self._acked = 0
        self._received = 0
        self._receipted = 0
        self._sent_slices = self._received_slices = 0
        self._closed = False
        self._failure: TfpsError | None = None

    def put(self, items: Iterable[Outgoing]) -> None:
        """Adds frames; those of equal priority keep their order. Ignored after `close` and `fail`."""
        put_ns = self._recorder.clock() if self._recorder.enabled else UNKNOWN
        with self._changed:
            if self._closed or self._failure is not None:
                return
            for item in items:
                priority = item.header.priority if self._by_priority else 0
                heapq.heappush(self._heap, (priority, next(self._arrivals), item, put_ns, 0))
            if self._may_send():
                self._changed.notify()

    def put_urgent(self, frame: bytes) -> None:
        """Adds an encoded frame outside the window, which leaves next. Ignored after `close` and `fail`."""
        with self._changed:
            if not self._closed and self._failure is None:
                self._urgent.append(frame)
                self._changed.notify()

    def use_connection(self) -> None:
        """Switches to a data connection: its socket limits what is in flight, and every frame carries a receipt."""
        with self._changed:
            self._piggyback = self._windowless = True
            self._receipt_bytes = _RECEIPT_BYTES
            self._changed.notify()

    @property
    def on_connection(self) -> bool:
        """Whether it feeds a data connection."""
        return self._windowless

    @property
    def waiting(self) -> bool:
        """Whether a frame waits, over a data connection; may have changed when it returns."""
        return bool(self._heap)

    def set_window(self, window_bytes: int) -> None:
        """Changes the window from now on. The other end must do so too: receipts come per half window."""
        with self._changed:
            self._window_bytes = window_bytes
            if not self._windowless:
                self._receipt_bytes = max(window_bytes // 2, 1)
            self._changed.notify()

    @property
    def throughput(self) -> Throughput:
        """What the other end has received while there was always something to send."""
        with self._changed:
            return self._busy

    @property
    def load(self) -> Load:
        """The queue's load now."""
        with self._changed:
            return Load(
                self._sent_slices,
                self._sent,
                self._received_slices,
                self._received,
                len(self._heap),
                self._sent - self._acked,
                self._window_bytes,
                self._busy.nbytes,
                self._busy.seconds,
            )

    def take(self) -> Next | None:
        """Waits for the next whole frame or receipt; None once closed.

        Raises:
            TfpsError: what `fail` was called with.
        """
        with self._changed:
            self._wait()
            return None if self._closed else self._next(None)

    def take_parts(self, limit: int) -> list[Next] | None:
        """Waits, then gives out all that is ready, up to `limit` payload bytes, at least one part. None once closed.

        The rest of a frame follows in a later call, after anything more urgent. Shared-memory frames stay whole.

        Raises:
            TfpsError: what `fail` was called with.
        """
        with self._changed:
            self._wait()
            if self._closed:
                return None
            taken, left = [self._next(limit)], limit
            while (left := left - (taken[-1].end - taken[-1].begin)) > 0 and len(taken) < _MAX_PARTS and self._ready():
                taken.append(self._next(left))
            return taken

    def prepare(self) -> None:
        """Encodes the payload that comes next, or after what is being sent; for a sender that has to wait anyway."""
        with self._changed:
            ahead = [item.encoding for _, _, item, *_ in sorted(self._heap[:3])[:2]]
        for encoding in ahead:
            if encoding is not None and not encoding.made:
                encoding.data()
                return

    def wait(self) -> bool:
        """Waits until `take` would not block; False once closed.

        Raises:
            TfpsError: what `fail` was called with.
        """
        with self._changed:
            self._wait()
            return not self._closed

    def _wait(self) -> None:
        while not self._closed and not self._ready():
            if self._failure is not None:
                raise self._failure
            self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def _ready(self) -> bool:
        return bool(self._urgent) or self._may_send() or self._receipt_due()

    def _receipt_due(self) -> bool:
        return self._received - self._receipted >= self._receipt_bytes

    def _may_send(self) -> bool:
        return bool(self._heap) and (self._windowless or self._sent - self._acked < self._window_bytes)

    def _next(self, limit: int | None) -> Next:
        if self._urgent:
            return Next(self._urgent.popleft())
        carries = self._may_send() and (self._piggyback or self._heap[0][2].target is not None)
        if self._receipt_due() and not carries:
            self._receipted = self._received
            return Next(None, self._received)
        if carries:
            self._receipted = self._received
        return self._take_part(limit)

    def _take_part(self, limit: int | None) -> Next:
        priority, arrival, item, put_ns, begin = self._heap[0]
        if begin == 0:
            self._sent_slices += 1
            if self._recorder.enabled:
                self._record(item, put_ns)
        end = item.nbytes if limit is None or item.target is not None else min(begin + limit, item.nbytes)
        if end == item.nbytes:
            heapq.heappop(self._heap)
            self._backlog = self._backlog and bool(self._heap)
        else:
            self._heap[0] = priority, arrival, item, put_ns, end  # keeps its place in the order
        self._sent += end - begin
        return Next(item, self._received, begin, end)

    def acked(self, total: int) -> None:
        """The other end has received `total` payload bytes.

        Raises:
            ProtocolError: that is more than was sent.
        """
        with self._changed:
            self._take_receipt(total)

    def received(self, nbytes: int, acked: int = 0) -> None:
        """A data frame with `nbytes` of payload has come in from the other end, with the receipt `acked`.

        Raises:
            ProtocolError: as `acked`.
        """
        with self._changed:
            self._received += nbytes
            self._received_slices += 1
            if self._receipt_due():
                self._changed.notify()
            self._take_receipt(acked)

    def _take_receipt(self, total: int) -> None:
        if total <= self._acked:
            if total < self._acked and total != 0:  # 0: a frame that carries no receipt
                raise ProtocolError(f"acknowledged bytes must not decrease from {self._acked}, got {total}")
            return
        if total > self._sent:
            raise ProtocolError(f"acknowledged bytes must be at most the {self._sent} sent, got {total}")
        self._measure(total)
        self._acked = total
        if self._may_send() and not self._windowless:
            self._changed.notify()

    def _measure(self, total: int) -> None:
        """Counts a receipt if there was always something to send since the last one: sent by then, or waiting."""
        now_s = time.monotonic()
        if self._backlog or total <= self._sent_then:
            nbytes, seconds = total - self._acked, now_s - self._receipt_s
            self._busy = Throughput(self._busy.nbytes + nbytes, self._busy.seconds + seconds)
        self._receipt_s, self._sent_then, self._backlog = now_s, self._sent, bool(self._heap)

    def close(self) -> None:
        """Drops waiting frames and ends the sender."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify_all()

    def fail(self, error: TfpsError) -> None:
        """Drops waiting frames and raises `error` in the sender. Ignored after `close` or an earlier `fail`."""
        with self._changed:
            if self._closed or self._failure is not None:
                return
            self._failure = error
            self._heap.clear()
            self._changed.notify_all()

    def _record(self, item: Outgoing, put_ns: int) -> None:
        _, _, bucket, index, priority, step, *_ = item.header
        recorder, nbytes = self._recorder, item.nbytes
        recorder.sent(put_ns, recorder.clock(), step, bucket, index, priority, nbytes, self._rank, self._pserver)


def put_in_all(queues: Iterable[SendQueue], parts: Sequence[tuple[Header, memoryview]]) -> None:
    """Adds frames of these headers and payloads to each queue.

    gRPC sends bytes: for the queues that it empties, frames are encoded once.
    """
    encoded: list[Outgoing] = []
    for queue in queues:
        if queue.on_connection:
            queue.put([Outgoing(header, len(payload), payload) for header, payload in parts])
        else:
            encoded = encoded or [Outgoing(h, len(payload), frame=encode(h, payload)) for h, payload in parts]
            queue.put(encoded)
