"""The `Tables` of an `ElasticExchange`: what has been asked is asked again; what is kept is in rows.py.

Tested in tests/worker/test_kept_tables.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.codecs import Floats
from tfps.exchange.interface import Foreseen, OnReply, Reply, SavedRows, declared
from tfps.recovery.core import Core
from tfps.recovery.journal import Push
from tfps.recovery.pushing import Pushing
from tfps.recovery.rows import Ask, RowsPush
from tfps.recovery.snapshots import Snapshots
from tfps.worker.worker import Worker

Ids = NDArray[np.int64]
_NOTHING = np.empty(0, np.uint8)


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


class ElasticTables:
    """See `Tables`."""

    def __init__(self, core: Core, pushing: Pushing, snapshots: Snapshots) -> None:
        self._core, self._pushing, self._snapshots = core, pushing, snapshots

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
        bucket, ask = declared(self._core.buckets, table), Ask(ids, step, on_reply, trains, complete, attempt)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this.
            if (end := self._core.failures.end) is None:
                self._core.check_there(table)
                bucket.asks.append(ask)
                if bucket.worker is not None and not bucket.behind:
                    self._give_ask(table, bucket.worker, ask)
        if end is not None:
            on_reply(Reply(error=end))

    def _give_ask(self, number: int, worker: Worker, ask: Ask) -> None:
        """Gives `ask` to `worker`. Caller holds the bucket's lock."""
        bucket, ask.worker = self._core.buckets[number], worker
        bucket.asked = max(bucket.asked, ask.step if ask.trains else -1)
        # Of a step that had begun with other pservers these do not know all that was asked for.
        complete = ask.complete and ask.step > bucket.begun
        take = functools.partial(self._take_rows, number, worker, ask)
        step = ask.step + bucket.ahead
        worker.tables.ask(number, ask.ids, step, take, trains=ask.trains, complete=complete, attempt=ask.attempt)

    def give_asks(self, number: int, worker: Worker) -> None:
        for ask in list(self._core.buckets[number].asks):
            if ask.worker is not worker:
                self._give_ask(number, worker, ask)

    def _take_rows(self, number: int, worker: Worker, ask: Ask, reply: Reply) -> None:
        """Takes an answer, unless another worker will be asked."""
        bucket = self._core.buckets[number]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and self._core.goes_on(reply.error)):
                return
            if ask not in bucket.asks:
                return
            bucket.asks.remove(ask)
        ask.on_reply(reply)

    def foresee(self, table: int, ids: Ids, step: int) -> Foreseen | None:
        bucket = declared(self._core.buckets, table)
        with bucket.lock:
            worker = bucket.worker
            if worker is None or bucket.behind:
                return None
            if (found := worker.tables.foresee(table, ids, step + bucket.ahead)) is None:
                return None
        return _Foreseen(found, worker, ids, step, functools.partial(self._wait_for, table))

    def _wait_for(self, table: int, foreseen: _Foreseen, on_reply: OnReply) -> None:
        bucket = declared(self._core.buckets, table)
        with bucket.lock:
            if bucket.worker is foreseen.worker and self._core.failures.end is None:
                ask = Ask(foreseen.ids, foreseen.step, on_reply, trains=True, worker=foreseen.worker)
                bucket.asks.append(ask)
                bucket.asked = max(bucket.asked, ask.step)
                foreseen.found.wait(functools.partial(self._take_rows, table, foreseen.worker, ask))
                return
        self.ask(table, foreseen.ids, foreseen.step, on_reply, trains=True)

    def add(self, table: int, ids: Ids, gradients: Floats, step: int, step_scalars: bytes, on_reply: OnReply) -> None:
        push = RowsPush(None, on_reply, step_scalars=step_scalars, ids=ids, gradients=gradients, step=step)
        bucket = declared(self._core.buckets, table)
        with bucket.lock:
            bucket.added = step + 1
            self._pushing.put(table, push)

    def drop_given(self) -> list[tuple[Push, Reply]]:
        """Drops gradients that pservers may have had, in other modes than "sync", and counts steps as they do now.

        Returns them, which are answered once all goes on.
        """
        answered: list[tuple[Push, Reply]] = []
        for bucket in self._core.buckets:
            if (kept := bucket.kept) is None or kept.files is None or kept.replays:
                continue
            with bucket.lock:
                given = kept.dropped(bucket.pushes)
                waiting = [push for push in bucket.pushes if push not in given]
                bucket.pushes.clear()
                bucket.pushes.extend(waiting)
                first = waiting[0].step if waiting and isinstance(waiting[0], RowsPush) else bucket.added
                bucket.ahead = bucket.replies - first
            answered += [(push, Reply(sum=_NOTHING, step=bucket.replies)) for push in given]
        return answered

    def save_rows(self, table: int, step: int, folder: str, name: str, since: int | None) -> SavedRows:
        bucket = declared(self._core.buckets, table)

        def save(worker: Worker) -> SavedRows:
            self._core.check_there(table)
            return worker.tables.save_rows(table, step + bucket.ahead, folder, name, since)

        return self._core.call(save)

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
            return worker.tables.restore_rows(table, step, folders, name, identity, alone=alone, seed=seed)

        return self._snapshots.replace(table, step, restore)

    def put_rows(self, table: int, step: int, ids: Ids, rows: Floats, identity: str) -> None:
        def put(worker: Worker, step: int) -> None:
            worker.tables.put_rows(table, step, ids, rows, identity)

        self._snapshots.replace(table, step, put)
