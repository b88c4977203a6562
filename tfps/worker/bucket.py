"""A bucket on its worker: pushes, one outstanding at a time, their compression, and the assembly of replies.

Tested in tests/worker/test_worker.py and tests/worker/test_compression.py.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import split_gathered
from tfps.exchange.codecs import ITEM_BYTES, Floats
from tfps.exchange.interface import BucketSpec, FailureState, OnReply, Reply, declared
from tfps.exchange.layout import Cutting, Placer, Slice, cut, cut_sum
from tfps.membership.view import View
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import EMPTY, LAST, SHARED, UNCODED, Header, Kind, decode_ranks
from tfps.wire.send_queue import Encoding, Outgoing
from tfps.wire.shared_memory import Place, Region, Sharing, aligned_empty

Failed = Callable[[Exception], Exception]


@dataclass(slots=True)
class Push:
    """One contribution to a bucket, until its reply."""

    payload: memoryview | None
    on_reply: OnReply
    uncoded: bool = False  # a residual, or a result that others lack
    step_scalars: bytes = b""
    step: int = 0
    started_s: float = 0.0
    region: Region | None = None  # for slices of pservers on this host; holds the whole result
    buffer: NDArray[np.uint8] | None = None  # a sum's result
    arrived: set[int] = field(default_factory=set)  # slices of a sum
    placed: set[int] = field(default_factory=set)  # the ones received directly into `buffer`
    copied: set[int] = field(default_factory=set)  # the ones whose bytes are in `buffer`
    parts: list[memoryview] = field(default_factory=list)  # a gather's result
    ranks: Collection[int] = ()  # whose pushes are in what has arrived
    partial: bool = False  # whether some slices have other ranks' than others
    without: dict[int, list[int]] = field(default_factory=dict)  # by rank: the slices that lack its push


@dataclass(slots=True)
class PushedBucket:
    """A declared bucket; for a gather, `cutting` has one owner and no slices."""

    spec: BucketSpec
    cutting: Cutting  # of the current push
    everybody: frozenset[int] = frozenset()  # the ranks with which the job was started
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below
    steps: int = 0
    started_s: float = 0.0  # when the last step began
    current: Push | None = None
    waiting: deque[Push] = field(default_factory=deque)
    next: dict[int, Cutting] = field(default_factory=dict)  # by the first step that uses it
    hold_at: int | None = None  # a step that may not start yet
    # What the codec could not express yet, if it feeds that back: of all numbers, as slices may be cut anew. A slice is
    # encoded for one step after the other: its reply has come before the next push begins.
    residual: Floats | None = None
    # The residual from before each of the last two pushes, by step, if they may be pushed again; else None.
    before: dict[int, Floats] | None = None
    first: int = 0  # step of this job, which may go on from another one

    @classmethod
    def new(cls, spec: BucketSpec, slice_bytes: int, placer: Placer, view: View) -> PushedBucket:
        """One that has just been declared, for the ranks and pservers of `view`."""
        everybody = frozenset(range(view.workers))
        if spec.kind == "gather":
            return cls(spec, Cutting([], [placer.place_gather()]), everybody)
        feeds_back = spec.codec is not None and spec.codec.feeds_back
        residual = np.zeros(spec.nbytes // ITEM_BYTES, np.float32) if feeds_back else None
        return cls(spec, cut_sum(spec, slice_bytes, placer), everybody, residual=residual)

    @property
    def uncoded_residual(self) -> memoryview | None:
        """What the codec could not express yet, for a push: it stays so until the reply. None: no feedback."""
        return None if self.residual is None else self.residual.view(np.uint8).data

    @property
    def is_atomic(self) -> bool:
        """Whether all slices must have the same ranks' pushes: not gradients, of which a lost rank's parts count."""
        return self.spec.kind == "sum" and self.spec.occasional and self.spec.update is None

    def start_next(self) -> Push | None:
        """Starts and returns the oldest waiting push, if none is outstanding and it may start. Caller holds lock."""
        if self.current is not None or not self.waiting or self.steps == self.hold_at:
            return None
        self.cutting = self.next.pop(self.steps, self.cutting)
        self.current = push = self.waiting.popleft()
        push.step, push.started_s = self.steps, time.monotonic()
        self.started_s = push.started_s
        self.steps += 1
        return push

    def hold(self) -> int | None:
        """Returns the first step that all ranks can cut anew and holds back the one before; None if too early."""
        with self.lock:
            # After two steps all ranks know the bucket. No other worker can be past the next step.
            if self.steps < self.first + 2 or self.next:
                return None
            self.hold_at = self.steps + 1
            return self.steps + 2

    def frames(
        self, number: int, push: Push, piece_bytes: int, memory: Sharing, failed: Failed
    ) -> Iterator[tuple[int, Outgoing]]:
        """Yields pserver and frame for each message of `push`; a gather is cut into `piece_bytes`.

        `number` is this bucket's; `failed` as for `Encoding`.
        """
        codec, owners, is_sum = self.spec.codec, self.cutting.owners, self.spec.kind == "sum"
        if self.before is not None and self.residual is not None:
            self.before.pop(push.step - 2, None)
            self.before[push.step] = self.residual.copy()
        if push.uncoded:
            codec = None
        elif codec is None and is_sum and memory.arena and memory.pservers.intersection(owners):
            push.region = memory.arena.allocate(self.spec.nbytes)
        payload = push.payload
        if not self.is_atomic:  # else it may be pushed again
            push.payload = None
        flags = (EMPTY if payload is None else 0) | (UNCODED if push.uncoded else 0)
        slices = self.cutting.slices if is_sum else cut(0 if payload is None else len(payload), piece_bytes)
        for index, piece in enumerate(slices):
            first, end = piece.offset, piece.offset + piece.nbytes
            owner = owners[index if is_sum else 0]
            own = flags if is_sum or index < len(slices) - 1 else flags | LAST
            header = Header(Kind.PUSH, own, number, index, self.spec.priority, push.step)
            part = None if payload is None else payload[first:end]
            if codec is not None and part is not None:
                residual = None if self.residual is None else self.residual[first // ITEM_BYTES : end // ITEM_BYTES]
                encoding = Encoding(codec, np.frombuffer(part, np.float32), residual, failed)
                yield owner, Outgoing(header, encoding.nbytes, encoding=encoding)
                continue
            target = None
            if push.region is not None and owner in memory.pservers:
                target = push.region.target(piece.offset, piece.nbytes)
            yield owner, Outgoing(header, 0 if part is None else piece.nbytes, part, target=target)

    def memory(self, incoming: Incoming, header: Header, nbytes: int) -> memoryview | None:
        """Where to receive a slice of a reply; None for a gather, which keeps its pieces, and for what is encoded."""
        if (push := self._answered_by(incoming, header)) is None or self.spec.kind != "sum":
            return None
        where = self._where(incoming.pserver, header, nbytes)
        if self.spec.codec is not None and not header.flags & UNCODED:
            return None
        out = self._arrives(push, header.index, where)
        push.placed.add(header.index)
        return out.data

    def take(
        self,
        pserver: int,
        push: Push,
        header: Header,
        payload: memoryview,
        place: Place | None,
        ranks: Collection[int] = (),
    ) -> Reply | None:
        """Takes one frame of the reply to `push`, or what is at its `place`; returns the reply once complete.

        `ranks`: whose pushes are in it.
        """
        if self.spec.kind == "gather":
            if place is not None:
                raise ProtocolError(f"a piece of bucket '{self.spec.name}' must be in its frame, got a place")
            return self._take_piece(pserver, push, header, payload, ranks)
        index, where = header.index, self._where(pserver, header, None if place else len(payload))
        if place is not None:
            expected = None if push.region is None else push.region.place(where.offset, where.nbytes)
            if place != expected:
                raise ProtocolError(f"slice {index} of bucket '{self.spec.name}' must be at {expected}, got {place}")
        if index in push.placed:
            push.placed.remove(index)  # once: a duplicate would not have been placed
        else:
            out = self._arrives(push, index, where)
            codec = self.spec.codec
            if codec is not None and not header.flags & UNCODED:
                codec.decode(np.frombuffer(payload, np.uint8), out.view(np.float32))
            elif place is None:
                np.copyto(out, np.frombuffer(payload, np.uint8))
        with self.lock:
            if not push.copied:
                push.ranks = ranks
            elif ranks != push.ranks:  # those of all slices, so that all workers know the same, whatever comes first
                push.partial, push.ranks = True, tuple(rank for rank in push.ranks if rank in ranks)
            push.copied.add(index)
            for rank in self.everybody.difference(ranks) if len(ranks) < len(self.everybody) else ():
                push.without.setdefault(rank, []).append(index)
            complete = len(push.copied) == len(self.cutting.slices)
            return Reply(sum=push.buffer, ranks=push.ranks, step=push.step) if complete else None

    def receive(self, incoming: Incoming, header: Header, payload: memoryview, place: Place | None) -> None:
        """Takes a frame of a reply, and gives the reply to whoever has pushed once it is complete."""
        if (push := self._answered_by(incoming, header)) is None:
            return
        ranks = incoming.ranks(header)
        if (reply := self.take(incoming.pserver, push, header, payload, place, ranks)) is None:
            return
        again = push.partial and self.is_atomic
        with self.lock:
            if self.current is not push:
                return  # already answered by a failure
            self.current = None
            if again:  # all ranks see the same slices, so all push again
                self.waiting.appendleft(Push(push.payload, push.on_reply))
            incoming.start_next(header.bucket, self)
        if push.without and not self.spec.occasional:
            incoming.on_missing(self, push)
        if not again:
            push.on_reply(reply)

    def _answered_by(self, incoming: Incoming, header: Header) -> Push | None:
        """The push that a reply answers; None once the exchange has ended."""
        with self.lock:
            push = self.current
            if push is None:
                if incoming.ended:
                    return None
                raise ProtocolError(f"a reply of bucket '{self.spec.name}' must follow a push, got one without")
            if header.step != push.step:
                raise ProtocolError(f"step of bucket '{self.spec.name}' must be {push.step}, got {header.step}")
            return push

    def _where(self, pserver: int, header: Header, nbytes: int | None) -> Slice:
        """The slice that a frame has, of `nbytes` unless they are in shared memory."""
        index, codec = header.index, self.spec.codec
        if not 0 <= index < len(self.cutting.slices) or self.cutting.owners[index] != pserver:
            raise ProtocolError(f"bucket '{self.spec.name}' has no slice {index} on this pserver")
        where = self.cutting.slices[index]
        expected = where.nbytes
        if codec is not None and not header.flags & UNCODED:
            expected = codec.wire_bytes(expected // ITEM_BYTES)
        if nbytes is not None and nbytes != expected:
            name = self.spec.name
            raise ProtocolError(f"slice {index} of bucket '{name}' must have {expected} bytes, got {nbytes}")
        return where

    def _arrives(self, push: Push, index: int, where: Slice) -> NDArray[np.uint8]:
        """Notes that a slice arrives; returns the memory for it."""
        with self.lock:
            if index in push.arrived:
                raise ProtocolError(f"slice {index} of bucket '{self.spec.name}' must be replied to once, got it twice")
            push.arrived.add(index)
            if push.buffer is None:
                push.buffer = aligned_empty(self.spec.nbytes) if push.region is None else push.region.array
            return push.buffer[where.offset : where.offset + where.nbytes]

    def _take_piece(
        self, pserver: int, push: Push, header: Header, payload: memoryview, ranks: Collection[int]
    ) -> Reply | None:
        index, expected = header.index, len(push.parts)
        if self.cutting.owners[0] != pserver or index != expected:
            raise ProtocolError(f"piece {expected} of bucket '{self.spec.name}' must come next, got {index}")
        push.parts.append(payload)
        if not header.flags & LAST:
            return None
        result = push.parts[0] if len(push.parts) == 1 else memoryview(b"".join(push.parts))
        return Reply(parts=split_gathered(result, sorted(ranks)), ranks=ranks, step=push.step)


class Incoming:
    """A `tfps.wire.connection.Receiver` for one pserver; calls `start_next` with the bucket's lock held."""

    def __init__(
        self,
        pserver: int,
        buckets: Sequence[PushedBucket],
        state: FailureState,
        recorder: Recorder,
        start_next: Callable[[int, PushedBucket], None],
        on_control: Callable[[int, Header, memoryview], None],
        on_missing: Callable[[PushedBucket, Push], None],
        everybody: Sequence[int],
    ) -> None:
        self.pserver, self.start_next, self.on_missing = pserver, start_next, on_missing
        self._buckets, self._state, self._recorder, self._on_control = buckets, state, recorder, on_control
        self._sets: dict[int, tuple[int, ...]] = {1: tuple(everybody)}  # of ranks, by number; see RankSets

    @property
    def ended(self) -> bool:
        """Whether the exchange has."""
        return self._state.end is not None

    def ranks(self, header: Header) -> tuple[int, ...]:
        """Whose pushes are in a reply."""
        if (ranks := self._sets.get(header.generation)) is None:
            raise ProtocolError(f"generation of a reply must be one that was told (RANKS), got {header.generation}")
        return ranks

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        if header.kind != Kind.REPLY or header.flags & SHARED:
            return None
        return declared(self._buckets, header.bucket).memory(self, header, nbytes)

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        bucket = declared(self._buckets, header.bucket)
        if self._recorder.enabled:
            now_ns = self._recorder.clock()
            self._recorder.arrived(now_ns, header.step, header.bucket, header.index, NONE, self.pserver)
        bucket.receive(self, header, payload, place)

    def control(self, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.RANKS:
            self._sets[header.generation] = decode_ranks(payload)
        else:
            self._on_control(self.pserver, header, payload)
