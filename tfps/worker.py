"""The exchange of a worker with its pservers: slices out, most urgent first; replies back into buckets."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfps.aggregate import split_gathered
from tfps.config import Config, check_address
from tfps.control import PROTOCOL_VERSION, Pserver, failure_of, settings_of
from tfps.errors import (
    ConfigError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
)
from tfps.exchange import (
    BucketSpec,
    FailureListener,
    FailureState,
    OnReply,
    Payload,
    Reply,
    as_bytes,
    check_payload,
    parse_dtype,
)
from tfps.frames import EMPTY, LAST, Header, Kind
from tfps.memory import aligned_empty, tune_malloc
from tfps.placement import Placer
from tfps.protos import tfps_pb2 as pb
from tfps.send_queue import Outgoing, SendQueue
from tfps.slicing import Slice, cut
from tfps.stream import WorkerStream
from tfps.trace import Recorder

_LEAVE_TIMEOUT_S = 2.0
_ANSWER_MARGIN_S = 10.0  # how much later than the pserver's own deadline a call gives up


@dataclass(slots=True)
class _Push:
    """One contribution to a bucket, from `push` until its reply."""

    payload: memoryview | None
    on_reply: OnReply
    step: int = 0
    started_s: float = 0.0
    buffer: NDArray[np.uint8] | None = None  # a sum's result
    arrived: set[int] = field(default_factory=set)  # slices of a sum
    copied: int = 0
    pieces: list[memoryview] = field(default_factory=list)  # a gather's result


@dataclass(slots=True)
class _Bucket:
    """A declared bucket: `owners[i]` is the pserver of slice i (a gather has only owners[0])."""

    spec: BucketSpec
    slices: list[Slice]
    owners: list[int]
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below
    steps: int = 0
    current: _Push | None = None
    waiting: deque[_Push] = field(default_factory=deque)


class Worker:
    """A member of a job on all its pservers. See `Exchange`.

    The constructor returns when all workers have joined. Per pserver one of gRPC's threads sends and "tfps-recv-<i>"
    receives and calls `on_reply`; "tfps-watch" looks after deadlines.

    Args:
        pservers: `host:port` of each, in the same order for every worker.
        rank: None for the order of joining.
        workers: None to take the number that the pservers were started with.
        job: name of the job; a pserver serves one at a time.

    Raises:
        ConfigError: an address is malformed, or rank and workers contradict each other.
        ConnectError: a pserver cannot be reached or refuses this worker; the message names it.
        MismatchError: the settings differ between workers.
        WaitTimeoutError: names the ranks that did not join within `config.connect_timeout_s`.
    """

    def __init__(
        self,
        pservers: Sequence[str],
        *,
        rank: int | None = None,
        workers: int | None = None,
        job: str = "",
        config: Config | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if not pservers or len(set(pservers)) != len(pservers):
            raise ConfigError(f"pservers must be different addresses, at least one, got {list(pservers)}")
        addresses = [check_address(address) for address in pservers]
        tune_malloc()
        self.config = config = config or Config()
        self.rank, self.workers = -1 if rank is None else rank, workers or 0
        self._recorder = recorder or Recorder()
        self._state = FailureState()
        self._buckets: list[_Bucket] = []
        self._declaring = threading.Lock()  # one declaration after the other
        self._declarations = 0
        self._placer = Placer(len(addresses), config.placement)
        self._token = ""
        self._step = 0  # for messages
        self._farewell: TfpsError | None = None  # what the pservers are told why this worker failed
        self._leaving = threading.Lock()  # guards _left
        self._left = False
        self._wake = threading.Event()  # set by a failure and by close
        self._pservers = [Pserver(address) for address in addresses]
        self._queues = [
            SendQueue(
                config.window_bytes, config.policy, piggyback=True, recorder=self._recorder, name=f"pserver {address}"
            )
            for address in addresses
        ]
        self._streams = [self._stream(index) for index in range(len(addresses))]
        self._watch = threading.Thread(target=self._watch_deadlines, name="tfps-watch", daemon=True)
        try:
            self._join(job)
        except BaseException as error:
            self.fail(error if isinstance(error, TfpsError) else TfpsError(f"joining failed: {error!r}"))
            self.close()
            raise
        self._watch.start()

    @property
    def failure(self) -> TfpsError | None:
        return self._state.failure

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._state.add_listener(listener)

    # Joining and leaving

    def _stream(self, index: int) -> WorkerStream:
        return WorkerStream(
            self._pservers[index],
            index,
            self._queues[index],
            on_data=lambda header, payload: self._take_reply(index, header, payload),
            on_end=self._fail,
            when=lambda: f"at step {self._step}",
        )

    def _join(self, job: str) -> None:
        deadline = time.monotonic() + self.config.connect_timeout_s
        request = pb.JoinRequest(
            protocol_version=PROTOCOL_VERSION,
            job=job,
            rank=self.rank,
            workers=self.workers,
            uid=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            pservers=len(self._pservers),
            settings=settings_of(self.config),
        )
        for index, pserver in enumerate(self._pservers):
            request.pserver_index = index
            reply = pserver.join(request, max(deadline - time.monotonic(), 0.1))
            self._streams[index].start(reply.token, reply.rank)
            self.rank = request.rank = reply.rank
            self.workers = request.workers = reply.workers
            self._token = request.token = reply.token
        self._declare_everywhere([], [], max(deadline - time.monotonic(), 0.1))

    def close(self) -> None:
        if not self._state.close():
            return
        self._end_pushes()
        self._wake.set()
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join()  # it may still be telling the pservers of a failure
        self._leave()
        for stream in self._streams:
            stream.close()
        for pserver in self._pservers:
            pserver.close()

    def _leave(self) -> None:
        """Tells every pserver, once; one that cannot be reached any more will notice by itself."""
        with self._leaving:
            first, self._left = not self._left, True
        if not first:
            return
        farewell = None if self._farewell is None else failure_of(self._farewell)
        for pserver in self._pservers:
            if self._token:
                request = pb.LeaveRequest(token=self._token, rank=self.rank, failure=farewell)
                try:
                    pserver.call("Leave", request, _LEAVE_TIMEOUT_S)
                except TfpsError:
                    continue

    def fail(self, error: TfpsError) -> None:
        self._fail(error, told=False)

    def _fail(self, error: TfpsError, told: bool) -> None:
        """Fails with `error`, which a pserver has told to all workers, or which only this worker knows of."""
        if self._farewell is None:
            who = f"rank {self.rank} ({socket.gethostname()}:{os.getpid()})"
            self._farewell = error if told else type(error)(f"{who} failed: {error}")
        if self._state.fail(error):
            self._end_pushes()
            self._wake.set()

    def _end_pushes(self) -> None:
        """Answers all outstanding pushes with the reason of the end."""
        error = self._state.end
        for bucket in list(self._buckets):
            with bucket.lock:
                pushes = [push for push in (bucket.current, *bucket.waiting) if push is not None]
                bucket.current = None
                bucket.waiting.clear()
            for push in pushes:
                push.on_reply(Reply(error=error))

    def _check_open(self) -> None:
        if (end := self._state.end) is not None:
            raise end

    # Declaring

    def declare(self, specs: Sequence[BucketSpec], details: Sequence[str] = ()) -> list[int]:
        with self._declaring:
            self._check_open()
            try:
                self._declare_everywhere(specs, details, self.config.step_timeout_s)
            except TfpsError as error:
                self._fail(error, told=not isinstance(error, (PserverLostError, WaitTimeoutError)))
                raise
            first = len(self._buckets)
            self._buckets.extend(map(self._new_bucket, specs))
            return list(range(first, len(self._buckets)))

    def _declare_everywhere(self, specs: Sequence[BucketSpec], details: Sequence[str], timeout_s: float) -> None:
        request = pb.DeclareRequest(
            token=self._token,
            rank=self.rank,
            number=self._declarations,
            details=details,
            buckets=[
                pb.Bucket(**{field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)})
                for spec in specs
            ],
            timeout_s=timeout_s,
        )
        for pserver in self._pservers:
            try:
                pserver.call("Declare", request, timeout_s + _ANSWER_MARGIN_S)
            except WaitTimeoutError as error:
                raise WaitTimeoutError(f"pserver {pserver.address}: {error}") from None
        self._declarations += 1

    def _new_bucket(self, spec: BucketSpec) -> _Bucket:
        if spec.kind == "gather":
            return _Bucket(spec, [], [self._placer.place_gather(spec.name)])
        slices = cut(spec.nbytes, self.config.slice_bytes, parse_dtype(spec.dtype).itemsize)
        return _Bucket(spec, slices, self._placer.place(spec.name, [s.nbytes for s in slices], spec.occasional))

    # Pushing

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply) -> None:
        view = as_bytes(payload)
        if not 0 <= bucket < len(self._buckets):
            raise ProtocolError(f"bucket must be one of the {len(self._buckets)} declared ones, got {bucket}")
        target = self._buckets[bucket]
        check_payload([target.spec], 0, None if view is None else view.nbytes)
        with target.lock:
            # Under the lock: a failure either is seen here or sees this push.
            if (end := self._state.end) is None:
                target.waiting.append(_Push(view, on_reply))
                self._start_next(bucket, target)
        if end is not None:
            on_reply(Reply(error=end))

    def _start_next(self, number: int, bucket: _Bucket) -> None:
        """Sends the oldest waiting push if none is outstanding. The caller holds the bucket's lock."""
        if bucket.current is not None or not bucket.waiting:
            return
        bucket.current = push = bucket.waiting.popleft()
        push.step, push.started_s = bucket.steps, time.monotonic()
        bucket.steps += 1
        self._step = max(self._step, push.step)
        if self._recorder.enabled:
            self._recorder.record("push", bucket=number, step=push.step, priority=bucket.spec.priority)
        shards: list[list[Outgoing]] = [[] for _ in self._queues]
        for index, piece, flags in _pieces(bucket, push.payload, self.config.slice_bytes):
            header = Header(Kind.PUSH, flags, number, index, bucket.spec.priority, push.step)
            payload = None if push.payload is None else push.payload[piece.offset : piece.offset + piece.nbytes]
            owner = bucket.owners[index if bucket.spec.kind == "sum" else 0]
            shards[owner].append(Outgoing(header, 0 if payload is None else piece.nbytes, payload))
        for queue, items in zip(self._queues, shards, strict=True):
            if items:
                queue.put(items)

    # Replies; on the receiver threads

    def _take_reply(self, pserver: int, header: Header, payload: memoryview) -> None:
        if not 0 <= header.bucket < len(self._buckets):
            raise ProtocolError(f"bucket must be one of the {len(self._buckets)} declared ones, got {header.bucket}")
        bucket = self._buckets[header.bucket]
        if self._recorder.enabled:
            bucket_index = {"bucket": header.bucket, "index": header.index}
            self._recorder.record("reply", **bucket_index, step=header.step, nbytes=len(payload))
        take = self._take_slice if bucket.spec.kind == "sum" else self._take_piece
        with bucket.lock:
            push = bucket.current
            if push is None:
                if self._state.end is not None:
                    return
                raise ProtocolError(f"a reply of bucket '{bucket.spec.name}' must follow a push, got one without")
            if header.step != push.step:
                raise ProtocolError(f"step of bucket '{bucket.spec.name}' must be {push.step}, got {header.step}")
        reply = take(pserver, bucket, push, header, payload)
        if reply is None:
            return
        with bucket.lock:
            if bucket.current is not push:
                return  # a failure has replied to it meanwhile
            bucket.current = None
            self._start_next(header.bucket, bucket)
        if self._recorder.enabled:
            self._recorder.record("pulled", bucket=header.bucket, step=header.step)
        push.on_reply(reply)

    def _take_slice(
        self, pserver: int, bucket: _Bucket, push: _Push, header: Header, payload: memoryview
    ) -> Reply | None:
        name, index = bucket.spec.name, header.index
        if not 0 <= index < len(bucket.slices) or bucket.owners[index] != pserver:
            raise ProtocolError(f"bucket '{name}' has no slice {index} on this pserver")
        where = bucket.slices[index]
        if len(payload) != where.nbytes:
            raise ProtocolError(f"slice {index} of bucket '{name}' must have {where.nbytes} bytes, got {len(payload)}")
        with bucket.lock:
            if index in push.arrived:
                raise ProtocolError(f"slice {index} of bucket '{name}' must be replied to once, got it twice")
            push.arrived.add(index)
            if push.buffer is None:
                push.buffer = aligned_empty(bucket.spec.nbytes)
        np.copyto(push.buffer[where.offset : where.offset + where.nbytes], np.frombuffer(payload, np.uint8))
        with bucket.lock:
            push.copied += 1
            return Reply(sum=push.buffer) if push.copied == len(bucket.slices) else None

    def _take_piece(
        self, pserver: int, bucket: _Bucket, push: _Push, header: Header, payload: memoryview
    ) -> Reply | None:
        if bucket.owners[0] != pserver or header.index != len(push.pieces):
            raise ProtocolError(
                f"piece {len(push.pieces)} of bucket '{bucket.spec.name}' must come next, got {header.index}"
            )
        push.pieces.append(payload)
        if not header.flags & LAST:
            return None
        result = push.pieces[0] if len(push.pieces) == 1 else memoryview(b"".join(push.pieces))
        return Reply(parts=list(split_gathered(result, self.workers)))

    # Deadlines

    def _watch_deadlines(self) -> None:
        limit_s = self.config.step_timeout_s
        while not self._wake.wait(min(1.0, limit_s / 4)):
            for number, bucket in enumerate(list(self._buckets)):
                with bucket.lock:
                    push = bucket.current
                if push is not None and time.monotonic() - push.started_s > limit_s:
                    self.fail(self._timeout(number, bucket, push))
                    break
        if self._state.failure is not None:
            self._leave()
            for queue in self._queues:
                queue.close()

    def _timeout(self, number: int, bucket: _Bucket, push: _Push) -> TfpsError:
        """The error of a push that has waited too long, with the ranks it waits for."""
        what = f"bucket '{bucket.spec.name}' step {push.step}: no result within {self.config.step_timeout_s:.3g} s"
        with bucket.lock:
            owners = sorted({o for i, o in enumerate(bucket.owners) if i not in push.arrived})
        request = pb.WaitingRequest(token=self._token, rank=self.rank, bucket=number)
        blame = []
        for pserver in (self._pservers[owner] for owner in owners):
            try:
                missing = self.call_waiting(pserver, request)
            except TfpsError as error:
                blame.append(str(error))
            else:
                blame.append(f"pserver {pserver.address} waits for {missing or 'nobody: its replies do not arrive'}")
        return WaitTimeoutError(f"{what}; {'; '.join(blame)}")

    @staticmethod
    def call_waiting(pserver: Pserver, request: object) -> str:
        return ", ".join(pserver.call("Waiting", request, 5.0).missing)


def _pieces(bucket: _Bucket, payload: memoryview | None, slice_bytes: int) -> list[tuple[int, Slice, int]]:
    """Index, range and flags of every frame of a push."""
    empty = EMPTY if payload is None else 0
    if bucket.spec.kind == "sum":
        return [(index, piece, empty) for index, piece in enumerate(bucket.slices)]
    pieces = cut(0 if payload is None else len(payload), slice_bytes)
    last = len(pieces) - 1
    return [(index, piece, empty | (LAST if index == last else 0)) for index, piece in enumerate(pieces)]
