"""A bucket on its worker: pushes, one outstanding at a time, their compression, and the assembly of replies.

Tested in tests/worker/test_worker.py and tests/worker/test_compression.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import split_gathered
from tfps.exchange.codecs import ITEM_BYTES, Codec, Floats
from tfps.exchange.interface import BucketSpec, FailureState, OnReply, Reply, declared
from tfps.exchange.layout import Cutting, Placer, Slice, cut, cut_sum
from tfps.membership.view import View
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.types import Array
from tfps.wire import frames
from tfps.wire.frames import EMPTY, LAST, SHARED, WHOLE, Header, Kind
from tfps.wire.send_queue import Encoding, Outgoing, SendQueue
from tfps.wire.shared_memory import Place, Region, Sharing, aligned_empty

Failed = Callable[[Exception], Exception]


class Compression:
    """The codec of one bucket on its worker.

    The residual belongs to a bucket's numbers and not to its slices, so it stays where slices are cut anew. Slices are
    disjoint, and a slice is encoded for one step after the other: its reply has come before the next push begins.

    Args:
        failed: see `Encoding`.

    Attributes:
        residual: what the codec could not express yet, if it feeds that back.
    """

    def __init__(self, codec: Codec, nbytes: int, failed: Failed) -> None:
        self._codec, self._failed = codec, failed
        self.residual: Floats | None = np.zeros(nbytes // ITEM_BYTES, np.float32) if codec.feeds_back else None

    def wire_bytes(self, piece: Slice) -> int:
        """Encoded size of a slice."""
        return self._codec.wire_bytes(piece.nbytes // ITEM_BYTES)

    def encoding(self, payload: memoryview, piece: Slice) -> Encoding:
        """A slice of `payload`, to be encoded when it is sent."""
        first, end = piece.offset // ITEM_BYTES, (piece.offset + piece.nbytes) // ITEM_BYTES
        residual = None if self.residual is None else self.residual[first:end]
        values = np.frombuffer(payload[piece.offset : piece.offset + piece.nbytes], np.float32)
        return Encoding(self._codec, values, residual, self._failed)

    def decode(self, payload: memoryview, out: Array) -> None:
        """Decodes a slice into its bytes of the sum."""
        self._codec.decode(np.frombuffer(payload, np.uint8), out.view(np.float32))

    def copy_residual(self) -> memoryview:
        """The residual as bytes; nothing must be under way."""
        return memoryview(b"") if self.residual is None else self.residual.copy().view(np.uint8).data


@dataclass(slots=True)
class Push:
    """One contribution to a bucket, until its reply."""

    payload: memoryview | None
    on_reply: OnReply
    whole: bool = False  # of the residual, which is not encoded
    numbers: bytes = b""
    view: View = field(init=False)  # in force when it began; its round is of that view
    step: int = 0
    started_s: float = 0.0
    region: Region | None = None  # for slices of pservers on this host; holds the whole result
    buffer: NDArray[np.uint8] | None = None  # a sum's result
    arrived: set[int] = field(default_factory=set)  # slices of a sum
    placed: set[int] = field(default_factory=set)  # the ones received directly into `buffer`
    copied: set[int] = field(default_factory=set)  # the ones whose bytes are in `buffer`
    parts: list[memoryview] = field(default_factory=list)  # a gather's result

    def send_numbers(self, bucket: int, queue: SendQueue) -> None:
        """Puts the step's numbers, if it has any, before the slices into the queue to an owner."""
        if self.numbers:
            header = Header(Kind.SCALARS, bucket=bucket, step=self.step, generation=self.view.generation)
            queue.put_urgent(frames.encode(header, self.numbers))


@dataclass(slots=True)
class PushedBucket:
    """A declared bucket; for a gather, `cutting` has one owner and no slices."""

    spec: BucketSpec
    cutting: Cutting  # of the current push
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below
    steps: int = 0
    started_s: float = 0.0  # when the last step began
    current: Push | None = None
    waiting: deque[Push] = field(default_factory=deque)
    next: dict[int, Cutting] = field(default_factory=dict)  # by the first step that uses it
    hold_at: int | None = None  # a step that may not start yet
    compression: Compression | None = None

    @classmethod
    def new(cls, spec: BucketSpec, slice_bytes: int, placer: Placer, failed: Failed) -> PushedBucket:
        """A bucket that has just been declared; `failed` as for `Encoding`."""
        if spec.kind == "gather":
            return cls(spec, Cutting([], [placer.place_gather()]))
        compression = None if spec.codec is None else Compression(spec.codec, spec.nbytes, failed)
        return cls(spec, cut_sum(spec, slice_bytes, placer), compression=compression)

    def start_next(self, view: View) -> Push | None:
        """Starts and returns the oldest waiting push, if none is outstanding and it may start. Caller holds lock."""
        if self.current is not None or not self.waiting or self.steps == self.hold_at:
            return None
        self.cutting = self.next.pop(self.steps, self.cutting)
        self.current = push = self.waiting.popleft()
        push.view, push.step, push.started_s = view, self.steps, time.monotonic()
        self.started_s = push.started_s
        self.steps += 1
        return push

    def hold(self) -> int | None:
        """Returns the first step that all ranks can cut anew and holds back the one before; None if too early."""
        with self.lock:
            # After two steps all ranks know the bucket. No other worker can be past the next step.
            if self.steps < 2 or self.next:
                return None
            self.hold_at = self.steps + 1
            return self.steps + 2

    def cut_anew(self, cutting: Cutting) -> None:
        """Uses `cutting` from its step on, unless that has begun."""
        with self.lock:
            if self.steps <= cutting.step:
                self.next[cutting.step] = cutting

    def progress(self) -> float:
        """See `Info.progress`."""
        with self.lock:
            push = self.current
            return 1.0 if push is None else len(push.copied) / max(len(self.cutting.slices), 1)

    def drop_pushes(self) -> list[Push]:
        """Removes and returns all pushes."""
        with self.lock:
            pushes = [push for push in (self.current, *self.waiting) if push is not None]
            self.current = None
            self.waiting.clear()
            return pushes

    def pieces(self, payload: memoryview | None, piece_bytes: int) -> list[tuple[int, Slice, int]]:
        """Returns index, range and flags of every frame of a push; a gather is cut into `piece_bytes`."""
        empty = EMPTY if payload is None else 0
        if self.spec.kind == "sum":
            return [(index, piece, empty) for index, piece in enumerate(self.cutting.slices)]
        pieces = cut(0 if payload is None else len(payload), piece_bytes)
        last = len(pieces) - 1
        return [(index, piece, empty | (LAST if index == last else 0)) for index, piece in enumerate(pieces)]

    def frames(self, number: int, push: Push, piece_bytes: int, memory: Sharing) -> Iterator[tuple[int, Outgoing]]:
        """Yields pserver and frame for each message of `push`; `number` is this bucket's."""
        owners, generation = self.cutting.owners, push.view.generation
        compression = self.compression
        if push.whole and compression is not None:
            push.payload, compression = compression.copy_residual(), None
        elif compression is None and self.spec.kind == "sum" and not memory.pservers.isdisjoint(owners):
            push.region = memory.allocate(self.spec.nbytes)
        for index, piece, flags in self.pieces(push.payload, piece_bytes):
            flags |= WHOLE if push.whole else 0
            header = Header(Kind.PUSH, flags, number, index, self.spec.priority, push.step, generation=generation)
            payload = None if push.payload is None else push.payload[piece.offset : piece.offset + piece.nbytes]
            owner = owners[index if self.spec.kind == "sum" else 0]
            if compression is not None and push.payload is not None:
                encoding = compression.encoding(push.payload, piece)
                yield owner, Outgoing(header, encoding.nbytes, encoding=encoding)
                continue
            target = None
            if push.region is not None and owner in memory.pservers:
                target = push.region.target(piece.offset, piece.nbytes)
            yield owner, Outgoing(header, 0 if payload is None else piece.nbytes, payload, target=target)

    def place(self, pserver: int, push: Push, header: Header, nbytes: int) -> memoryview | None:
        """Returns the memory to receive a slice of the reply into; None for a gather, which keeps its pieces, and for
        what has to be decoded.
        """
        if self.spec.kind != "sum":
            return None
        index, where = header.index, self._where(pserver, header.index)
        self._check_size(header, where, nbytes)
        if self._encoded(header):
            return None
        buffer = self._arrives(push, index)
        push.placed.add(index)
        return buffer[where.offset : where.offset + where.nbytes].data

    def take(self, pserver: int, push: Push, header: Header, payload: memoryview, place: Place | None) -> Reply | None:
        """Takes one frame of the reply to `push`; returns the reply once complete.

        Args:
            place: location of the slice if it is not in the payload.
        """
        if self.spec.kind == "sum":
            return self._take_slice(pserver, push, header, payload, place)
        if place is not None:
            raise ProtocolError(f"a piece of bucket '{self.spec.name}' must be in its frame, got a place")
        return self._take_piece(pserver, push, header, payload)

    def _take_slice(
        self, pserver: int, push: Push, header: Header, payload: memoryview, place: Place | None
    ) -> Reply | None:
        index = header.index
        name, where = self.spec.name, self._where(pserver, index)
        if place is not None:
            expected = None if push.region is None else push.region.place(where.offset, where.nbytes)
            if place != expected:
                raise ProtocolError(f"slice {index} of bucket '{name}' must be at {expected}, got {place}")
        else:
            self._check_size(header, where, len(payload))
        if index in push.placed:
            push.placed.remove(index)  # once: a duplicate would not have been placed
        else:
            buffer = self._arrives(push, index)
            if self.compression is not None and self._encoded(header):
                self.compression.decode(payload, buffer[where.offset : where.offset + where.nbytes])
            elif place is None:
                np.copyto(buffer[where.offset : where.offset + where.nbytes], np.frombuffer(payload, np.uint8))
        with self.lock:
            push.copied.add(index)
            return Reply(sum=push.buffer) if len(push.copied) == len(self.cutting.slices) else None

    def _where(self, pserver: int, index: int) -> Slice:
        if not 0 <= index < len(self.cutting.slices) or self.cutting.owners[index] != pserver:
            raise ProtocolError(f"bucket '{self.spec.name}' has no slice {index} on this pserver")
        return self.cutting.slices[index]

    def _encoded(self, header: Header) -> bool:
        return self.compression is not None and not header.flags & WHOLE

    def _check_size(self, header: Header, where: Slice, nbytes: int) -> None:
        compression = None if header.flags & WHOLE else self.compression
        expected = where.nbytes if compression is None else compression.wire_bytes(where)
        if nbytes != expected:
            name = self.spec.name
            raise ProtocolError(f"slice {header.index} of bucket '{name}' must have {expected} bytes, got {nbytes}")

    def _arrives(self, push: Push, index: int) -> NDArray[np.uint8]:
        """Notes that a slice arrives; returns its buffer."""
        with self.lock:
            if index in push.arrived:
                raise ProtocolError(f"slice {index} of bucket '{self.spec.name}' must be replied to once, got it twice")
            push.arrived.add(index)
            if push.buffer is None:
                push.buffer = aligned_empty(self.spec.nbytes) if push.region is None else push.region.array
            return push.buffer

    def _take_piece(self, pserver: int, push: Push, header: Header, payload: memoryview) -> Reply | None:
        if self.cutting.owners[0] != pserver or header.index != len(push.parts):
            raise ProtocolError(
                f"piece {len(push.parts)} of bucket '{self.spec.name}' must come next, got {header.index}"
            )
        push.parts.append(payload)
        if not header.flags & LAST:
            return None
        result = push.parts[0] if len(push.parts) == 1 else memoryview(b"".join(push.parts))
        return Reply(parts=list(split_gathered(result, push.view)))


class Incoming:
    """A `tfps.wire.connection.Receiver`, used by the thread that receives from this pserver.

    Args:
        buckets: all declared buckets, by number; grows over time.
        start_next: begins the next push of a bucket; called with the bucket's lock held.
        on_notice: gets every LAYOUT and TRACE.
    """

    def __init__(
        self,
        pserver: int,
        buckets: Sequence[PushedBucket],
        state: FailureState,
        recorder: Recorder,
        start_next: Callable[[int, PushedBucket], None],
        on_notice: Callable[[int, Header, memoryview], None],
    ) -> None:
        self._pserver, self._buckets, self._state, self._recorder = pserver, buckets, state, recorder
        self._start_next, self._on_notice = start_next, on_notice

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
        reply = bucket.take(self._pserver, push, header, payload, place)
        if reply is None:
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
        """Returns the bucket and push that a reply answers; no push once the exchange has ended."""
        bucket = declared(self._buckets, header.bucket)
        with bucket.lock:
            push = bucket.current
            if push is None:
                if self._state.end is not None:
                    return bucket, None
                raise ProtocolError(f"a reply of bucket '{bucket.spec.name}' must follow a push, got one without")
            push.view.check(header.generation)
            if header.step != push.step:
                raise ProtocolError(f"step of bucket '{bucket.spec.name}' must be {push.step}, got {header.step}")
            return bucket, push
