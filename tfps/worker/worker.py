"""A worker's exchange with its pservers: sends slices, most urgent first, and puts replies into buckets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tfps.config import Config, Security, check_address
from tfps.errors import ConfigError, InterruptError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import (
    BucketSpec,
    FailureListener,
    FailureState,
    Link,
    OnReply,
    Payload,
    Reply,
    as_bytes,
    check_payload,
    declared,
)
from tfps.exchange.layout import Layout, Placer, cut_anew, tunable
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.trace.capture import Setting
from tfps.trace.recorder import Recorder
from tfps.wire.control import Pserver, layout_of
from tfps.wire.frames import Header, Kind
from tfps.wire.paths import Opening, WorkerStream
from tfps.wire.send_queue import Outgoing, SendQueue
from tfps.wire.shared_memory import Sharing, tune_malloc
from tfps.worker.bucket import Incoming, Push, PushedBucket
from tfps.worker.captures import WorkerCaptures
from tfps.worker.client import PserverClient, WaitLog
from tfps.worker.tuner import Tuner

_REASON_S = 1.0  # in which streams say why a call broke, if the job has failed


class WorkerInfo:
    """The `Info` of a worker. Its attributes change as slices are tuned."""

    embedded = False

    def __init__(
        self,
        client: PserverClient,
        config: Config,
        buckets: Sequence[PushedBucket],
        queues: Sequence[SendQueue],
        memory: Sharing,
    ) -> None:
        self.slice_bytes, self.window_bytes = config.first_slice_bytes, config.first_window_bytes
        self._client, self._config = client, config
        self._buckets, self._queues, self._memory = buckets, queues, memory
        self._cpu_s: list[float] = []  # of each pserver, when training began

    @property
    def run(self) -> str:
        return self._client.membership.run

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory shared with pservers on this host."""
        return self._memory.nbytes

    def owners(self, bucket: int) -> list[int]:
        return list(self._buckets[bucket].cutting.owners)

    def progress(self, bucket: int) -> float:
        return self._buckets[bucket].progress()

    def begin(self) -> None:
        """Notes the pservers' CPU time before the first step; later calls do nothing."""
        self._cpu_s = self._cpu_s or self._client.cpu_s()

    def links(self) -> list[Link]:
        steps = max((bucket.steps for bucket in list(self._buckets)), default=0)
        now_s = self._client.cpu_s() if steps and self._cpu_s else []
        found = []
        for index, (pserver, queue) in enumerate(zip(self._client.pservers, self._queues, strict=True)):
            cpu_s = (now_s[index] - self._cpu_s[index]) / steps if now_s else None
            found.append(Link(pserver.address, queue.throughput.bytes_per_s, cpu_s, index in self._memory.pservers))
        return found

    def settings(self) -> dict[str, Setting]:
        """For captures."""
        sizes: dict[str, Setting] = {"slice_bytes": self.slice_bytes, "window_bytes": self.window_bytes}
        return sizes | {"policy": self._config.policy, "compression": str(self._config.compression)}


class WorkerState:
    """The `State` of a worker's buckets; `push` takes the push of one."""

    def __init__(
        self, client: PserverClient, buckets: Sequence[PushedBucket], push: Callable[[int, Push], None]
    ) -> None:
        self._client, self._buckets, self._push = client, buckets, push
        self.write, self.read = client.write, client.read

    def steps(self, bucket: int) -> int:
        return self._buckets[bucket].steps

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        def take(reply: Reply) -> None:
            if reply.error is None:
                self.set_residual(bucket, np.asarray(reply.sum).view(np.float32))
            on_reply(reply)

        self._push(bucket, Push(None, take, whole=True))

    def set_residual(self, bucket: int, values: Floats) -> None:
        compression = self._buckets[bucket].compression
        if compression is not None and compression.residual is not None:
            compression.residual[...] = values if self._client.membership.rank == 0 else 0


class Worker:
    """A member of a job on all its pservers. See `Exchange`.

    The constructor returns when all workers have joined. Per pserver one of gRPC's threads sends and "tfps-recv-<i>"
    receives and calls `on_reply`; "tfps-deadlines" checks deadlines.

    Args:
        pservers: `host:port` of each, in the same order for every worker.
        rank: None to assign ranks in order of joining.
        workers: None for the number that the pservers were started with.
        job: name of the job; a pserver serves one at a time.

    Raises:
        ConfigError: an address is malformed, rank and workers contradict each other, or a file of the job token or of
            TLS cannot be read.
        ConnectError: a pserver cannot be reached or refuses this worker; the message names it.
        MismatchError: the settings differ between workers.
        WaitTimeoutError: some ranks did not join within `config.connect_timeout_s`; the message names them.
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
        self._recorder = recorder or Recorder()
        self._failures = FailureState()
        self._buckets: list[PushedBucket] = []
        self._declaring = threading.Lock()  # serializes declarations
        self._memory = Sharing(config.shared_memory)
        self._step = 0  # for messages
        self._farewell: TfpsError | None = None  # why this worker failed, for the pservers
        self._leaving = threading.Lock()  # guards _left
        self._left = False
        self._wake = threading.Event()  # set by a failure and by close
        security = Security.of_worker(config)
        self._pservers = [Pserver(address, security) for address in addresses]
        wanted = -1 if rank is None else rank
        self._client = PserverClient(self._pservers, config, self._buckets, self._failures, wanted)
        self._waits = WaitLog(self._client, self._buckets)
        self.peers = self._client
        self.state = WorkerState(self._client, self._buckets, self._push)
        self._queues = [
            SendQueue(config.first_window_bytes, config.policy, piggyback=True, recorder=self._recorder, pserver=index)
            for index in range(len(addresses))
        ]
        self.info = WorkerInfo(self._client, config, self._buckets, self._queues, self._memory)
        self._streams = [
            WorkerStream(address, index, self._queues[index], self._incoming(index), self._fail, self._when)
            for index, address in enumerate(addresses)
        ]
        self._watch = threading.Thread(target=self._watch_deadlines, name="tfps-deadlines", daemon=True)
        try:
            deadline_s = time.monotonic() + config.connect_timeout_s
            self._join(job, workers or 0, deadline_s)
            self._placer = Placer(self.view.pservers, config.placement)
            for pserver in self._pservers:
                pserver.explain = self._explain
            self.captures = WorkerCaptures(self._recorder, self._client, self._buckets, self.info.settings)
            self._tuner = Tuner(config, self._client, self._queues, self._memory, self.tune)
            # Ends when all workers have joined: everything above is built before any frame comes.
            self._client.declare([], [], max(deadline_s - time.monotonic(), 0.1))
        except BaseException as error:
            self.fail(error if isinstance(error, TfpsError) else TfpsError(f"joining failed: {error!r}"))
            self._failures.close()
            self._hang_up()
            raise
        self._watch.start()

    @property
    def rank(self) -> int:
        return self._client.membership.rank

    @property
    def view(self) -> View:
        return self._client.membership.view

    @property
    def failure(self) -> TfpsError | None:
        return self._failures.failure

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._failures.add_listener(listener)

    # Joining and leaving

    def _incoming(self, pserver: int) -> Incoming:
        return Incoming(
            pserver,
            self._buckets,
            self._failures,
            self._recorder,
            self._start_next,
            self._take_notice,
        )

    def _when(self) -> str:
        return f"at step {self._step}"

    def _join(self, job: str, workers: int, deadline_s: float) -> None:
        opening = Opening(self.config.transport, self._when)
        for index, joined in enumerate(self._client.join(job, workers, self._memory, deadline_s)):
            membership = self._client.membership
            path = opening.open(
                self._pservers[index],
                index,
                self._queues[index],
                joined.data_port,
                membership.incarnation,
                membership.rank,
            )
            self._streams[index].start(path)
            if joined.shares_memory:
                self._memory.pservers.add(index)

    def close(self, reason: str = "") -> None:
        if not self._failures.close():
            return
        self._end_pushes()
        self._wake.set()
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join()  # it may still be reporting a failure to the pservers
        self.captures.close(failed=self._failures.failure is not None)
        self._hang_up(reason)

    def _hang_up(self, reason: str = "") -> None:
        """Leaves the job and releases all resources."""
        self._leave(reason)
        for stream in self._streams:
            stream.close()
        for pserver in self._pservers:
            pserver.close()
        self._memory.close()

    def _leave(self, reason: str = "") -> None:
        """Tells every pserver once that this worker leaves, if it has joined any."""
        with self._leaving:
            first, self._left = not self._left, True
        if first:
            self._client.leave(self._farewell, reason)

    def fail(self, error: TfpsError) -> None:
        self._fail(error, told=False)

    def _fail(self, error: TfpsError, told: bool) -> None:
        """Fails with `error`; `told`: it came from a pserver, which told all workers."""
        if self._farewell is None:
            who = f"rank {self.rank} ({socket.gethostname()}:{os.getpid()})"
            self._farewell = error if told else type(error)(f"{who} failed: {error}")
        if self._failures.fail(error):
            self._end_pushes()
            self._wake.set()

    def _end_pushes(self) -> None:
        """Answers all pending pushes with the reason why the exchange ended."""
        error = self._failures.end
        for bucket in list(self._buckets):
            for push in bucket.drop_pushes():
                push.on_reply(Reply(error=error))

    def _explain(self) -> None:
        """Raises the job's own error, if it has failed: streams may say it a moment after a call has broken."""
        if self._wake.wait(_REASON_S):
            self._failures.check()

    # Declaring

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        with self._declaring:
            self._failures.check()
            try:
                self._client.declare(specs, details, self.config.step_timeout_s, stop)
            except InterruptError:
                self._failures.check()  # another rank may have failed the job
                raise
            except TfpsError as error:
                if self._failures.end is None:
                    self._fail(error, told=not isinstance(error, (PserverLostError, WaitTimeoutError)))
                raise
            if self.rank == 0 and any(map(tunable, specs)):
                self._tuner.probe()
            self.info.begin()
            first = len(self._buckets)
            size, placer = self.config.first_slice_bytes, self._placer
            self._buckets.extend(PushedBucket.new(spec, size, placer, self._encoding_failed) for spec in specs)
            return list(range(first, len(self._buckets)))

    def _encoding_failed(self, error: Exception) -> TfpsError:
        """Fails the job on a sender's thread. Pservers are told before it ends, else they report that it has died."""
        failure = TfpsError(f"rank {self.rank}: a slice could not be compressed {self._when()}: {error!r}")
        self._farewell = self._farewell or failure
        self._leave()
        self.fail(failure)
        return failure

    # Tuning

    def tune(self, slice_bytes: int, window_bytes: int) -> None:
        """Recuts all buckets from the step after next on all workers and pservers; changes the window at once.

        For rank 0 only; see Layout in protos/tfps.proto.
        """
        steps = {}
        for number, bucket in enumerate(list(self._buckets)):
            if tunable(bucket.spec) and (step := bucket.hold()) is not None:
                steps[number] = step
        layout = Layout(slice_bytes, window_bytes, steps)
        try:
            self._client.tune(layout)
        except TfpsError as error:
            self.fail(error)
            raise
        self._cut_anew(layout)
        for number in steps:
            bucket = self._buckets[number]
            with bucket.lock:
                bucket.hold_at = None
                self._start_next(number, bucket)

    def _take_notice(self, pserver: int, header: Header, payload: memoryview) -> None:
        """Handles a TRACE or a layout: the first pserver's layout recuts the buckets, each sets its own window."""
        self.view.check(header.generation)
        if header.kind == Kind.TRACE:
            self.captures.take(header)
            return
        layout = layout_of(pb.Layout.FromString(bytes(payload)))
        self._cut_anew(layout)
        self._queues[pserver].set_window(layout.window_bytes)

    def _cut_anew(self, layout: Layout) -> None:
        self.info.slice_bytes, self.info.window_bytes = layout.slice_bytes, layout.window_bytes
        specs = [bucket.spec for bucket in list(self._buckets)]
        for number, cutting in cut_anew(specs, layout, self.view.pservers, self.config.placement).items():
            self._buckets[number].cut_anew(cutting)

    # Pushing

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        self._push(bucket, Push(as_bytes(payload), on_reply, numbers=step_scalars))

    def _push(self, bucket: int, push: Push) -> None:
        target = declared(self._buckets, bucket)
        check_payload(target.spec, push.payload)
        with target.lock:
            # Under the lock: either this sees a failure, or the failure sees this push.
            if (end := self._failures.end) is None:
                target.waiting.append(push)
                self._start_next(bucket, target)
        if end is not None:
            push.on_reply(Reply(error=end))

    def _start_next(self, number: int, bucket: PushedBucket) -> None:
        """Sends the oldest waiting push if none is outstanding. Caller holds the bucket's lock."""
        if (push := bucket.start_next(self.view)) is None:
            return
        self._step = max(self._step, push.step)
        shards: list[list[Outgoing]] = [[] for _ in self._queues]
        for owner, item in bucket.frames(number, push, self.config.first_slice_bytes, self._memory):
            shards[owner].append(item)
        for queue, items in zip(self._queues, shards, strict=True):
            if items:
                push.send_numbers(number, queue)
                queue.put(items)

    # Deadlines

    def _watch_deadlines(self) -> None:
        limit_s = self.config.step_timeout_s
        while not self._wake.wait(min(1.0 if self._tuner.done else 0.1, limit_s / 4)):
            if self.rank == 0:
                with contextlib.suppress(TfpsError):  # it has failed the exchange
                    self._tuner.look(list(self._buckets))
            self._waits.look()
            if (error := self._waits.overdue(limit_s)) is not None:
                self.fail(error)
        if self._failures.failure is not None:
            self._leave()
            for queue in self._queues:
                queue.close()
