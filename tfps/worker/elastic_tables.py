"""How an `ElasticWorker` goes on with tables: what has been asked is asked again, what is kept is in kept_rows.py.

Tested in tests/worker/test_kept_tables.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import abc
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ClosedError, ConnectError, PserverLostError, TfpsError, WaitTimeoutError
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import BucketSpec, FailureState, Foreseen, OnReply, Reply, SavedRows, declared
from tfps.worker.kept import Push
from tfps.worker.kept_rows import Ask, KeptTable, NewestTable, RowsPush
from tfps.worker.replaying import Replaying
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")
Ids = NDArray[np.int64]
_NOTHING = np.empty(0, np.uint8)
_T = TypeVar("_T")
_LOST = (ClosedError, ConnectError, PserverLostError, WaitTimeoutError)


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """Rows that were asked for ahead, of a worker that may have been replaced meanwhile."""

    found: Foreseen
    worker: Worker
    ids: Ids
    step: int
    wait_for: Callable[[_Foreseen, OnReply], None]

    def wait(self, on_reply: OnReply) -> None:
        self.wait_for(self, on_reply)


class ElasticTables(Replaying):
    """The part of an `ElasticWorker` that knows tables. See `Tables`."""

    _failures: FailureState

    @property
    def _loses_rows(self) -> bool:
        """Whether there are tables of which nothing is kept."""
        specs = self._worker.specs()
        kept = {number for number, bucket in enumerate(self._buckets) if bucket.kept is not None}
        tables = {number for number, spec in enumerate(specs) if spec.kind == "table"}
        return bool(tables - kept - {spec.replaces for spec in specs})

    def ask(
        self,
        table: int,
        ids: Ids,
        step: int,
        on_reply: OnReply,
        *,
        trains: bool,
        complete: bool = False,
        attempt: int = 0,
    ) -> None:
        bucket, ask = declared(self._buckets, table), Ask(ids, step, on_reply, trains, complete, attempt)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this.
            if (end := self._failures.end) is None:
                self._check_there(table)
                bucket.asks.append(ask)
                if bucket.worker is not None and not bucket.behind:
                    self._give_ask(table, bucket.worker, ask)
        if end is not None:
            on_reply(Reply(error=end))

    def _give_ask(self, number: int, worker: Worker, ask: Ask) -> None:
        """Gives `ask` to `worker`. Caller holds the bucket's lock."""
        bucket, ask.worker = self._buckets[number], worker
        bucket.asked = max(bucket.asked, ask.step if ask.trains else -1)
        # Of a step that had begun with other pservers these do not know all that was asked for.
        complete = ask.complete and ask.step > bucket.begun
        take = functools.partial(self._take_rows, number, worker, ask)
        step = ask.step + bucket.ahead
        worker.ask(number, ask.ids, step, take, trains=ask.trains, complete=complete, attempt=ask.attempt)

    def _give_asks(self, number: int, worker: Worker) -> None:
        for ask in list(self._buckets[number].asks):
            if ask.worker is not worker:
                self._give_ask(number, worker, ask)

    def _take_rows(self, number: int, worker: Worker, ask: Ask, reply: Reply) -> None:
        """Takes an answer, unless another worker will be asked."""
        bucket = self._buckets[number]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and self._goes_on(reply.error)):
                return
            if ask not in bucket.asks:
                return
            bucket.asks.remove(ask)
        ask.on_reply(reply)

    def foresee(self, table: int, ids: Ids, step: int) -> Foreseen | None:
        bucket = declared(self._buckets, table)
        with bucket.lock:
            worker = bucket.worker
            if worker is None or bucket.behind:
                return None
            if (found := worker.foresee(table, ids, step + bucket.ahead)) is None:
                return None
        return _Foreseen(found, worker, ids, step, functools.partial(self._wait_for, table))

    def _wait_for(self, table: int, foreseen: _Foreseen, on_reply: OnReply) -> None:
        bucket = declared(self._buckets, table)
        with bucket.lock:
            if bucket.worker is foreseen.worker and self._failures.end is None:
                ask = Ask(foreseen.ids, foreseen.step, on_reply, trains=True, worker=foreseen.worker)
                bucket.asks.append(ask)
                bucket.asked = max(bucket.asked, ask.step)
                foreseen.found.wait(functools.partial(self._take_rows, table, foreseen.worker, ask))
                return
        self.ask(table, foreseen.ids, foreseen.step, on_reply, trains=True)

    def add(self, table: int, ids: Ids, gradients: Floats, step: int, step_scalars: bytes, on_reply: OnReply) -> None:
        push = RowsPush(None, on_reply, step_scalars=step_scalars, ids=ids, gradients=gradients, step=step)
        bucket = declared(self._buckets, table)
        with bucket.lock:
            bucket.added = step + 1
            self._push(table, push)

    def _drop_given(self) -> list[tuple[Push, Reply]]:
        """Drops gradients that pservers may have had, in other modes than "sync", and counts steps as they do now.

        Returns them, which are answered once all goes on.
        """
        answered: list[tuple[Push, Reply]] = []
        for bucket in self._buckets:
            if not isinstance(bucket.kept, NewestTable):
                continue
            with bucket.lock:
                given = [push for push in bucket.pushes if push.given]
                waiting = [push for push in bucket.pushes if not push.given]
                bucket.pushes.clear()
                bucket.pushes.extend(waiting)
                first = waiting[0].step if waiting and isinstance(waiting[0], RowsPush) else bucket.added
                bucket.ahead = bucket.replies - first
            answered += [(push, Reply(sum=_NOTHING, step=bucket.replies)) for push in given]
        return answered

    # Snapshots

    def _know_table(self, number: int, spec: BucketSpec) -> None:
        """Knows a table, which may go on with the rows of another one."""
        kept = self._buckets[number].kept
        if kept is None and self.rank == self._worker.view.ranks[0]:
            logger.warning(
                "tfps: the loss of a pserver ends this job, as it has the rows of table '%s' alone: snapshot_steps "
                "and snapshot_folder let training survive that",
                spec.name,
            )
        if isinstance(kept, KeptTable | NewestTable) and spec.replaces is not None:
            old, bucket = self._buckets[spec.replaces], self._buckets[number]
            bucket.added, bucket.ahead = old.added, old.ahead
            if isinstance(old.kept, KeptTable | NewestTable):
                kept.follow(old.kept)
            old.kept = None

    def _saves_before(self, number: int, worker: Worker, push: RowsPush) -> bool:
        """Whether `push` waits for a snapshot, which this rank has pservers write. Caller holds the lock."""
        bucket = self._buckets[number]
        kept, push.ahead = self._kept_of(bucket), bucket.ahead
        if not isinstance(kept, KeptTable | NewestTable):
            return False
        if kept.files.saving is worker:
            return True
        if not kept.is_due_of(self.rank, worker.view.ranks):
            return False
        kept.files.saving = worker
        arguments = [number, worker, kept, push]
        threading.Thread(target=self._save, args=arguments, name="tfps-snapshot", daemon=True).start()
        return True

    def _save(self, number: int, worker: Worker, kept: KeptTable | NewestTable, push: RowsPush) -> None:
        """Takes a snapshot before `push`, and goes on; on its own thread, as it may take long."""
        bucket, name = self._buckets[number], self._worker.specs()[number].name
        try:
            save = kept.files.write(worker, push.step + push.ahead)
            with bucket.lock:
                if bucket.worker is worker and kept.files.saving is worker:
                    kept.wrote(save)
                    kept.files.saving = None
                    # Those that are to be given again follow one by one (`_replay`).
                    for each in [push] if bucket.behind else [each for each in bucket.pushes if not each.given]:
                        self._give(number, worker, each)
        except TfpsError as error:
            if not (isinstance(error, _LOST) and self._is_lost(worker)):  # else all is given again
                self.fail(type(error)(f"no snapshot of table '{name}' could be taken (snapshot_folder): {error}"))
        except Exception as bug:  # else every push would wait for ever
            self.fail(TfpsError(f"no snapshot of table '{name}' could be taken: {bug!r}"))

    def save_rows(self, table: int, step: int, folder: str, name: str, since: int | None) -> SavedRows:
        bucket = declared(self._buckets, table)

        def save(worker: Worker) -> SavedRows:
            self._check_there(table)
            return worker.save_rows(table, step + bucket.ahead, folder, name, since)

        return self._call(save)

    def restore_rows(
        self,
        table: int,
        step: int,
        folders: Sequence[str],
        name: str,
        identity: str,
        *,
        alone: bool = False,
        seed: str = "",
    ) -> SavedRows:
        def restore(worker: Worker, step: int) -> SavedRows:
            return worker.restore_rows(table, step, folders, name, identity, alone=alone, seed=seed)

        return self._replace(table, step, restore)

    def put_rows(self, table: int, step: int, ids: Ids, rows: Floats, identity: str) -> None:
        def put(worker: Worker, step: int) -> None:
            worker.put_rows(table, step, ids, rows, identity)

        self._replace(table, step, put)

    def _replace(self, table: int, step: int, what: Callable[[Worker, int], _T]) -> _T:
        """Replaces rows and takes a snapshot of that, both again if a pserver is lost meanwhile."""
        bucket = declared(self._buckets, table)

        def replace(worker: Worker) -> _T:
            self._check_there(table)
            at = step + bucket.ahead
            found, kept, ranks = what(worker, at), self._kept_of(bucket), worker.view.ranks
            if isinstance(kept, KeptTable | NewestTable):
                save = kept.files.write(worker, at) if self.rank == ranks[0] else None
                with self._changed:
                    self._check_current(worker)
                    kept.replaced(ranks, save)
            return found

        return self._call(replace)

    @abc.abstractmethod
    def _goes_on(self, error: TfpsError) -> bool: ...
    @abc.abstractmethod
    def _push(self, number: int, push: Push) -> None: ...
    @abc.abstractmethod
    def _is_lost(self, worker: Worker) -> bool: ...
