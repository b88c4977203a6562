"""A worker's exchange with its pservers: sends slices, most urgent first, and puts replies into buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tfps.config import Config, Security, check_address
from tfps.errors import (
    ConfigError,
    ConnectError,
    InterruptError,
    JoinError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
)
from tfps.exchange.interface import (
    BucketSpec,
    FailureListener,
    FailureState,
    OnReply,
    Payload,
    Reply,
)
from tfps.exchange.layout import Layout, Placer, cut_anew, tunable
from tfps.malloc import tune_malloc
from tfps.membership.members import Resumed
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.threads import Heartbeat
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.control import Pserver, bucket_of, layout_of
from tfps.wire.frames import Header, Kind, decode_ranks, unpack_counts
from tfps.wire.paths import Opening, WorkerStream
from tfps.wire.send_queue import SILENT_S, SendQueue
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import Incoming
from tfps.worker.captures import WorkerCaptures
from tfps.worker.client import PserverClient, WaitLog
from tfps.worker.info import WorkerInfo, WorkerState
from tfps.worker.joining import WorkerJoining
from tfps.worker.losses import Losses
from tfps.worker.presence import Presence
from tfps.worker.pushes import Pushes
from tfps.worker.tables import WorkerTables
from tfps.worker.tuner import Tuner

logger = logging.getLogger("tfps")
_REJOIN_S = 5.0  # for pservers that have just answered
_REASON_S = 1.0  # in which streams say why a call broke, if the job has failed


class Worker:
    """A member of a job on all its pservers. See `Exchange`. The constructor returns when all workers have joined.

    Per pserver one of gRPC's threads or "tfps-send-<i>" sends, and "tfps-recv-<i>" receives and calls `on_reply`;
    "tfps-deadlines" checks deadlines. Without `rank` ranks are assigned in order of joining; without `workers` there
    are as many as the pservers were started with. `resumed`: the job goes on from one that had other pservers, and its
    workers `resume` before anything else.
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
        resumed: Resumed | None = None,
        losses: Losses | None = None,
        uid: str = "",
        on_offer: Callable[[str], object] = lambda address: None,
    ) -> None:
        if not pservers or len(set(pservers)) != len(pservers):
            raise ConfigError(f"pservers must be different addresses, at least one, got {list(pservers)}")
        addresses = [check_address(address) for address in pservers]
        tune_malloc()
        self.config = config = config or Config()
        self.addresses = addresses
        self._recorder = recorder or Recorder()
        self._failures = FailureState()
        self._declaring = threading.Lock()  # serializes declarations
        self.silent_pservers: set[str] = set()  # addresses
        self._memory = Sharing(config.shared_memory)
        self._on_offer = on_offer  # called with the address of a pserver that wants to take part
        self._farewell: TfpsError | None = None  # why this worker failed, for the pservers
        self._left = threading.Lock()  # acquired once
        self._wake = threading.Event()  # set by a failure and by close
        security = Security.of_worker(config)
        self._pservers = [Pserver(address, security) for address in addresses]
        self._queues = [
            SendQueue(config.first_window_bytes, config.policy, piggyback=True, recorder=self._recorder, pserver=index)
            for index in range(len(addresses))
        ]
        self._streams: list[WorkerStream] = []
        self.losses = losses or Losses()
        self.pushes = Pushes(config, self._failures, self._queues, self._memory, self._encoding_failed)
        self._buckets = self.pushes.buckets
        rank = -1 if rank is None else rank
        self.client = PserverClient(self._pservers, config, self._buckets, self._failures, rank, uid)
        self.peers, self.follow = self.client, self.client.follow
        self._waits = WaitLog(self.client, self._buckets)
        about = self.client, self._buckets, self._pservers, self._queues, self._memory
        self.info = WorkerInfo(config, *about)
        self.state = WorkerState(self.pushes, self.client, lambda: self._is_chief)
        self.captures = WorkerCaptures(self._recorder, self.client, self.pushes.specs, self.info.settings, self.losses)
        self.presence = Presence(self.client, self.captures.note)
        self.joining = WorkerJoining(
            config, self.client, self.presence, self._failures, self.losses, self._learn, self._commit
        )
        self.tables = WorkerTables(config, self.pushes, self.client, self.joining, self._failures)
        self._watch = threading.Thread(target=self._watch_deadlines, name="tfps-deadlines", daemon=True)
        try:
            deadline_s = time.monotonic() + config.connect_timeout_s
            if config.elastic:
                Heartbeat("tfps-heartbeat", self._beat)
            join_s = deadline_s if resumed is None else min(deadline_s, time.monotonic() + _REJOIN_S)
            self._join(job, workers or 0, join_s, resumed)
            self._placer = Placer(self.view.pservers, config.placement)
            for pserver in self._pservers:
                pserver.explain = self._explain
            self._tuner = Tuner(config, self.client, self._queues, self._memory, self.tune)
            if self.joining.pending:
                self._learn()
            else:
                # Ends when all workers have joined: everything above is built before any frame comes.
                self.client.declare([], [], max(deadline_s - time.monotonic(), 0.1))
        except BaseException as error:
            if resumed is not None and isinstance(error, (ConnectError, WaitTimeoutError)):
                self.fail(PserverLostError(str(error)))  # so all meet again
            else:
                self.fail(error if isinstance(error, TfpsError) else TfpsError(f"joining failed: {error!r}"))
            self._failures.close()
            self._hang_up()
            raise
        self._watch.start()

    @property
    def rank(self) -> int:
        return self.client.membership.rank

    @property
    def view(self) -> View:
        return self.client.membership.view

    @property
    def places(self) -> Sequence[int]:
        return self.presence.places

    @property
    def failure(self) -> TfpsError | None:
        return self._failures.failure

    @property
    def paused(self) -> bool:
        return False

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._failures.add_listener(listener)

    # Other workers

    @property
    def _is_chief(self) -> bool:
        return self.view.ranks[0] == self.rank

    def _beat(self, late: bool) -> bool:
        """Sends a heartbeat to every pserver, and fails if one is silent, unless this process was `late`."""
        for pserver, queue in list(zip(self._pservers, self._queues, strict=True))[: len(self._streams)]:
            queue.put_urgent(frames.BEAT)
            if (silent_s := queue.silent_s(renew=late)) > SILENT_S:
                self.silent_pservers.add(pserver.address)
                self.fail(PserverLostError(f"pserver {pserver.address} has been silent for {silent_s:.1f} s"))
        self.losses.log()
        return self._failures.end is None

    # Joining and leaving

    def _when(self) -> str:
        return f"at step {self.pushes.step}"

    def _join(self, job: str, workers: int, deadline_s: float, resumed: Resumed | None) -> None:
        opening = Opening(self.config.transport, self._when)
        for index, joined in enumerate(self.client.join(job, workers, self._memory, deadline_s, resumed)):
            everybody, at_start = range(self.view.workers), range(self.client.started)
            if joined.candidate:
                self.joining.begin(joined.rank)
            elif resumed is None:
                self.losses.skip(everybody[self.client.started :])  # who has not come is not lost
            pserver, queue = self._pservers[index], self._queues[index]
            path = opening.open(pserver, index, queue, joined.data_port, self.client.membership)
            incoming = Incoming(
                index,
                self._buckets,
                self._failures,
                self._recorder,
                self.pushes.start_next,
                self._notice,
                self.losses.note,
                everybody,
            )
            queue.heard()
            present = at_start if resumed is None else resumed.ranks
            self.presence.joined(joined.present if joined.candidate else present)
            self._streams.append(WorkerStream(path, pserver.address, index, queue, incoming, self.fail, self._when))
            if joined.shared_memory:
                self._memory.pservers.add(index)
        self.presence.begin()

    def close(self, reason: str = "") -> None:
        if not self._failures.close():
            return
        self.pushes.end()
        self._wake.set()
        if self._watch.is_alive() and threading.current_thread() is not self._watch:
            self._watch.join()  # it may still be reporting a failure to the pservers
        self.captures.close(failed=self._failures.failure is not None)
        self._hang_up(reason)

    def _hang_up(self, reason: str = "") -> None:
        self._leave(reason)
        for stream in self._streams:
            stream.close()
        for pserver in self._pservers:
            pserver.close()
        if self._memory.arena is not None:
            self._memory.arena.close()

    def _leave(self, reason: str = "") -> None:
        """Tells every pserver once that this worker leaves, if it has joined any."""
        if self._left.acquire(blocking=False):
            self.client.leave(self._farewell, reason)

    def fail(self, error: TfpsError, notified: bool = False) -> None:
        """See `Exchange.fail`; `notified`: it came from a pserver, which notified all workers."""
        if self._farewell is not None:  # what has failed here is the reason, even if its stream's end is known first
            error = self._farewell
        else:
            who = f"rank {self.rank} ({socket.gethostname()}:{os.getpid()})"
            known = (
                notified
                or isinstance(error, JoinError)
                or (self.config.outlives_pservers and isinstance(error, PserverLostError))
            )
            self._farewell = error if known else type(error)(f"{who} failed: {error}")
        if self._failures.fail(error):
            self.pushes.end()
            self._wake.set()
            self.presence.wake()

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
            if (found := self.joining.find(specs)) is not None:
                for number, spec in zip(found, specs, strict=True):
                    self._buckets[number].spec = spec
                return found
            if self.joining.pending:
                first = [*specs, *details][0]
                raise JoinError(
                    f"rank {self.rank} joins a job under way, and declares what that has not declared, {first}: it "
                    "must run the same program"
                )
            try:
                self.client.declare(specs, details, self.config.step_timeout_s, stop)
            except InterruptError:
                self._failures.check()  # another rank may have failed the job
                raise
            except TfpsError as error:
                if self._failures.end is None:
                    self.fail(error, notified=not isinstance(error, (PserverLostError, WaitTimeoutError)))
                raise
            if self._is_chief and any(map(tunable, specs)):
                self._tuner.probe()
            self.info.begin()
            if (known := self.joining.known) is not None:  # known as if somebody had found them already
                known.skip(len(specs))
            return self._add(specs)

    def _add(self, specs: Sequence[BucketSpec]) -> list[int]:
        return self.pushes.declared(specs, self._placer, self.view)

    def _learn(self) -> None:
        """Knows all buckets that the job has declared, which this worker has come to."""
        if (trial := self.joining.trial) is not None:
            specs = list(map(bucket_of, trial.replies()[0].buckets))
            self._add(specs[len(self._buckets) :])
            trial.learn(specs)

    def _commit(self, replies: Sequence[pb.DeclaredReply]) -> None:
        """Goes on from what all pservers know: this worker takes part from now on."""
        with self._declaring:
            for bucket, steps in zip(self._buckets, zip(*(each.steps for each in replies), strict=True), strict=True):
                bucket.steps = max(steps)
                bucket.next.clear()
            for layout in map(layout_of, replies[0].layouts):
                self._cut_anew(layout)
            self.client.goes_on(replies[0].declarations)
            self.joining.committed()

    def resume_lines(self, lines: Sequence[str]) -> None:
        """Declares the details of declarations without buckets; returns when all ranks have."""
        with self._declaring:
            self.client.declare([], lines, self.config.connect_timeout_s)

    def resume(self, specs: Sequence[BucketSpec], steps: Sequence[int]) -> None:
        """Declares all buckets that the job had declared before its pservers changed, each from its step on."""
        with self._declaring:
            self.client.declare(specs, [], self.config.connect_timeout_s, steps=steps)
            self._add(specs)
            for bucket, step in zip(self._buckets, steps, strict=True):
                bucket.steps = bucket.first = step
            if self._is_chief and any(map(tunable, specs)):
                self._tuner.probe()
            self.info.begin(anew=True)

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
        tuned = [(number, bucket) for number, bucket in enumerate(list(self._buckets)) if tunable(bucket.spec)]
        steps = {number: step for number, bucket in tuned if (step := bucket.hold()) is not None}
        layout = Layout(slice_bytes, window_bytes, steps)
        try:
            self.client.tune(layout)
        except TfpsError as error:
            self.fail(error)
            raise
        self._cut_anew(layout)
        for number in steps:
            bucket = self._buckets[number]
            with bucket.lock:
                bucket.hold_at = None
                self.pushes.start_next(number, bucket)

    def _notice(self, pserver: int, header: Header, payload: memoryview) -> None:
        """Handles a TRACE, a LOST or a layout: the first pserver's recuts the buckets, each sets its own window."""
        if header.kind == Kind.TRACE:
            self.captures.take(header)
            return
        if header.kind == Kind.READY:
            self.joining.notified = True
            return
        if header.kind == Kind.ADMITTED:
            ranks = decode_ranks(payload)
            self.presence.admit(pserver, ranks)
            if (trial := self.joining.trial) is not None:
                trial.notify_admitted(pserver, ranks[: header.index])
            return
        if header.kind == Kind.OFFER:
            self._on_offer(bytes(payload).decode("utf-8", "replace"))
            return
        if header.kind == Kind.RECEIVED:
            self.pushes.on_stable(unpack_counts(payload))
            return
        if header.kind == Kind.AWAITED:
            self.client.on_awaited(header.bucket, header.step)
            return
        if header.kind == Kind.LOST:
            self.presence.lose(pserver, header.index, bytes(payload).decode("utf-8", "replace"), header.step)
            return
        layout = layout_of(pb.Layout.FromString(bytes(payload)))
        self._cut_anew(layout)
        self._queues[pserver].set_window(layout.window_bytes)

    def _cut_anew(self, layout: Layout) -> None:
        self.info.slice_bytes, self.info.window_bytes = layout.slice_bytes, layout.window_bytes
        specs = self.pushes.specs()
        if self.joining.pending:  # of buckets that it does not know yet it takes the layout when it takes part
            known = {number: step for number, step in layout.steps.items() if number < len(specs)}
            layout = dataclasses.replace(layout, steps=known)
        cuttings = cut_anew(specs, layout, self.view.pservers, self.config.placement)
        self.pushes.cut_anew(cuttings, at_once=self.joining.pending)

    # Pushing

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        (self.joining.trial or self.pushes).push(bucket, payload, on_reply, step_scalars)

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        return self.pushes.skip(buckets, step, on_reply)

    # Deadlines

    def _watch_deadlines(self) -> None:
        limit_s = self.config.step_timeout_s
        while not self._wake.wait(min(1.0 if self._tuner.done else 0.1, limit_s / 4)):
            if self._is_chief:
                with contextlib.suppress(TfpsError):  # it has failed the exchange
                    self._tuner.look(list(self._buckets))
            self._waits.look()
            if (error := self._waits.overdue(limit_s)) is not None:
                self.fail(error)
        if self._failures.failure is not None:
            self._leave()
            for queue in self._queues:
                queue.close()
