"""How an `ElasticWorker` gives other pservers what is kept of the buckets that they update; see kept.py, newest.py.

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tfps.config import Config
from tfps.errors import PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import BucketSpec, Payload, Reply, as_bytes, declared, kept_arrays
from tfps.protos import tfps_pb2 as pb
from tfps.types import Array
from tfps.worker.kept import Kept, Push, Write
from tfps.worker.kept_rows import Ask, KeptTable, NewestTable
from tfps.worker.newest import Newest
from tfps.worker.worker import Worker

_T = TypeVar("_T")
_MOST_COUNTERS = 8  # of which numbers are known; an epoch has one


AnyKept = Kept | Newest | NewestTable


def kept(number: int, spec: BucketSpec, config: Config, run: str) -> AnyKept | None:
    """What is kept of a bucket in the job `run`; None: it has no update, or no snapshots are taken."""
    if config.snapshot_steps is None:
        return None
    if spec.kind == "table":
        if not config.snapshot_folder:
            return None
        kind = KeptTable if config.steps_together else NewestTable
        return kind(number, config.snapshot_steps, f"{config.snapshot_folder}/{run}")
    if spec.update is None:
        return None
    if config.applies_each_push:
        return Newest(number, spec, spec.update, config.snapshot_steps)
    return Kept(number, kept_arrays(spec), spec.nbytes, config.snapshot_steps)


@dataclass(slots=True)
class ElasticBucket:
    """A bucket, as it goes from one `Worker` to the next."""

    kept: AnyKept | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)  # guards all
    worker: Worker | None = None  # that takes pushes and whose replies count; None: none does now
    pushes: deque[Push] = field(default_factory=deque)  # that have not been answered
    replies: int = 0
    last: Reply = field(default_factory=Reply)
    gone: bool = False  # whether nobody has what pservers kept
    # Of a table:
    asks: list[Ask] = field(default_factory=list)  # that have not been answered
    behind: bool = False  # whether they wait until pushes have been given again
    asked: int = -1  # the newest step that has asked for rows to train them,
    begun: int = -1  # and when pservers changed last
    added: int = 0  # how many steps the program has added
    ahead: int = 0  # by how much pservers count more steps, in other modes than "sync"

    @property
    def log(self) -> Kept | None:
        """What is kept, if rounds are computed again from it."""
        return self.kept if isinstance(self.kept, Kept) else None


class Replaying(abc.ABC):
    """The part of an `ElasticWorker` that knows what pservers keep."""

    config: Config
    _worker: Worker
    _buckets: list[ElasticBucket]
    _changed: threading.Condition
    _replaying = False  # whether the pservers do not have all that has been answered, yet
    _is_candidate: bool
    _to_replay: queue.SimpleQueue[int | None]  # buckets that may give their next push; None: no more
    _regrouping: bool
    _restored_with: tuple[int, ...] = ()  # who took part when other pservers got what is kept
    _quiesced = False  # whether it steps no further until all have come to an exchange
    _drawn: dict[str, int]  # by counter, how many numbers are known to be drawn

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...
    @property
    @abc.abstractmethod
    def paused(self) -> bool: ...
    @abc.abstractmethod
    def fail(self, error: TfpsError) -> None: ...
    @abc.abstractmethod
    def _give(self, number: int, worker: Worker, push: Push) -> None: ...
    @abc.abstractmethod
    def _give_asks(self, number: int, worker: Worker) -> None: ...
    @abc.abstractmethod
    def _call(self, what: Callable[[Worker], _T], stop: threading.Event | None = None) -> _T: ...

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        target = declared(self._buckets, bucket)
        with target.lock:
            if isinstance(kept := self._kept_of(target), Kept | Newest):  # it goes with the next push
                kept.writes.append(Write(array, begin, bytes(as_bytes(values) or b"")))
                return
        self._call(lambda worker: worker.write(bucket, array, begin, values))

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        declared(self._buckets, bucket)

        def read(worker: Worker) -> Array:
            self._check_there(bucket)
            return worker.read(bucket, array, begin, nbytes)

        return self._call(read)

    def _check_current(self, worker: Worker) -> None:
        """PserverLostError: what `worker` has just done is done again with the next one. Caller holds the lock."""
        if self._worker is not worker or self._regrouping:
            raise PserverLostError("a pserver was lost meanwhile")

    def quiesce(self) -> None:
        def quiesce(worker: Worker) -> None:
            worker.peers.quiesce()
            with self._changed:
                self._check_current(worker)  # else it tells the next ones
                self._quiesced = True

        self._call(quiesce)

    def fetch_add(self, counter: str) -> int:
        def draw(worker: Worker) -> int:
            number = worker.peers.fetch_add(counter)
            with self._changed:
                self._check_current(worker)  # else another rank may get it from the next
                self._drawn[counter] = max(self._drawn.pop(counter, 0), number + 1)  # last
                if len(self._drawn) > _MOST_COUNTERS:
                    del self._drawn[next(iter(self._drawn))]
            return number

        return self._call(draw)

    def _kept_of(self, bucket: ElasticBucket) -> AnyKept | None:
        """What is kept; a candidate keeps nothing, as nobody gets what it pushes."""
        return None if self._is_candidate else bucket.kept

    def _waits(self, bucket: ElasticBucket) -> bool:
        """Whether what is pushed now comes after pushes that are to be given again."""
        log = bucket.log
        return self._replaying and log is not None and not (log.all_given and log.given == log.replies)

    def _check_there(self, number: int) -> None:
        """Raises WorkerLostError if nobody has what pservers kept of a bucket."""
        if self._buckets[number].gone:
            raise WorkerLostError(
                f"{self._missing(number)}: in the last steps before workers were lost or joined, or all had assigned "
                "values"
            )

    def _missing(self, number: int) -> str:
        return (
            f"nobody has all that a lost pserver kept of '{self._worker.specs()[number].name}' any more; begin the job "
            "again, from its last checkpoint"
        )

    def _snapshots(self) -> list[pb.Snapshot]:
        """All that this worker has, for a report."""
        return [
            pb.Snapshot(
                bucket=number,
                step=step,
                ranks=snapshot.ranks if step else kept.ranks,
                part=bool(snapshot.ranks if (is_table := isinstance(kept, KeptTable)) else snapshot.values),
                folder=snapshot.folder if is_table else None,
                assigned=snapshot.assigned,
            )
            for number, bucket in enumerate(self._buckets)
            if (kept := bucket.log) is not None
            for step, snapshot in kept.snapshots.items()
        ]

    def _newest(self) -> list[pb.Newest]:
        return [bucket.kept.report() for bucket in self._buckets if isinstance(bucket.kept, Newest | NewestTable)]

    def _can_move(self) -> bool:
        """Whether workers have all that pservers keep, so that these may change."""
        ranks = self._worker.view.ranks
        kept = [bucket.kept for bucket in self._buckets if bucket.kept is not None]
        return not self.paused and all(each.oldest in (None, ranks) for each in kept)

    def _agree_to_move(self, timeout_s: float) -> bool:
        """Whether the pservers may change now, for all workers."""
        with self._changed:
            worker = self._worker
        if self._can_move() and self.config.applies_each_push:  # ranks step apart: others may not have theirs yet
            worker.meet(timeout_s)
        return self._can_move() and self._worker is worker

    def _begin_replay(self) -> set[int]:
        """Returns the buckets that `_replay` is for. Caller holds the lock."""
        behind = {
            number
            for number, bucket in enumerate(self._buckets)
            if (bucket.log is not None and not self._is_candidate) or (bucket.gone and bucket.pushes)
        }
        for number in behind:
            self._buckets[number].behind = True
        self._replaying = bool(behind)
        ready = self._to_replay = queue.SimpleQueue()
        for number in behind:
            ready.put(number)
        return behind

    def _start_replay(self, worker: Worker, behind: set[int]) -> None:
        if behind:
            arguments = [worker, behind, self._to_replay]
            threading.Thread(target=self._replay, args=arguments, name="tfps-replay", daemon=True).start()

    def _replay(self, worker: Worker, behind: set[int], ready: queue.SimpleQueue[int | None]) -> None:
        """Gives what is kept to `worker`, each push when the one before has been answered; on its own thread.

        It needs nothing of this program, nor of others': all ranks have kept what they had pushed.
        """
        try:
            while behind:
                if (number := ready.get()) is None:
                    return
                bucket = self._buckets[number]
                with bucket.lock:
                    if bucket.worker is not worker:
                        return
                    if bucket.pushes or bucket.asks:
                        self._check_there(number)
                    if (kept := bucket.log) is None:
                        return
                    if not kept.all_given and kept.given == kept.replies:
                        self._give(number, worker, kept.next)
                    if kept.all_given and kept.replies >= bucket.replies:
                        behind.discard(number)
                        bucket.behind = False
                        self._give_asks(number, worker)
            with self._changed:
                if self._worker is worker:
                    self._replaying = False
                    self._changed.notify_all()
        except TfpsError as error:
            self.fail(error)
        except Exception as bug:  # else whatever asks this worker would wait for ever
            self.fail(TfpsError(f"rank {self.rank}: could not give other pservers what it has kept: {bug!r}"))

    def _differs(self, number: int) -> None:
        """Fails, as a round that programs have had is computed again without a worker that has just gone."""
        text = f"a worker has gone while pservers computed again what they had: {self._missing(number)}"
        error = WorkerLostError(text)
        threading.Thread(target=self.fail, args=[error], name="tfps-replay-failed", daemon=True).start()

    def _restore_kept(
        self,
        worker: Worker,
        steps: Sequence[int],
        ranks: tuple[int, ...],
        newest: Mapping[int, int],
        folders: Mapping[int, str],
    ) -> None:
        """Gives `worker`, which goes on with `ranks`, this rank's part of what pservers keep; see RegroupReply."""
        self._restored_with = ranks
        for number, bucket in enumerate(self._buckets):
            step = steps[number] if number < len(steps) else 0  # others declare it again
            if isinstance(bucket.kept, Newest):
                bucket.replies = step  # ranks step apart: all go on with the number of the first
                if not bucket.gone:
                    bucket.kept.restore(self.rank, ranks, worker, bucket.pushes, newest.get(number))
            elif isinstance(bucket.kept, NewestTable):
                bucket.replies = step
                if not bucket.gone:
                    bucket.kept.restore_files(step, worker, folders.get(number, ""))
            elif isinstance(bucket.kept, Kept):
                if bucket.gone:
                    bucket.kept.begin(step)
                elif isinstance(bucket.kept, KeptTable):
                    bucket.kept.restore_files(step, worker, folders.get(number, ""))
                else:
                    bucket.kept.restore(step, worker)
            bucket.begun = bucket.asked
        for counter, known in self._drawn.items():
            worker.follow(counter, known)

    def _note_replayed(self, number: int, push: Push) -> None:
        """Goes on after `push` of a bucket has been answered, maybe not for the first time. Caller holds its lock."""
        bucket = self._buckets[number]
        if self._replaying and (log := bucket.log) is not None:
            self._to_replay.put(number)
            if push not in bucket.pushes and log.ranks != self._restored_with:
                self._differs(number)

    def is_awaited(self, bucket: int) -> bool:
        return self._call(lambda worker: worker.peers.is_awaited(bucket))
