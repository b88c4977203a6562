"""A worker's exchange with its pservers: sends slices, most urgent first, and puts replies into buckets."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tfps.config import Config, Security, check_address
from tfps.errors import (
    ConfigError,
    ConnectError,
    InterruptError,
    MismatchError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
)
from tfps.exchange import interface
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
)
from tfps.exchange.layout import Layout, Placer, cut_anew, tunable
from tfps.membership.members import Resumed
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.threads import Heartbeat
from tfps.trace.capture import Setting
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.control import Pserver, layout_of
from tfps.wire.frames import Header, Kind, decode_ranks, encode
from tfps.wire.paths import Opening, WorkerStream
from tfps.wire.send_queue import SILENT_S, Outgoing, SendQueue
from tfps.wire.shared_memory import Sharing, tune_malloc
from tfps.worker.bucket import Incoming, Push, PushedBucket
from tfps.worker.captures import WorkerCaptures
from tfps.worker.client import PserverClient, WaitLog
from tfps.worker.losses import Losses
from tfps.worker.newcomer import Newcomer
from tfps.worker.table_bucket import TableBucket
from tfps.worker.tables import WorkerTables
from tfps.worker.tuner import Tuner
from tfps.worker.under_way import UnderWay

logger = logging.getLogger("tfps")
_REJOIN_S = 5.0  # for pservers that have just answered
_REASON_S = 1.0  # in which streams say why a call broke, if the job has failed


class Worker(UnderWay, WorkerTables):
    """A member of a job on all its pservers. See `Exchange`. The constructor returns when all workers have joined.

    It is its own `Info` and `State`. Per pserver one of gRPC's threads or "tfps-send-<i>" sends, and "tfps-recv-<i>"
    receives and calls `on_reply`; "tfps-deadlines" checks deadlines. Without `rank` ranks are assigned in order of
    joining; without `workers` there are as many as the pservers were started with. `resumed`: the job goes on from
    one that had other pservers, and its workers `resume` before anything else.
    """

    embedded = False

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
        self._buckets: list[PushedBucket] = []
        self._declaring = threading.Lock()  # serializes declarations
        self._view_changed = threading.Condition()  # guards the view and the next three
        self._present: list[set[int]] = []  # by pserver: who takes part, as it has told
        self._ended: set[int] = set()  # who took part until the end of its program
        self._silent: set[int] = set()  # who was lost and may be alive
        self.silent_pservers: set[str] = set()  # addresses
        self._admissions: list[int] = []  # by pserver: how many it has told
        self._memory = Sharing(config.shared_memory)
        self._step = 0  # for messages
        self.on_joined: Callable[[], object] = lambda: None  # called before it takes part
        self._on_offer = on_offer  # called with the address of a pserver that wants to take part
        self._farewell: TfpsError | None = None  # why this worker failed, for the pservers
        self._left = threading.Lock()  # acquired once
        self._wake = threading.Event()  # set by a failure and by close
        security = Security.of_worker(config)
        self._pservers = [Pserver(address, security) for address in addresses]
        rank = -1 if rank is None else rank
        self._client = PserverClient(self._pservers, config, self._buckets, self._failures, rank, uid)
        self._waits = WaitLog(self._client, self._buckets)
        self.info = self.state = self.joining = self.tables = self
        self.peers = self._client
        self.write, self.read, self.follow = self._client.write, self._client.read, self._client.follow
        self.slice_bytes, self.window_bytes = config.first_slice_bytes, config.first_window_bytes
        self._cpu_s: list[float] = []  # of each pserver, when training began
        self._queues = [
            SendQueue(config.first_window_bytes, config.policy, piggyback=True, recorder=self._recorder, pserver=index)
            for index in range(len(addresses))
        ]
        self._streams: list[WorkerStream] = []
        self.losses = losses or Losses()
        self.least = config.min_workers or 0
        self.told = False  # that others are ready to take part
        self.newcomer: Newcomer | None = None  # until it takes part
        self._joined: Newcomer | None = None  # from then on
        self._watch = threading.Thread(target=self._watch_deadlines, name="tfps-deadlines", daemon=True)
        try:
            deadline_s = time.monotonic() + config.connect_timeout_s
            if config.min_workers is not None:
                Heartbeat("tfps-heartbeat", self._beat)
            join_s = deadline_s if resumed is None else min(deadline_s, time.monotonic() + _REJOIN_S)
            # Before any frame may come.
            self.captures = WorkerCaptures(self._recorder, self._client, self.specs, self._settings, self.losses)
            self._join(job, workers or 0, join_s, resumed)
            self._placer = Placer(self.view.pservers, config.placement)
            for pserver in self._pservers:
                pserver.explain = self._explain
            self._tuner = Tuner(config, self._client, self._queues, self._memory, self.tune)
            if self.newcomer is None:
                # Ends when all workers have joined: everything above is built before any frame comes.
                self._client.declare([], [], max(deadline_s - time.monotonic(), 0.1))
            else:
                self._learn()
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
        return self._client.membership.rank

    @property
    def view(self) -> View:
        return self._client.membership.view

    @property
    def places(self) -> Sequence[int]:
        with self._view_changed:
            return sorted({*self.view.ranks, *self._ended})

    @property
    def failure(self) -> TfpsError | None:
        return self._failures.failure

    @property
    def paused(self) -> bool:
        return False

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._failures.add_listener(listener)

    # Info

    @property
    def run(self) -> str:
        return self._client.membership.run

    @property
    def first_incarnation(self) -> str:
        """Of the job when it began, maybe with other pservers."""
        return self._client.first_incarnation

    @property
    def uid(self) -> str:
        """By which pservers tell this worker from others that have had its rank."""
        return self._client.uid

    @property
    def declarations(self) -> int:
        """How many there have been, on all ranks."""
        return self._client.declarations

    @property
    def silent(self) -> Sequence[int]:
        """Who was lost, but may be alive."""
        with self._view_changed:
            return sorted(self._silent)

    def specs(self) -> list[BucketSpec]:
        """Of all buckets, by number."""
        return [bucket.spec for bucket in list(self._buckets)]

    def owners(self, bucket: int) -> list[int]:
        return list(self._buckets[bucket].cutting.owners)

    def progress(self, bucket: int) -> float:
        target = self._buckets[bucket]
        with target.lock:
            push = target.current
            return 1.0 if push is None else len(push.copied) / max(len(target.cutting.slices), 1)

    def links(self) -> list[Link]:
        steps = max((bucket.steps for bucket in list(self._buckets)), default=0)
        now = self._client.loads() if steps and self._cpu_s else []
        found = []
        for index, (pserver, queue) in enumerate(zip(self._pservers, self._queues, strict=True)):
            cpu_s, late_s = ((now[index][0] - self._cpu_s[index]) / steps, now[index][1]) if now else (None, {})
            rate, shared = queue.throughput.bytes_per_s, index in self._memory.pservers
            found.append(Link(pserver.address, rate, cpu_s, shared, late_s))
        return found

    def _settings(self) -> dict[str, Setting]:
        sizes: dict[str, Setting] = {"slice_bytes": self.slice_bytes, "window_bytes": self.window_bytes}
        return sizes | {"policy": self.config.policy, "compression": str(self.config.compression)}

    # State

    def steps(self, bucket: int) -> int:
        return self._buckets[bucket].steps

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        def take(reply: Reply) -> None:
            if reply.error is None:
                self.set_residual(bucket, np.asarray(reply.sum).view(np.float32))
            on_reply(reply)

        self._push(bucket, Push(self._buckets[bucket].whole_residual, take, whole=True))

    def set_residual(self, bucket: int, values: Floats) -> None:
        if (residual := self._buckets[bucket].residual) is not None:
            residual[...] = values if self._is_chief else 0

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

    def _lost(self, pserver: int, rank: int, what: str, how: int) -> None:
        """Goes on without `rank`, which `pserver` has lost; what other pservers say of it later has no effect."""
        ended = how == frames.ENDED
        with self._view_changed:
            self._present[pserver].discard(rank)
            if ended:
                self._ended.add(rank)
            elif how == frames.SILENT:
                self._silent.add(rank)
            if not self._agree_view(what):
                return
        workers = len(self.view.ranks), self.view.workers
        level = logging.DEBUG if ended else logging.WARNING  # others' programs soon end, too
        logger.log(level, "tfps: %s; the job goes on with %d of %d workers", what, *workers)

    def _agree_view(self, reason: str = "") -> bool:
        """Takes part with those whom all pservers have; returns whether that is a change. Caller holds the lock."""
        view = self.view
        ranks = tuple(sorted({*set.intersection(*self._present), self.rank}))
        if ranks != view.ranks:
            view = dataclasses.replace(view, generation=view.generation + 1, ranks=ranks)
            self._client.membership = dataclasses.replace(self._client.membership, view=view)
            self.captures.note(view, reason)
            return True
        return False

    # Joining and leaving

    def _when(self) -> str:
        return f"at step {self._step}"

    def _join(self, job: str, workers: int, deadline_s: float, resumed: Resumed | None) -> None:
        opening = Opening(self.config.transport, self._when)
        for index, joined in enumerate(self._client.join(job, workers, self._memory, deadline_s, resumed)):
            everybody = range(self.view.workers)
            present = everybody if resumed is None else resumed.ranks
            if joined.candidate and self.newcomer is None:
                pservers = len(self._pservers)
                self.newcomer = Newcomer(self.config, joined.rank, pservers, self._client.declared)
            pserver, queue = self._pservers[index], self._queues[index]
            path = opening.open(pserver, index, queue, joined.data_port, self._client.membership)
            incoming = Incoming(
                index,
                self._buckets,
                self._failures,
                self._recorder,
                self._start_next,
                self._notice,
                self.losses.note,
                everybody,
            )
            queue.heard()
            self._present.append(set(joined.present if joined.candidate else present))
            self._admissions.append(0)
            self._streams.append(WorkerStream(path, pserver.address, index, queue, incoming, self.fail, self._when))
            if joined.shared_memory:
                self._memory.pservers.add(index)
        with self._view_changed:
            self._agree_view()

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
            self._client.leave(self._farewell, reason)

    def fail(self, error: TfpsError, told: bool = False) -> None:
        """See `Exchange.fail`; `told`: it came from a pserver, which told all workers."""
        if self._farewell is not None:  # what has failed here is the reason, even if its stream's end is known first
            error = self._farewell
        else:
            who = f"rank {self.rank} ({socket.gethostname()}:{os.getpid()})"
            known = told or (self.config.outlives_pservers and isinstance(error, PserverLostError))
            self._farewell = error if known else type(error)(f"{who} failed: {error}")
        if self._failures.fail(error):
            self._end_pushes()
            self._wake.set()
            with self._view_changed:
                self._view_changed.notify_all()

    def _end_pushes(self) -> None:
        """Answers all pending pushes with the reason why the exchange ended."""
        error = self._failures.end
        for bucket in list(self._buckets):
            with bucket.lock:
                pushes = [push for push in (bucket.current, *bucket.waiting) if push is not None]
                bucket.current = None
                bucket.waiting.clear()
            for push in pushes:
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
            if (newcomer := self.newcomer or self._joined) is not None:
                found = newcomer.find(specs) if specs else None
                if found is None and self.newcomer is not None:
                    self._learn()
                    found = newcomer.find(specs)
                if found is not None:
                    for number, spec in zip(found, specs, strict=True):
                        self._buckets[number].spec = spec
                    return found
                if self.newcomer is not None:
                    first = [*specs, *details][0]
                    raise MismatchError(
                        f"rank {self.rank} joins a job under way, and declares what that has not declared, {first}: it "
                        "must run the same program"
                    )
            try:
                self._client.declare(specs, details, self.config.step_timeout_s, stop)
            except InterruptError:
                self._failures.check()  # another rank may have failed the job
                raise
            except TfpsError as error:
                if self._failures.end is None:
                    self.fail(error, told=not isinstance(error, (PserverLostError, WaitTimeoutError)))
                raise
            if self._is_chief and any(map(tunable, specs)):
                self._tuner.probe()
            self._cpu_s = self._cpu_s or self._client.cpu_s()
            if self._joined is not None:  # known as if somebody had found them already
                self._joined.skip(len(specs))
            return self._add(specs)

    def resume_lines(self, lines: Sequence[str]) -> None:
        """Declares the details of declarations without buckets; returns when all ranks have."""
        with self._declaring:
            self._client.declare([], lines, self.config.connect_timeout_s)

    def resume(self, specs: Sequence[BucketSpec], steps: Sequence[int]) -> None:
        """Declares all buckets that the job had declared before its pservers changed, each from its step on."""
        with self._declaring:
            self._client.declare(specs, [], self.config.connect_timeout_s, steps=steps)
            self._add(specs)
            for bucket, step in zip(self._buckets, steps, strict=True):
                bucket.steps = bucket.first = step
            if self._is_chief and any(map(tunable, specs)):
                self._tuner.probe()
            self._cpu_s = self._client.cpu_s()

    def take_residual(self, number: int, old: Worker, step: int) -> None:
        """Goes on with a bucket's residual of `old`, as it was before it pushed `step`, which it pushes again."""
        ours, theirs = self._buckets[number], old._buckets[number]
        if ours.residual is not None and theirs.residual is not None:
            ours.residual[...] = (theirs.before or {}).get(step, theirs.residual)

    def knows_as(self, old: Worker) -> None:
        """Goes on finding what the job had declared before `old` came to it."""
        self._joined = old._joined

    def repeat(self, bucket: int, giver: int, result: Payload | None, on_reply: OnReply) -> None:
        """Takes a step of `bucket` in which `giver` gives the `result` of a round to those that lack it.

        The reply is a PserverLostError on all ranks if `giver` was lost before it had given all.
        """

        def take(reply: Reply) -> None:
            if reply.error is None and (giver in push.without or giver not in reply.ranks):
                text = f"rank {giver} was lost while it gave others the last result of '{self.specs()[bucket].name}'"
                reply = Reply(error=PserverLostError(text))
            on_reply(reply)

        push = Push(as_bytes(result), take, whole=self._buckets[bucket].spec.codec is not None)
        self._push(bucket, push)

    def _add(self, specs: Sequence[BucketSpec]) -> list[int]:
        first, size, workers = len(self._buckets), self.config.first_slice_bytes, self.view.workers
        for spec in specs:
            if spec.kind == "table":
                table = TableBucket.of(spec, self.view.pservers, workers)
                if spec.replaces is not None:
                    table.steps = self._buckets[spec.replaces].steps
                self._buckets.append(table)
            else:
                self._buckets.append(PushedBucket.new(spec, size, self._placer, workers))
        for bucket in self._buckets[first:]:
            bucket.before = {} if self.config.outlives_pservers else None
        return list(range(first, len(self._buckets)))

    def _encoding_failed(self, error: Exception) -> TfpsError:
        """Fails the job on a sender's thread. Pservers are told before it ends, else they report that it has died."""
        failure = TfpsError(f"rank {self.rank}: a slice could not be compressed {self._when()}: {error!r}")
        self._farewell = self._farewell or failure
        self._leave()
        self.fail(failure)
        return failure

    def meet(self, timeout_s: float) -> None:
        """Returns once all ranks have called it, while nobody wants to join. WaitTimeoutError: not in time."""
        self._client.admit((), timeout_s)

    # Tuning

    def tune(self, slice_bytes: int, window_bytes: int) -> None:
        """Recuts all buckets from the step after next on all workers and pservers; changes the window at once.

        For rank 0 only; see Layout in protos/tfps.proto.
        """
        tuned = [(number, bucket) for number, bucket in enumerate(list(self._buckets)) if tunable(bucket.spec)]
        steps = {number: step for number, bucket in tuned if (step := bucket.hold()) is not None}
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

    def _notice(self, pserver: int, header: Header, payload: memoryview) -> None:
        """Handles a TRACE, a LOST or a layout: the first pserver's recuts the buckets, each sets its own window."""
        if header.kind == Kind.TRACE:
            self.captures.take(header)
            return
        if header.kind == Kind.READY:
            self.told = True
            return
        if header.kind == Kind.ADMITTED:
            with self._view_changed:
                self._present[pserver] = set(decode_ranks(payload))
                self._ended -= self._present[pserver]
                self._silent -= self._present[pserver]
                self._admissions[pserver] += 1
                self._agree_view()
                self._view_changed.notify_all()
            if self.newcomer is not None:
                self.newcomer.tell_admitted(pserver, decode_ranks(payload)[: header.index])
            return
        if header.kind == Kind.OFFER:
            self._on_offer(bytes(payload).decode("utf-8", "replace"))
            return
        if header.kind == Kind.AWAITED:
            self._client.on_awaited(header.bucket, header.step)
            return
        if header.kind == Kind.LOST:
            self._lost(pserver, header.index, bytes(payload).decode("utf-8", "replace"), header.step)
            return
        layout = layout_of(pb.Layout.FromString(bytes(payload)))
        self._cut_anew(layout)
        self._queues[pserver].set_window(layout.window_bytes)

    def _cut_anew(self, layout: Layout) -> None:
        self.slice_bytes, self.window_bytes = layout.slice_bytes, layout.window_bytes
        for number, cutting in cut_anew(self.specs(), layout, self.view.pservers, self.config.placement).items():
            bucket = self._buckets[number]
            with bucket.lock:
                if bucket.steps <= cutting.step:  # else that has begun
                    bucket.next[cutting.step] = cutting
                elif self.newcomer is not None:
                    bucket.cutting = cutting

    # Pushing

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        if self.newcomer is not None:
            spec = interface.declared(self._buckets, bucket).spec
            self.newcomer.push(bucket, spec, payload, on_reply)
            return
        self._push(bucket, Push(as_bytes(payload), on_reply, step_scalars=step_scalars))

    def _push(self, bucket: int, push: Push) -> None:
        target = interface.declared(self._buckets, bucket)
        interface.check_payload(target.spec, push.payload)
        with target.lock:
            # Under the lock: either this sees a failure, or the failure sees this push.
            if (end := self._failures.end) is None:
                target.waiting.append(push)
                self._start_next(bucket, target)
        if end is not None:
            push.on_reply(Reply(error=end))

    def skip(self, buckets: Sequence[int], step: int, on_reply: Callable[[int, Reply], None]) -> bool:
        targets = [(number, interface.declared(self._buckets, number)) for number in sorted(buckets)]
        with contextlib.ExitStack() as locks:
            for _, target in targets:
                locks.enter_context(target.lock)
            if self._failures.end or any(target.steps != step or target.waiting for _, target in targets):
                return False
            for number, target in targets:
                target.waiting.append(Push(None, functools.partial(on_reply, number)))
                self._start_next(number, target)
        return True

    def _start_next(self, number: int, bucket: PushedBucket) -> None:
        """Sends the oldest waiting push if none is outstanding. Caller holds the bucket's lock."""
        if (push := bucket.start_next()) is None:
            return
        self._step = max(self._step, push.step)
        shards: list[list[Outgoing]] = [[] for _ in self._queues]
        size = self.config.first_slice_bytes
        for owner, item in bucket.frames(number, push, size, self._memory, self._encoding_failed):
            shards[owner].append(item)
        header = Header(Kind.SCALARS, bucket=number, step=push.step)
        scalars = push.step_scalars and encode(header, push.step_scalars)
        for queue, items in zip(self._queues, shards, strict=True):
            if items and scalars:
                queue.put_urgent(scalars)
            if items:
                queue.put(items)

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
