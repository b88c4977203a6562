"""The `Tables` of a worker: rows and their gradients go in frames, all else is calls.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from tfps.config import Config
from tfps.exchange.interface import FailureState, OnReply, Reply, Tables, Wait
from tfps.exchange.requests import Assign, Load, Lookup, Request, RowUpdate, Save, SavedRows
from tfps.protos import tfps_pb2 as pb
from tfps.types import Argument
from tfps.wire.control import STATE_PIECE_BYTES
from tfps.worker.client import PserverClient
from tfps.worker.joining import WorkerJoining
from tfps.worker.pushes import Pushes

_DONE = SavedRows(0, 0, 0)
_CALL_TIMEOUT_S = 24 * 3600.0  # to save or load a table: it is as large as disks are slow


class WorkerTables:
    """See `Tables`."""

    def __init__(
        self, config: Config, pushes: Pushes, client: PserverClient, joining: WorkerJoining, failures: FailureState
    ) -> None:
        self._config, self._pushes, self._client = config, pushes, client
        self._joining, self._failures = joining, failures

    @property
    def _trial(self) -> Tables | None:
        """Who takes lookups and updates until this worker takes part."""
        return None if (trial := self._joining.trial) is None else trial.tables

    def lookup(self, request: Lookup, on_reply: OnReply) -> None:
        if (trial := self._trial) is not None:
            trial.lookup(request, on_reply)
        else:
            self._begin(request)(on_reply)

    def prefetch(self, request: Lookup) -> Wait | None:
        return self._begin(request) if self._trial is None else None

    def _begin(self, request: Lookup) -> Wait:
        target = self._pushes.table(request.table)
        with target.lock:  # as in `Pushes.put`
            rows, frames = target.lookup(request, self._failures)
            if self._failures.end is None:
                self._pushes.send(frames)
        return rows.wait

    def apply(self, request: RowUpdate, on_reply: OnReply) -> None:
        if (trial := self._trial) is not None:
            trial.apply(request, on_reply)
            return
        target = self._pushes.table(request.table)
        with target.lock:
            if (end := self._failures.end) is None:
                self._pushes.step = max(self._pushes.step, request.step)
                self._pushes.send(target.apply(request, on_reply))
        if end is not None:
            on_reply(Reply(error=end))

    def save(self, request: Save) -> SavedRows:
        if self._trial is not None:
            return _DONE  # the others have saved them
        about: dict[str, Argument] = {"folder": request.folder, "name": request.name, "since": request.since}
        message = pb.SaveRowsRequest(**self._about(request), **about, before=request.before, remove=request.remove)
        found = self._on_all("SaveRows", message)
        return _together(found)._replace(full=all(each.full for each in found))

    def load(self, request: Load) -> SavedRows:
        if self._trial is not None:
            return _DONE  # the others have, and go on from there
        about: dict[str, Argument] = {"folders": request.folders, "name": request.name, "id": request.identity}
        message = pb.RestoreRowsRequest(**self._about(request), **about, alone=request.alone, seed=request.seed)
        found = self._on_all("RestoreRows", message)
        return _together(found)._replace(slots=all(each.slots for each in found))

    def assign(self, request: Assign) -> None:
        if self._trial is not None:
            return
        ids, rows, calls = request.ids, request.rows, []
        each = max(STATE_PIECE_BYTES // max(rows[:1].nbytes, 1), 1)
        for owner, places in self._pushes.table(request.table).by_owner(ids):
            for number, begin in enumerate(range(0, len(places), each)):
                some = places[begin : begin + each]
                values = np.ascontiguousarray(rows[some], "<f4").tobytes()
                message = pb.PutRowsRequest(**self._about(request), id=f"{request.identity}/{number}")
                message.ids, message.values = ids[some].astype("<i8").tobytes(), values
                calls.append((self._client.pservers[owner], message))
        for pserver, message in calls:
            pserver.call_while(self._goes_on, "PutRows", message, _CALL_TIMEOUT_S)

    def _about(self, request: Request) -> dict[str, Argument]:
        limit_s = self._config.step_timeout_s
        return {**self._client.me, "bucket": request.table, "step": request.step, "timeout_s": limit_s}

    def _goes_on(self) -> bool:
        return self._failures.end is None

    def _on_all(self, name: str, message: Message) -> list[Argument]:
        """The replies of all pservers, which work at the same time; raises the first error."""
        self._failures.check()
        pservers = self._client.pservers
        with concurrent.futures.ThreadPoolExecutor(len(pservers), "tfps-rows") as pool:
            calls = [pool.submit(each.call_while, self._goes_on, name, message, _CALL_TIMEOUT_S) for each in pservers]
            return [call.result() for call in calls]


def _together(found: Sequence[Argument]) -> SavedRows:
    steps, rows, nbytes = zip(*((each.step, each.rows, each.nbytes) for each in found), strict=True)
    return SavedRows(max(steps), sum(rows), sum(nbytes))
