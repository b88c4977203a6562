"""What a `Worker` does with tables; a part of it.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange import interface
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import FailureState, OnReply, Reply, SavedRows
from tfps.membership.view import View
from tfps.wire.rows import Ids
from tfps.wire.send_queue import SendQueue
from tfps.worker.bucket import Push, PushedBucket
from tfps.worker.client import PserverClient
from tfps.worker.newcomer import Newcomer
from tfps.worker.table_bucket import ForeseenRows, Frames, TableBucket


class WorkerTables(abc.ABC):
    """The part of a `Worker` that knows tables. See `Tables`."""

    newcomer: Newcomer | None
    _client: PserverClient
    _failures: FailureState
    _buckets: list[PushedBucket]
    _queues: list[SendQueue]
    _step: int

    @property
    @abc.abstractmethod
    def view(self) -> View: ...

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
        target = self._table(table)
        if self.newcomer is not None:
            self.newcomer.alone.ask(table, ids, step, on_reply, trains=trains)
            return
        empty = not len(ids) and not complete
        with target.lock:  # as in `_push`
            if (end := self._failures.end) is None and not empty:
                push = Push(None, on_reply)
                self._send_rows(target.ask(table, ids, step, push, trains=trains, complete=complete, attempt=attempt))
        if end is not None or empty:
            on_reply(Reply(error=end) if end is not None else Reply(sum=np.empty(0, np.uint8)))

    def foresee(self, table: int, ids: Ids, step: int) -> ForeseenRows | None:
        target = self._table(table)
        if self.newcomer is not None:
            return None
        foreseen = ForeseenRows(target, step, lambda: self._failures.end)
        with target.lock:
            if self._failures.end is None:
                self._send_rows(target.foresee(table, ids, foreseen))
        return foreseen

    def add(self, table: int, ids: Ids, gradients: Floats, step: int, step_scalars: bytes, on_reply: OnReply) -> None:
        target = self._table(table)
        if self.newcomer is not None:
            self.newcomer.alone.add(table, ids, gradients, step, step_scalars, on_reply)
            return
        with target.lock:
            if (end := self._failures.end) is None:
                self._step = max(self._step, step)
                self._send_rows(target.add(table, ids, gradients, step, step_scalars, on_reply))
        if end is not None:
            on_reply(Reply(error=end))

    def save_rows(
        self,
        table: int,
        step: int,
        folder: str,
        name: str,
        since: int | None,
        before: str = "",
        remove: Sequence[str] = (),
    ) -> SavedRows:
        return self._client.save_rows(table, step, folder, name, since, before, remove)

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
        return self._client.restore_rows(table, step, folders, name, identity, alone, seed)

    def put_rows(self, table: int, step: int, ids: Ids, rows: Floats, identity: str) -> None:
        owners = self._table(table).table.owners(ids, len(self.view.pservers))
        self._client.put_rows(table, step, ids, rows, identity, np.asarray(self.view.pservers)[owners])

    def _table(self, number: int) -> TableBucket:
        if not isinstance(target := interface.declared(self._buckets, number), TableBucket):
            raise ProtocolError(f"bucket '{target.spec.name}' is no table")
        return target

    def _send_rows(self, frames_: Frames) -> None:
        for pserver, item in frames_:
            self._queues[pserver].put([item])
