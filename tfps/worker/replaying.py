"""How an `ElasticWorker` gives other pservers what is kept of the buckets that they update; see kept.py.

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from tfps.config import Config
from tfps.errors import TfpsError, WaitTimeoutError, WorkerLostError
from tfps.exchange.interface import Payload, as_bytes, declared
from tfps.types import Array
from tfps.worker.kept import ElasticBucket, Kept, Push, Write
from tfps.worker.worker import Worker

_T = TypeVar("_T")


class Replaying(abc.ABC):
    """The part of an `ElasticWorker` that knows what pservers keep."""

    config: Config
    _worker: Worker
    _buckets: list[ElasticBucket]
    _changed: threading.Condition
    _regrouping: bool
    _is_candidate: bool
    _over: threading.Event
    _to_replay: queue.SimpleQueue[int | None]  # buckets that may give their next push; None: no more

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...
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
        target = declared(self._buckets, bucket)

        def read(worker: Worker) -> Array:
            def is_current() -> bool:
                behind = (kept := self._kept_of(target)) is not None and kept.replies < target.replies
                return not behind or self._worker is not worker or self._regrouping or self._over.is_set()

            self._check_there(bucket)
            with self._changed:
                if not self._changed.wait_for(is_current, self.config.step_timeout_s):
                    raise WaitTimeoutError(f"rank {self.rank}: pservers do not have the last step of bucket {bucket}")
            return worker.read(bucket, array, begin, nbytes)

        return self._call(read)

    def _kept_of(self, bucket: ElasticBucket) -> Kept | None:
        """What is kept; a candidate keeps nothing, as nobody gets what it pushes."""
        return None if self._is_candidate else bucket.kept

    def _check_there(self, number: int) -> None:
        """Raises WorkerLostError if nobody has what pservers kept of a bucket."""
        if self._buckets[number].gone:
            raise WorkerLostError(
                f"nobody has all that a lost pserver kept of '{self._worker.specs()[number].name}': a worker was lost, "
                "or joined, in the last steps before; begin the job again, from its last checkpoint"
            )

    def _begin_replay(self, worker: Worker) -> None:
        behind = {number for number, bucket in enumerate(self._buckets) if self._kept_of(bucket) is not None}
        ready = self._to_replay = queue.SimpleQueue()
        for number in behind:
            ready.put(number)
        if behind:
            arguments = [worker, behind, ready]
            threading.Thread(target=self._replay, args=arguments, name="tfps-replay", daemon=True).start()

    def _replay(self, worker: Worker, behind: set[int], ready: queue.SimpleQueue[int | None]) -> None:
        """Gives what is kept to `worker`, each push when the one before has been answered; on its own thread."""
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
                    if kept.all_given:
                        behind.discard(number)
        except TfpsError as error:
            self.fail(error)
