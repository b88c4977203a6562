"""What the parts of an `ElasticExchange` share: the worker that there is now, and the buckets.

Tested in tests/worker/test_lost_pservers.py.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tfps.config import Config
from tfps.errors import ClosedError, InterruptError, PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import BucketSpec, FailureState, Reply, kept_arrays
from tfps.exchange.kinds import ONLY_ON_PSERVERS, ByKind
from tfps.exchange.requests import Save
from tfps.membership.view import View
from tfps.recovery.files import Saved
from tfps.recovery.journal import Journal, Push, Replay, Snapshot, Wanted
from tfps.recovery.latest import Latest
from tfps.recovery.machine import Broken, Effect, End, Event, Phase, Recovery, lacks
from tfps.recovery.rows import OpenLookup, RowsLatest, RowsReplay
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")
_T = TypeVar("_T")
ToDo = queue.SimpleQueue[Event | Effect | None]
_LOOK_S = 1.0  # between two looks whether a wait is interrupted
_TOLD_BYTES = 2**24  # of results that come between two times that a worker tells which it has
_LARGE_BYTES = 2**20  # of a result whose memory will not be needed soon
_NOTICED_S = 2.0  # after a call has failed, the streams to the pserver have ended as well


def journal_of(number: int, rank: int, spec: BucketSpec, config: Config, run: str) -> Journal | None:
    """What `rank` keeps of a bucket in the job `run`; None: it has no update, or no snapshots are taken."""
    every = config.snapshot_steps
    return None if every is None else _JOURNALS[spec.kind](number, rank, spec, config, every, run)


def _of_update(number: int, rank: int, spec: BucketSpec, config: Config, every: int, run: str) -> Journal | None:
    if spec.update is None:
        return None
    if config.applies_each_push:
        return Latest(number, rank, spec, spec.update, every)
    return Replay(number, rank, kept_arrays(spec), spec.nbytes, every)


def _of_rows(number: int, rank: int, spec: BucketSpec, config: Config, every: int, run: str) -> Journal | None:
    if not config.snapshot_folder:
        return None
    kind = RowsReplay if config.steps_together else RowsLatest
    return kind(number, rank, every, f"{config.snapshot_folder}/{run}")


_JOURNALS = ByKind(sum=_of_update, gather=_of_update, table=_of_rows)


@dataclass(slots=True)
class ElasticBucket:
    """A bucket, as it goes from one `Worker` to the next."""

    journal: Journal | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)  # guards all
    worker: Worker | None = None  # that takes pushes and whose replies count; None: none does now
    pushes: deque[Push] = field(default_factory=deque)  # that have not been answered
    replies: int = 0
    last: Reply = field(default_factory=Reply)
    unrecoverable: bool = False  # nobody has what pservers kept
    # Of a table:
    saving: Worker | None = None  # that has pservers write a snapshot: pushes wait for it
    lookups: list[OpenLookup] = field(default_factory=list)  # that have not been answered
    needs_replay: bool = False  # lookups wait until pushes have been given again
    last_lookup: int = -1  # the latest step that has looked up rows to train them,
    begun: int = -1  # and when pservers changed last
    step_offset: int = 0  # by how much pservers count more steps, in other modes than "sync"

    @property
    def replay(self) -> Replay | None:
        """The journal, if rounds are computed again from it."""
        return None if self.journal is None else self.journal.replay


def take(number: int, worker: Worker, journal: Journal, wanted: Wanted) -> None:
    """Reads what the journal of a bucket wants, or has pservers save it, and waits."""
    if wanted.save is not None:
        journal.wrote(wanted.ranks, saved_by(worker, wanted.save))
        return
    values = [worker.state.read(number, array, wanted.begin, wanted.nbytes) for array in wanted.arrays]
    journal.took(Snapshot(wanted.ranks, wanted.begin, values))


def saved_by(worker: Worker, save: Save) -> Saved:
    """Has pservers save a table, and waits. It needs no lock."""
    return Saved(save.folder, worker.tables.save(save))


class Core:
    """The machine, its sessions, and the buckets; any thread."""

    def __init__(self, config: Config, first: Worker, to_do: ToDo) -> None:
        self.config = config
        self.failures = FailureState()
        self.buckets: list[ElasticBucket] = []
        self.changed = threading.Condition()  # guards what follows; notified after each step of the machine
        self.recovery = Recovery(config.rejoin_timeout_s, joining=first.joining.pending)
        self.sessions = {self.recovery.session: first}  # what the machine knows by numbers
        self.ended: set[int] = set()  # whose programs have ended, in earlier views
        self.closing_reason = ""  # why it has been closed
        self._untold = 0  # bytes of results since the others were told
        self.quiesced = False  # whether it steps no further until all have come to an exchange
        self.to_do = to_do  # what the thread of `Reconfiguration` does, one after the other; None: the end

    @property
    def worker(self) -> Worker:
        """The session that there is now."""
        return self.sessions[self.recovery.session]

    @property
    def next(self) -> Worker | None:
        """The session with which it is about to go on."""
        return None if (number := self.recovery.next) is None else self.sessions[number]

    @property
    def phase(self) -> Phase:
        return self.recovery.phase

    @property
    def is_joining(self) -> bool:
        return self.recovery.joining

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def view(self) -> View:
        return self.worker.view

    @property
    def paused(self) -> bool:
        """Whether it waits for pservers."""
        return self.phase.pauses

    @property
    def over(self) -> bool:
        return self.phase is Phase.ENDED

    def deliver(self, event: Event) -> None:
        """Tells the machine, and has done what follows: the end here, all else on the thread of `Reconfiguration`."""
        with self.changed:
            before = self.phase
            effects = self.recovery.step(event)
            for effect in effects:
                if not isinstance(effect, End):
                    self.to_do.put(effect)
            if self.phase is not before:
                logger.debug("tfps: rank %d was %s, and is %s", self.rank, before.value, self.phase.value)
                if self.over:
                    self.to_do.put(None)
            self.changed.notify_all()
        for effect in effects:
            if isinstance(effect, End):
                self._end(effect.error)

    def wait_over(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it has come."""
        with self.changed:
            return self.changed.wait_for(lambda: self.over, timeout_s)

    # Calls

    def call(
        self, what: Callable[[Worker], _T], stop: threading.Event | None = None, *, after_replay: bool = True
    ) -> _T:
        """Calls `what`, again if a pserver is lost meanwhile; InterruptError if `stop` is set before it can."""
        while True:
            with self.changed:
                while self.phase.reconfigures or (after_replay and self.paused):
                    if stop is not None and stop.is_set():
                        raise InterruptError(f"rank {self.rank}: interrupted while the workers met")
                    self.changed.wait(_LOOK_S)
                worker = self.worker
            self.failures.check()
            try:
                return what(worker)
            except (PserverLostError, ClosedError):
                if not self.is_lost(worker):
                    raise

    def is_lost(self, worker: Worker) -> bool:
        """Whether a call of `worker`, which has failed, ends otherwise than by its own error; streams may say so later.

        The job goes on with another worker, or has ended, for a reason that is known.
        """

        def known() -> bool:
            return self.worker is not worker or self.phase.reconfigures or self.over

        with self.changed:
            return self.changed.wait_for(known, _NOTICED_S)

    def check_current(self, worker: Worker) -> None:
        """PserverLostError: what `worker` has just done is done again with the next one. Caller holds the lock."""
        if self.worker is not worker or self.phase.reconfigures:
            raise PserverLostError("a pserver was lost meanwhile")

    # Buckets

    def journal(self, bucket: ElasticBucket) -> Journal | None:
        """The journal of a bucket; a joining worker keeps none, as nobody gets what it pushes."""
        return None if self.is_joining else bucket.journal

    def tell_received(self, worker: Worker, reply: Reply) -> None:
        """Has the others told, once in so many bytes of results, which this one has: see `forget_results`."""
        if self.config.applies_each_push or worker.joining.pending:
            return  # replies are counted otherwise
        results = [reply.sum] if reply.parts is None else reply.parts.values()
        with self.changed:
            self._untold += sum(memoryview(each).nbytes for each in results if each is not None)
            if self._untold < _TOLD_BYTES:
                return
            self._untold = 0
        worker.pushes.tell_received([bucket.replies for bucket in list(self.buckets)])

    def forget_results(self, worker: Worker, counts: Sequence[int]) -> None:
        """Drops results that no rank lacks: all have so many of each bucket."""
        for number, (bucket, count) in enumerate(zip(list(self.buckets), counts, strict=False)):
            with bucket.lock:
                if bucket.replies > count or (bucket.last.sum is None and bucket.last.parts is None):
                    continue
                bucket.last = Reply(ranks=bucket.last.ranks)
            spec = worker.pushes.buckets[number].spec
            if spec.occasional and spec.nbytes >= _LARGE_BYTES:
                worker.pushes.give_back(number)

    def check_there(self, number: int) -> None:
        """Raises WorkerLostError if nobody has what pservers kept of a bucket."""
        if self.buckets[number].unrecoverable:
            raise WorkerLostError(
                f"{self.missing(number)}: in the last steps before workers were lost or joined, or all had assigned "
                "values"
            )

    def missing(self, number: int) -> str:
        return lacks(self.worker.pushes.specs()[number].name)

    def goes_on(self, error: TfpsError) -> bool:
        """Whether the job goes on with other pservers after `error`: not if rows of a table are lost."""
        return isinstance(error, PserverLostError) and self.failures.end is None and not self._loses_rows

    @property
    def _loses_rows(self) -> bool:
        """Whether there are tables of which nothing is kept."""
        specs = self.worker.pushes.specs()
        numbers = {number for number, bucket in enumerate(self.buckets) if bucket.journal is not None}
        tables = {number for number, spec in enumerate(specs) if ONLY_ON_PSERVERS[spec.kind]}
        return bool(tables - numbers - {spec.replaces for spec in specs})

    # The end

    def fail(self, error: TfpsError) -> None:
        """Fails here and on the pservers; answers whatever waits."""
        self.deliver(Broken(error))

    def _end(self, error: TfpsError) -> None:
        self.failures.fail(error)
        for worker in self.workers():
            worker.fail(error)
        self.answer(error)

    def workers(self) -> list[Worker]:
        """Those that are to end, as there will be no other one."""
        with self.changed:
            return [self.worker, *([] if (other := self.next) is None else [other])]

    def answer(self, error: TfpsError) -> None:
        """Answers what the worker that there is now does not."""
        for bucket in list(self.buckets):
            with bucket.lock:
                waiting = [each.on_reply for each in bucket.pushes] + [each.on_reply for each in bucket.lookups]
                bucket.pushes.clear()
                bucket.lookups.clear()
            for on_reply in waiting:
                on_reply(Reply(error=error))
