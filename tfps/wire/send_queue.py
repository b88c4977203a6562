"""The send queue of one direction of one stream: most urgent first, bytes in flight limited by a window."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tfps.config import Policy
from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.codecs import Bytes, Codec, Floats
from tfps.exchange.parameter_shard import Delta
from tfps.trace.capture import NONE
from tfps.trace.recorder import UNKNOWN, Recorder
from tfps.wire.frames import Header, encode
from tfps.wire.shared_memory import Target
from tfps.wire.upcoming import Upcoming

LEAST_S = 0.02  # shorter measurements say nothing
SILENT_S = 5.0  # without a sign of life; the other end sends a heartbeat every second
_MAX_PARTS = 64  # per call of `take_parts`
# Over a data connection an ACK is due after so many, if no frame carries the receipt. Several in a step tell the rate.
_RECEIPT_BYTES = 2**20


class Encoding:
    """The encoded bytes of `values`, made once, when the first sender comes to them; any thread.

    So what waits in a queue costs nothing yet, and the residual is counted once, however often the bytes are sent.
    `failed` gets an error of encoding, such as a MemoryError, and returns what to raise instead.
    """

    __slots__ = ("_data", "_encode", "_error", "_failed", "_lock", "nbytes")

    def __init__(
        self,
        encoder: Codec | Delta,
        values: Floats,
        residual: Floats | None,
        failed: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self.nbytes = encoder.wire_bytes(values.size)
        self._failed = failed
        self._lock = threading.Lock()  # guards what is below, and `residual`
        self._encode: Callable[[], Bytes] | None = functools.partial(encoder.encode, values, residual)
        self._data = memoryview(b"")
        self._error: Exception | None = None

    @property
    def made(self) -> bool:
        """Whether `data` returns at once."""
        return self._encode is None

    def data(self) -> memoryview:
        """The bytes; makes them if nobody has."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._encode is not None:
                try:
                    self._data = self._encode().data
                except Exception as error:
                    self._error = self._failed(error)
                    if self._error is error:
                        raise
                    raise self._error from error
                self._encode = None  # frees the memory
            return self._data


class Outgoing(NamedTuple):
    """A frame to send: header and `payload` of `nbytes`, or what makes it, or everything already encoded."""

    header: Header
    nbytes: int
    payload: memoryview | None = None
    frame: bytes | None = None
    target: Target | None = None
    encoding: Encoding | None = None


class Next(NamedTuple):
    """What to send next: bytes `begin` to `end` of `item`'s payload, or an urgent encoded frame; None: a receipt."""

    item: Outgoing | bytes | None
    received: int = 0
    begin: int = 0
    end: int = 0


Entry = tuple[int, int, Outgoing, int, int]  # priority, arrival, frame, when put (if recorded), payload bytes taken


class Run(NamedTuple):
    """Several parts of a frame, `part_bytes` each, that may be sent one by one; `entry`: its place in a queue."""

    parts: Next
    part_bytes: int
    entry: Entry


class Throughput(NamedTuple):
    """Bytes and the seconds they took."""

    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0.0 if it was too short to say."""
        return self.nbytes / self.seconds if self.seconds >= LEAST_S else 0.0


class Load(NamedTuple):
    """Totals of data frames and their payload in both directions, and what is queued or in flight."""

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
    stream began. One sender takes; any thread may call anything else. The other end is `rank` or `pserver`.

    With `piggyback` data frames carry receipts. Where they cannot (a reply's bytes are the same for all ranks, unless
    in shared memory) or none goes out, an ACK is due for every half window received, on a connection for every 1 MiB.
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
        self._by_priority = policy == "priority"
        self._piggyback = piggyback
        self._recorder, self._rank, self._pserver = recorder, rank, pserver
        self.on_connection = False  # whether it feeds a data connection, whose socket limits what is in flight
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)  # notified when `take` may have something to give
        self._urgent: deque[bytes] = deque()  # frames outside the window, before all others
        self._heap: list[Entry] = []
        self.overtaken = bytearray(1)  # 1: something more urgent has come since a run of parts was given out
        self._running = -1  # priority of that run; nothing is more urgent than -1
        self._upcoming = Upcoming()
        self._arrivals = itertools.count()
        self._sent = self._acked = self._received = self._receipted = 0
        self._sent_slices = self._received_slices = 0
        self._receipt_s = 0.0  # when the last receipt came
        self._sent_then = 0  # what had been sent by then
        self._backlog = False  # whether frames have been waiting since then
        self._busy = Throughput()
        self._closed = False
        self._failure: TfpsError | None = None
        self._heard_s = time.monotonic()  # written and read without the lock
        self._when_over: Callable[[], object] = lambda: None

    def when_over(self, call: Callable[[], object]) -> None:
        """Has `call` called once nothing more can be put: at once if that is so."""
        with self._lock:
            over = self._closed or self._failure is not None
            if not over:
                self._when_over = call
        if over:
            call()

    def heard(self) -> None:
        """Notes a sign of life of the other end."""
        self._heard_s = time.monotonic()

    def silent_s(self, *, renew: bool = False) -> float:
        """Seconds since the last sign of life; `renew`: counts from now on."""
        if renew:
            self.heard()
        return time.monotonic() - self._heard_s

    def put(self, items: Iterable[Outgoing]) -> None:
        """Adds frames; those of equal priority keep their order. Ignored after `close` and `fail`."""
        put_ns = self._recorder.clock() if self._recorder.enabled else UNKNOWN
        with self._lock:
            if self._closed or self._failure is not None:
                return
            for item in items:
                priority = item.header.priority if self._by_priority else 0
                heapq.heappush(self._heap, (priority, next(self._arrivals), item, put_ns, 0))
                self._upcoming.put(item.header)
                if priority < self._running:
                    self.overtaken[0] = 1
            if self._may_send():
                self._changed.notify()

    def put_urgent(self, frame: bytes) -> None:
        """Adds an encoded frame outside the window, which leaves next. Ignored after `close` and `fail`."""
        with self._lock:
            if not self._closed and self._failure is None:
                self._urgent.append(frame)
                self.overtaken[0] = 1
                self._changed.notify()

    def use_connection(self) -> None:
        """Switches to a data connection, where every frame carries a receipt."""
        with self._lock:
            self._piggyback = self.on_connection = True
            self._receipt_bytes = _RECEIPT_BYTES
            self._changed.notify()

    @property
    def waiting(self) -> bool:
        """Whether a frame waits, over a data connection; may have changed when it returns."""
        return bool(self._heap)

    def set_window(self, window_bytes: int) -> None:
        """Changes the window from now on. The other end must do so too: receipts come per half window."""
        with self._lock:
            self._window_bytes = window_bytes
            if not self.on_connection:
                self._receipt_bytes = max(window_bytes // 2, 1)
            self._changed.notify()

    @property
    def throughput(self) -> Throughput:
        """What the other end has received while there was always something to send."""
        with self._lock:
            return self._busy

    @property
    def load(self) -> Load:
        with self._lock:
            return Load(
                self._sent_slices,
                self._sent,
                self._received_slices,
                self._received,
                len(self._heap),
                self._sent - self._acked,
                self._window_bytes,
                *self._busy,
            )

    def take(self) -> Next | None:
        """Waits for the next whole frame or receipt; None once closed. Raises what `fail` was called with."""
        with self._lock:
            return self._next(None) if self._wait() else None

    def take_parts(self, limit: int) -> list[Next] | None:
        """Waits, then gives out all that is ready, up to `limit` payload bytes, at least one part. None once closed.

        The rest of a frame follows in a later call, after anything more urgent. Shared-memory frames stay whole.
        """
        with self._lock:
            if not self._wait():
                return None
            taken, left = [self._next(limit)], limit
            while (left := left - (taken[-1].end - taken[-1].begin)) > 0 and len(taken) < _MAX_PARTS and self._ready():
                taken.append(self._next(left))
            return taken

    @property
    def settled(self) -> bool:
        """Whether nothing more urgent than what comes next is expected in its step."""
        with self._lock:
            return bool(self._heap) and not (self._by_priority and self._upcoming.before(self._heap[0][2].header))

    def take_run(self, small: int, large: int, most: int) -> Run | None:
        """Gives out up to `most` parts of the next frame at once; None if it is not larger than a part.

        A part is `small`, or `large` where nothing more urgent is expected. They may be sent one by one until
        `overtaken` is set. Then, or after all of them, `ran` must be called.
        """
        with self._lock:
            if self._closed or self._failure is not None or self._urgent or not self._heap:
                return None
            priority, _, item, _, begin = entry = self._heap[0]
            if item.target is not None or item.nbytes - begin <= small:
                return None
            self.overtaken[0], self._running = 0, priority
            part_bytes = large if self.settled else small
            parts = self._next(most * part_bytes)
            if parts.end < item.nbytes:
                heapq.heappop(self._heap)
            return Run(parts, part_bytes, entry)

    def ran(self, run: Run, reached: int) -> None:
        """The bytes of `run` up to `reached` have been sent; the rest keeps its place in the order."""
        priority, arrival, item, put_ns, _ = run.entry
        with self._lock:
            self._running = -1
            self._sent -= run.parts.end - reached
            if reached < item.nbytes and not self._closed and self._failure is None:
                heapq.heappush(self._heap, (priority, arrival, item, put_ns, reached))

    def prepare(self) -> None:
        """Encodes the payload that comes next, or after what is being sent; for a sender that has to wait anyway."""
        with self._lock:
            ahead = [item.encoding for _, _, item, *_ in sorted(self._heap[:3])[:2]]
        for encoding in ahead:
            if encoding is not None and not encoding.made:
                encoding.data()
                return

    def wait(self) -> bool:
        """Waits until `take` would not block; False once closed."""
        with self._lock:
            return self._wait()

    def _wait(self) -> bool:
        while not self._closed and self._failure is None and not self._ready():
            self._changed.wait()
        if self._failure is not None:
            raise self._failure
        return not self._closed

    def _ready(self) -> bool:
        return bool(self._urgent) or self._may_send() or self._receipt_due()

    def _receipt_due(self) -> bool:
        return self._received - self._receipted >= self._receipt_bytes

    def _may_send(self) -> bool:
        return bool(self._heap) and (self.on_connection or self._sent - self._acked < self._window_bytes)

    def _next(self, limit: int | None) -> Next:
        if self._urgent:
            return Next(self._urgent.popleft())
        carries = self._may_send() and (self._piggyback or self._heap[0][2].target is not None)
        if self._receipt_due() and not carries:
            self._receipted = self._received
            return Next(None, self._received)
        if carries:
            self._receipted = self._received
        priority, arrival, item, put_ns, begin = self._heap[0]
        nbytes = item.nbytes
        if begin == 0:
            self._sent_slices += 1
            if (recorder := self._recorder).enabled:
                now_ns, (_, _, bucket, index, urgency, step, *_) = recorder.clock(), item.header
                recorder.sent(put_ns, now_ns, step, bucket, index, urgency, nbytes, self._rank, self._pserver)
        end = nbytes if limit is None or item.target is not None else min(begin + limit, nbytes)
        if end == nbytes:
            heapq.heappop(self._heap)
            self._backlog = self._backlog and bool(self._heap)
        else:
            self._heap[0] = priority, arrival, item, put_ns, end  # keeps its place in the order
        self._sent += end - begin
        return Next(item, self._received, begin, end)

    def acked(self, total: int) -> None:
        """The other end has received `total` payload bytes."""
        with self._lock:
            self._take_receipt(total)

    def received(self, nbytes: int, acked: int = 0) -> None:
        """A data frame with `nbytes` of payload has come in from the other end, with the receipt `acked`."""
        with self._lock:
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
        now_s = time.monotonic()
        if self._backlog or total <= self._sent_then:  # since the last one there was always something to send
            nbytes, seconds = total - self._acked, now_s - self._receipt_s
            self._busy = Throughput(self._busy.nbytes + nbytes, self._busy.seconds + seconds)
        self._receipt_s, self._sent_then, self._backlog = now_s, self._sent, bool(self._heap)
        self._acked = total
        if self._may_send() and not self.on_connection:
            self._changed.notify()

    def close(self) -> None:
        """Drops waiting frames and ends the sender."""
        with self._lock:
            over = self._closed or self._failure is not None
            self._closed = True
            self._heap.clear()
            self.overtaken[0] = 1
            self._changed.notify_all()
        if not over:
            self._when_over()

    def fail(self, error: TfpsError) -> None:
        """Drops waiting frames and raises `error` in the sender. Ignored after `close` or an earlier `fail`."""
        with self._lock:
            if self._closed or self._failure is not None:
                return
            self._failure = error
            self._heap.clear()
            self.overtaken[0] = 1
            self._changed.notify_all()
        self._when_over()


def put_in_all(queues: Iterable[SendQueue], parts: Sequence[tuple[Header, memoryview]]) -> None:
    """Adds frames of these headers and payloads to each queue; for those that gRPC empties they are encoded once."""
    encoded: list[Outgoing] = []
    for queue in queues:
        if queue.on_connection:
            queue.put([Outgoing(header, len(payload), payload) for header, payload in parts])
        else:
            encoded = encoded or [Outgoing(h, len(payload), frame=encode(h, payload)) for h, payload in parts]
            queue.put(encoded)
