"""How an `ElasticWorker` gives other pservers what is kept of the buckets that they update; see kept.py.

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from tfps.errors import TfpsError, WorkerLostError
from tfps.exchange.interface import Payload, as_bytes, declared
from tfps.protos import tfps_pb2 as pb
from tfps.types import Array
from tfps.worker.kept import ElasticBucket, Kept, Push, Write
from tfps.worker.worker import Worker

_T = TypeVar("_T")


class Replaying(abc.ABC):
    """The part of an `ElasticWorker` that knows what pservers keep."""

    _worker: Worker
    _buckets: list[ElasticBucket]
    _changed: threading.Condition
    _replaying = False  # whether the pservers do not have all that has been answered, yet
    _is_candidate: bool
    _to_replay: queue.SimpleQueue[int | None]  # buckets that may give their next push; None: no more

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
    def _call(self, what: Callable[[Worker], _T], stop: threading.Event | None = None) -> _T: ...

    def write(self, bucket: int, array: int, begin: int, values: Payload) -> None:
        target = declared(self._buckets, bucket)
        with target.lock:
            if (kept := self._kept_of(target)) is not None:  # it goes with the next push
                kept.writes.append(Write(array, begin, bytes(as_bytes(values) or b"")))
                return
        self._call(lambda worker: worker.write(bucket, array, begin, values))

    def read(self, bucket: int, array: int, begin: int, nbytes: int) -> Array:
        declared(self._buckets, bucket)

        def read(worker: Worker) -> Array:
            self._check_there(bucket)
            return worker.read(bucket, array, begin, nbytes)

        return self._call(read)

    def _kept_of(self, bucket: ElasticBucket) -> Kept | None:
        """What is kept; a candidate keeps nothing, as nobody gets what it pushes."""
        return None if self._is_candidate else bucket.kept

    def _check_there(self, number: int) -> None:
        """Raises WorkerLostError if nobody has what pservers kept of a bucket."""
        if self._buckets[number].gone:
            raise WorkerLostError(f"{self._missing(number)}: a worker was lost, or joined, in the last steps before")

    def _missing(self, number: int) -> str:
        return (
            f"nobody has all that a lost pserver kept of '{self._worker.specs()[number].name}' any more; begin the job "
            "again, from its last checkpoint"
        )

    def _snapshots(self) -> list[pb.Snapshot]:
        """All that this worker has, for a report."""
        return [
            pb.Snapshot(
                bucket=number, step=step, ranks=snapshot.ranks if step else kept.ranks, part=bool(snapshot.values)
            )
            for number, bucket in enumerate(self._buckets)
            if (kept := bucket.kept) is not None
            for step, snapshot in kept.snapshots.items()
        ]

    def _can_move(self) -> bool:
        """Whether workers have all that pservers keep, so that these may change."""
        ranks = self._worker.view.ranks
        kept = [bucket.kept for bucket in self._buckets if bucket.kept is not None]
        return not self.paused and all(each.oldest in (None, ranks) for each in kept)

    def _begin_replay(self) -> set[int]:
        """Returns the buckets that `_replay` is for. Caller holds the lock."""
        behind = {number for number, bucket in enumerate(self._buckets) if self._kept_of(bucket) is not None}
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
                    if bucket.worker is not worker or (kept := bucket.kept) is None:
                        return
                    if bucket.pushes:
                        self._check_there(number)
                    if not kept.all_given and kept.given == kept.replies:
                        self._give(number, worker, kept.next)
                    if kept.all_given and kept.replies >= bucket.replies:
                        behind.discard(number)
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
        error = WorkerLostError(
            f"a worker has gone while pservers computed again what they had: {self._missing(number)}"
        )
        threading.Thread(target=self.fail, args=[error], name="tfps-replay-failed", daemon=True).start()

    def is_awaited(self, bucket: int) -> bool:
        return self._call(lambda worker: worker.peers.is_awaited(bucket))
