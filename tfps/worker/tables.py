"""The `Tables` of a worker.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tfps.exchange.codecs import Floats
from tfps.exchange.interface import Foreseen, OnReply, SavedRows
from tfps.wire.rows import Ids
from tfps.worker.client import PserverClient
from tfps.worker.pushes import Pushes
from tfps.worker.trial import Trial


class WorkerTables:
    """See `Tables`; `way` returns where requests and gradients go now, maybe to nobody."""

    def __init__(self, pushes: Pushes, client: PserverClient, way: Callable[[], Pushes | Trial]) -> None:
        self._pushes, self._client, self._way = pushes, client, way

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
        self._pushes.table(table)
        self._way().ask(table, ids, step, on_reply, trains=trains, complete=complete, attempt=attempt)

    def foresee(self, table: int, ids: Ids, step: int) -> Foreseen | None:
        self._pushes.table(table)
        return self._way().foresee(table, ids, step)

    def add(self, table: int, ids: Ids, gradients: Floats, step: int, step_scalars: bytes, on_reply: OnReply) -> None:
        self._pushes.table(table)
        self._way().add(table, ids, gradients, step, step_scalars, on_reply)

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
        pservers = self._client.membership.view.pservers
        owners = self._pushes.table(table).table.owners(ids, len(pservers))
        self._client.put_rows(table, step, ids, rows, identity, np.asarray(pservers)[owners])
