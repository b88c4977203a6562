"""A worker that goes on when pservers are lost, come back, or join (`Config.outlives_pservers`).

Such a job keeps nothing on its pservers but rounds under way. So a lost pserver ends the job there; its workers meet,
agree where each bucket is, and begin the job anew: see tfps/membership/regrouping.py. What a worker has pushed is kept
until the reply, and the reply until the next one, by reference; of what pservers update more (tfps/worker/kept.py).

Tested in tests/worker/test_lost_pservers.py, tests/worker/test_lost_meanwhile.py and
tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tfps.config import Config, Security
from tfps.errors import (
    ClosedError,
    ConnectError,
    InterruptError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
)
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import (
    BucketSpec,
    FailureListener,
    FailureState,
    Link,
    OnReply,
    Payload,
    Reply,
    declared,
)
from tfps.membership.members import Resumed
from tfps.membership.view import run_of
from tfps.protos import tfps_pb2 as pb
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Options
from tfps.worker.current import CurrentWorker
from tfps.worker.elastic_joining import ElasticJoining
from tfps.worker.kept import Push, packed, unpacked
from tfps.worker.kept_rows import RowsPush
from tfps.worker.meeting import meet, pservers_now
from tfps.worker.replaying import ElasticBucket, kept
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")
_T = TypeVar("_T")
_LOOK_S = 1.0  # between two looks whether a wait is interrupted
_PAUSE_S = 0.2  # before another attempt
_NOTICED_S = 2.0  # after a call has failed, the streams to the pserver have ended as well
# The job may go on in another attempt.
_LATER = (ClosedError, ConnectError, PserverLostError, WaitTimeoutError)
_MOST_CONNECT_S = 15.0  # for all to begin anew, once they have met
_SAID_S = 10.0  # between log lines of a wait


class ElasticWorker(CurrentWorker, ElasticJoining):
    """An `Exchange` over one `Worker` after the other. The constructor is that of `Worker`."""

    def __init__(
        self,
        pservers: Sequence[str],
        *,
        rank: int | None = None,
        workers: int | None = None,
        job: str = "",
        config: Config,
        recorder: Recorder,
    ) -> None:
        self.config, self._recorder, self._job = config, recorder, job
        self._security = Security.of_worker(config)
        self._failures = FailureState()
        self._buckets: list[ElasticBucket] = []
        self._drawn: dict[str, int] = {}
        self._lines: list[str] = []  # details of declarations without buckets, in order
        self._latest: tuple[Sequence[BucketSpec], Sequence[str]] = (), ()  # declaration
        self._changed = threading.Condition()  # guards what follows
        self._regrouping = False
        self._thread: threading.Thread | None = None  # that goes on with other pservers, the last one
        self._next: Worker | None = None  # with which it is about to go on
        self._reason = ""  # why it has been closed
        self._addresses = list(pservers)
        self._admitting: Sequence[int] = ()  # who may take part already, or not
        self._expected: Sequence[int] = ()  # who did when a pserver was lost last, as somebody knew
        self._tried: list[tuple[Sequence[BucketSpec], Sequence[str]]] = []  # what this candidate has declared
        self._tries_out = False
        self._to_replay: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._ended: set[int] = set()  # whose programs have ended, in earlier views
        self._over = threading.Event()  # failed or closed
        self._worker = self._first_worker(rank, workers)
        self._first = self._worker.first_incarnation
        self._run = run_of(self._first)
        self._is_candidate = self._worker.candidate
        self._declarations = self._worker.declarations
        self.info = self.state = self.peers = self.joining = self.tables = self
        self._worker.add_failure_listener(functools.partial(self._failed, self._worker))

    def _first_worker(self, rank: int | None, workers: int | None) -> Worker:
        """Joins the pservers, or those that the job has meanwhile."""
        given, end_s = self._addresses, time.monotonic() + self.config.connect_timeout_s
        addresses = pservers_now(given, self._security)
        while True:
            try:
                worker = self._new_worker(addresses, rank=rank, workers=workers)
            except (ClosedError, ConnectError, PserverLostError) as error:
                before, addresses = addresses, pservers_now(given, self._security)
                moves = addresses != before or not isinstance(error, ConnectError)
                if not moves or time.monotonic() > end_s:
                    raise
                time.sleep(_PAUSE_S)
            else:
                self._add_addresses(addresses)
                return worker

    def _new_worker(self, addresses: Sequence[str], **more: Argument) -> Worker:
        about: Options = {"job": self._job, "config": self.config, "recorder": self._recorder}
        return Worker(addresses, **{**about, "on_offer": self._offered, **more})

    def _add_addresses(self, addresses: Sequence[str]) -> None:
        with self._changed:
            self._addresses = list(dict.fromkeys([*self._addresses, *addresses]))

    # What it knows itself

    @property
    def places(self) -> Sequence[int]:
        with self._changed:
            return sorted({*self._worker.places, *self._ended})

    @property
    def failure(self) -> TfpsError | None:
        return self._failures.failure

    @property
    def paused(self) -> bool:
        return (self._regrouping or self._replaying) and not self._over.is_set()

    def links(self) -> list[Link]:
        return self._call(lambda worker: worker.links())

    def set_residual(self, bucket: int, values: Floats) -> None:
        self._call(lambda worker: worker.set_residual(bucket, values))

    # Calls

    def _call(
        self, what: Callable[[Worker], _T], stop: threading.Event | None = None, *, after_replay: bool = True
    ) -> _T:
        """Calls `what`, again if a pserver is lost meanwhile; InterruptError if `stop` is set before it can."""
        while True:
            with self._changed:
                while self.paused if after_replay else self._regrouping and not self._over.is_set():
                    if stop is not None and stop.is_set():
                        raise InterruptError(f"rank {self.rank}: interrupted while the workers met")
                    self._changed.wait(_LOOK_S)
                worker = self._worker
            self._failures.check()
            try:
                return what(worker)
            except (PserverLostError, ClosedError):
                if not self._is_lost(worker):
                    raise

    def _is_lost(self, worker: Worker) -> bool:
        """Whether the job goes on with others after a call of `worker` has failed; its streams may say so later."""

        def known() -> bool:
            return self._worker is not worker or self._regrouping or self._over.is_set()

        with self._changed:
            self._changed.wait_for(known, _NOTICED_S)
            return self._worker is not worker or self._regrouping

    # Declaring and pushing

    def declare(
        self, specs: Sequence[BucketSpec], details: Sequence[str] = (), stop: threading.Event | None = None
    ) -> list[int]:
        def declare(worker: Worker) -> list[int]:
            ids = worker.declare(specs, details, stop)
            with self._changed:
                self._check_current(worker)  # else it declares again, with the next ones
                if worker.declarations != self._declarations:  # else the job had declared it before this worker came
                    self._declarations, self._latest = worker.declarations, (specs, details)
                self._lines += [] if specs else list(details)
                self._tried += [(specs, details)] if worker.candidate else []
                self._know(worker)
            return ids

        return self._call(declare, stop, after_replay=False)  # others may declare again before they replay

    def _know(self, worker: Worker) -> None:
        """Knows all buckets that `worker` has. Caller holds the lock."""
        first = len(self._buckets)
        for number, spec in enumerate(worker.specs()[first:], first):
            self._buckets.append(ElasticBucket(kept(number, spec, self.config, self._run), worker=worker))
            if spec.kind == "table":
                self._know_table(number, spec)

    def push(self, bucket: int, payload: Payload | None, on_reply: OnReply, step_scalars: bytes = b"") -> None:
        self._push(bucket, Push(payload, on_reply, step_scalars=step_scalars))

    def collect_residual(self, bucket: int, on_reply: OnReply) -> None:
        self._push(bucket, Push(None, on_reply, collects=True))

    def _push(self, number: int, push: Push) -> None:
        bucket = declared(self._buckets, number)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this push.
            if (end := self._failures.end) is None:
                self._check_there(number)
                bucket.pushes.append(push)
                if (kept := self._kept_of(bucket)) is not None:
                    waits = self._waits(bucket)
                    kept.add(push)
                    if waits:
                        return
                if bucket.worker is not None:
                    try:
                        self._give(number, bucket.worker, push)
                    except TfpsError:
                        bucket.pushes.remove(push)
                        if bucket.log is not None and kept is not None:
                            bucket.log.drop_last()
                        raise
        if end is not None:
            push.on_reply(Reply(error=end))

    def _give(self, number: int, worker: Worker, push: Push) -> None:
        """Gives `push` to `worker`. Caller holds the bucket's lock."""
        kept = self._kept_of(self._buckets[number])
        try:
            if isinstance(push, RowsPush) and self._saves_before(number, worker, push):
                return
            if kept is not None:
                kept.give(self.rank, worker)
            push.give(number, worker, functools.partial(self._take, number, worker, push))
        except _LATER:
            if kept is None or not self._is_lost(worker):  # else all is given again
                raise

    def _take(self, number: int, worker: Worker, push: Push, reply: Reply) -> None:
        """Takes a reply, unless the push is for another worker now, or will be."""
        bucket = self._buckets[number]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and self._goes_on(reply.error)):
                return
            if (kept := self._kept_of(bucket)) is not None and reply.error is None:
                kept.answered(push, reply)
                self._note_replayed(number, push)
            if push not in bucket.pushes:  # it has been answered before
                return
            bucket.pushes.remove(push)
            on_reply = push.answered()
            if reply.error is None:
                if kept is None:
                    bucket.last, self._quiesced = reply, False
                bucket.replies = bucket.replies + 1 if worker.candidate else reply.step + 1
        on_reply(reply)

    # Failing and closing

    def add_failure_listener(self, listener: FailureListener) -> None:
        self._failures.add_listener(listener)

    def _goes_on(self, error: TfpsError) -> bool:
        """Whether the job goes on with other pservers after `error`: not if rows of a table are lost."""
        return isinstance(error, PserverLostError) and self._failures.end is None and not self._loses_rows

    def _offered(self, address: str) -> None:
        """Goes on with the pserver at `address`, too. On a thread of its own, as it tells the others."""

        def take() -> None:
            self._add_addresses([address])
            end_s, agreed = time.monotonic() + self.config.rejoin_timeout_s, False
            while not agreed and time.monotonic() < end_s and not self._over.wait(_PAUSE_S):
                with contextlib.suppress(*_LATER):
                    agreed = self._agree_to_move(_MOST_CONNECT_S)
            with self._changed:
                worker = self._worker
            if agreed and not (worker.candidate or address in worker.addresses):
                worker.fail(PserverLostError(f"pserver {address} takes part from now on"))

        threading.Thread(target=take, name="tfps-offered", daemon=True).start()

    def _failed(self, worker: Worker, error: TfpsError) -> None:
        """`worker` has failed: meets the others, or fails."""
        with self._changed:
            if worker is not self._worker:
                return
            goes_on, again = self._goes_on(error), self._ask_again if self._is_candidate else self._begin_anew
            self._regrouping, self._replaying = goes_on, False
        if goes_on:
            arguments = [worker, again, error]
            self._thread = threading.Thread(target=self._go_on, args=arguments, name="tfps-regroup", daemon=True)
            self._thread.start()
        else:
            self._end(error)

    def _end(self, error: TfpsError) -> None:
        """Fails; answers what the worker that there is now does not."""
        self._failures.fail(error)
        self._answer(error)

    def _answer(self, error: TfpsError) -> None:
        self._over.set()
        self._to_replay.put(None)
        with self._changed:
            self._changed.notify_all()
        for bucket in list(self._buckets):
            with bucket.lock:
                waiting = [each.on_reply for each in bucket.pushes] + [each.on_reply for each in bucket.asks]
                bucket.pushes.clear()
                bucket.asks.clear()
            for on_reply in waiting:
                on_reply(Reply(error=error))

    def fail(self, error: TfpsError) -> None:
        self._failures.fail(error)
        for worker in self._workers():
            worker.fail(error)
        self._answer(error)

    def close(self, reason: str = "") -> None:
        if self._failures.end is None:
            with self._changed:  # others need what this worker has kept
                goes_on = self._next is not None or self._replaying
                self._changed.wait_for(lambda: not (goes_on and self.paused), _MOST_CONNECT_S)
        if self._failures.close():
            for worker in self._workers(reason):
                worker.close(reason)
            self._answer(self._failures.end or ClosedError("the exchange is closed"))
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_MOST_CONNECT_S)  # it may still join pservers, and leaves them then

    def _workers(self, reason: str = "") -> list[Worker]:
        """Those that are to end, as there will be no other one."""
        with self._changed:
            self._reason = self._reason or reason
            self._over.set()
            return [self._worker, *([] if self._next is None else [self._next])]

    @contextlib.contextmanager
    def _trying(self, new: Worker) -> Iterator[None]:
        """Ends `new` if the block fails: the others meet again."""
        with self._changed:
            self._next = new
        try:
            if self._over.is_set():
                raise ClosedError("the exchange has ended")
            yield
        except BaseException as error:
            if self._failures.failure is not None:
                new.fail(self._failures.failure)
            elif not self._over.is_set() and not new.candidate:
                new.fail(PserverLostError(f"rank {self.rank} could not go on: {error}"))
            new.close(self._reason)
            raise
        finally:
            with self._changed:
                if self._next is new:
                    self._next = None

    # Other pservers

    def _go_on(self, old: Worker, again: Callable[[Worker, str], None], error: TfpsError) -> None:
        """Goes on with other pservers; on its own thread."""
        try:
            threading.Thread(target=old.close, name="tfps-hang-up", daemon=True).start()
            self._to_replay.put(None)
            for bucket in self._buckets:  # nothing that comes from now on counts
                with bucket.lock:
                    bucket.worker = None
            again(old, str(error))
        except TfpsError as failure:
            self._end(failure)
        except Exception as bug:  # else every push would wait for ever
            self._end(TfpsError(f"rank {self.rank}: could not go on with other pservers: {bug!r}"))

    def _attempts(self, reason: str) -> Iterator[Callable[[TfpsError], None]]:
        """Attempts to go on, until the user's limit; each takes the error that it ended with."""
        limit_s, began_s = self.config.rejoin_timeout_s, time.monotonic()
        said_s = began_s

        def failed(error: TfpsError) -> None:
            nonlocal said_s
            now_s = time.monotonic()
            if now_s - began_s > limit_s:
                raise PserverLostError(
                    f"{reason}; the job could not go on with other pservers within {limit_s:.3g} s "
                    f"(rejoin_timeout_s): {error}"
                ) from error
            if now_s - said_s > _SAID_S:
                said_s = now_s
                logger.warning("tfps: waits for a pserver; %.0f s so far: %s", now_s - began_s, error)
            self._over.wait(_PAUSE_S)

        while not self._over.is_set():
            yield failed

    def _begin_anew(self, old: Worker, reason: str) -> None:
        """Meets the others, and begins the job anew with them."""
        logger.warning("tfps: %s; the workers meet, to go on with the pservers that there are", reason)
        generation = old.view.generation
        silent = old.silent_pservers
        for failed in self._attempts(reason):
            try:
                report = self._report(old, generation, reason)
                workers, not_asked, silent = old.view.workers, silent, set()
                reply = meet(
                    self._addresses, self._security, old.uid, self._first, self.rank, workers, report, not_asked
                )
                generation = reply.generation
                self._add_addresses(reply.pservers)
                new = self._worker_with(reply, old.uid)
                with self._trying(new):
                    answered = self._restore(new, old, reply)
                    self._go_on_with(new)
                names = f"{'pserver' if len(reply.pservers) == 1 else 'pservers'} {', '.join(reply.pservers)}"
                logger.info("tfps: the job goes on with %d workers and %s", len(new.view.ranks), names)
                for push, own in answered:
                    push.on_reply(own)
                return
            except _LATER as error:
                failed(error)

    def _ask_again(self, old: Worker, reason: str) -> None:
        """Asks to join once more, as the pservers have changed before it took part."""
        logger.warning("tfps: %s; this worker asks again to join the job", reason)
        for failed in self._attempts(reason):
            try:
                new = self._new_worker(pservers_now(self._addresses, self._security), rank=self.rank)
                with self._trying(new):
                    if new.newcomer is None:
                        raise ConnectError("the job is not under way any more")
                    for specs, details in self._tried:
                        new.declare(specs, details)
                    new.newcomer.tries_out = self._tries_out
                    self._go_on_with(new)
                return
            except _LATER as error:
                failed(error)

    def _report(self, old: Worker, generation: int, reason: str) -> pb.Report:
        view = old.view
        everybody = sorted(view.ranks)
        return pb.Report(
            generation=generation,
            ranks=view.ranks,
            lost=set(range(view.workers)).difference(view.ranks, self._admitting),
            silent=old.silent,
            declarations=self._declarations,
            steps=[bucket.replies for bucket in self._buckets],
            results=[
                pb.Result(bucket=number, rank=self.rank, ranks=sorted(bucket.last.ranks))
                for number, bucket in enumerate(self._buckets)
                if sorted(bucket.last.ranks) != everybody
            ],
            reason=reason,
            snapshots=self._snapshots(),
            newest=self._newest(),
        )

    def _worker_with(self, reply: pb.RegroupReply, uid: str) -> Worker:
        connect_s = min(self.config.connect_timeout_s, _MOST_CONNECT_S)
        return self._new_worker(
            list(reply.pservers),
            rank=self.rank,
            config=dataclasses.replace(self.config, connect_timeout_s=connect_s),
            losses=self._worker.losses,
            uid=uid,
            resumed=Resumed(self._first, reply.generation, tuple(reply.ranks), tuple(reply.pservers), reply.reason),
        )

    def _restore(self, new: Worker, old: Worker, reply: pb.RegroupReply) -> list[tuple[Push, Reply]]:
        """Lets `new` go on where the replies of `old` have ended; returns pushes that are answered now."""
        steps, specs = list(reply.steps), old.specs()
        results = {each.bucket: each for each in reply.results}
        ahead, (latest, details) = self._declarations > reply.declarations, self._latest
        lines = self._lines[: len(self._lines) - len(details)] if ahead and not latest else self._lines
        new.resume(specs[: len(steps)], [step - (n in results) for n, step in enumerate(steps)])
        for number, (bucket, step) in enumerate(zip(self._buckets, steps, strict=False)):
            new.take_residual(number, old, step)
            bucket.gone = bucket.gone or number in reply.gone
        newest = {each.bucket: each.rank for each in reply.newest}
        self._restore_kept(new, steps, tuple(reply.ranks), newest, dict(reply.folders))
        new.resume_lines(lines)  # from then on all ranks have written their parts
        found = self._exchange_results(new, results)
        if ahead:
            new.declare(latest, details)  # the others do so now, again
        if self._quiesced and not any(self._buckets[number].replies < steps[number] for number in found):
            new.peers.quiesce()
        new.knows_as(old)
        # Nothing fails from here on.
        answered = self._drop_given()
        for number, last in found.items():
            bucket = self._buckets[number]
            with bucket.lock:
                lacked = bucket.replies < steps[number]
                bucket.replies = new.steps(number)
                if lacked:
                    push, bucket.last, self._quiesced = bucket.pushes.popleft(), last, False
                    answered.append((push, last))
                    if push.collects:
                        new.set_residual(number, np.asarray(last.sum).view(np.float32))
        with self._changed:
            self._ended.update(set(old.places).difference(old.view.ranks))
            self._expected = list(reply.expected)
        return answered

    def _go_on_with(self, new: Worker) -> None:
        with self._changed:
            if self._over.is_set():
                raise ClosedError("the exchange has ended")
            self._worker, self._declarations, self._regrouping = new, new.declarations, False
            behind = self._begin_replay()
            self._ended.difference_update(new.view.ranks)
            self._changed.notify_all()
        new.add_failure_listener(functools.partial(self._failed, new))
        for number, bucket in enumerate(self._buckets):
            with bucket.lock:
                if self._regrouping or self._worker is not new:
                    return  # it has failed already: the next one gets all
                bucket.worker = new
                for push in list(bucket.pushes) if number not in behind else ():
                    self._give(number, new, push)
                if number not in behind:
                    self._give_asks(number, new)
        self._start_replay(new, behind)

    def _exchange_results(self, new: Worker, results: Mapping[int, pb.Result]) -> dict[int, Reply]:
        """Gives and gets the last replies that some ranks lack; returns them, by bucket."""
        came = threading.Semaphore(0)
        replies: dict[int, Reply] = {}

        def take(number: int, reply: Reply) -> None:
            replies[number] = reply
            came.release()

        for number, result in results.items():
            own = packed(self._buckets[number].last) if result.rank == self.rank else None
            new.repeat(number, result.rank, own, functools.partial(take, number))
        for _ in results:
            if not came.acquire(timeout=self.config.step_timeout_s):
                raise WaitTimeoutError("the last replies of other ranks have not come")
        for reply in replies.values():
            if reply.error is not None:
                raise reply.error
        return {number: unpacked(replies[number], result) for number, result in results.items()}
