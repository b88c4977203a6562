"""The `Tables` of an `ElasticExchange`: a lookup without an answer is made again; the journals are in rows.py.

Tested in tests/worker/test_replay_of_rows.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from tfps.exchange.interface import OnReply, Reply, Tables, Wait, declared
from tfps.exchange.requests import Assign, Load, Lookup, R, RowUpdate, Save, SavedRows, later
from tfps.recovery.core import Core, saved_by
from tfps.recovery.journal import Push
from tfps.recovery.pushing import Pushing
from tfps.recovery.rows import OpenLookup, RowsPush
from tfps.worker.worker import Worker

_T = TypeVar("_T")
_NOTHING = np.empty(0, np.uint8)


class ElasticTables:
    """See `Tables`."""

    def __init__(self, core: Core, pushing: Pushing) -> None:
        self._core, self._pushing = core, pushing

    def lookup(self, request: Lookup, on_reply: OnReply) -> None:
        bucket, lookup = declared(self._core.buckets, request.table), OpenLookup(request, on_reply)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this.
            if (end := self._core.failures.end) is None:
                self._core.check_there(request.table)
                bucket.lookups.append(lookup)
                if bucket.worker is not None and not bucket.needs_replay:
                    self._give(bucket.worker, lookup)
        if end is not None:
            on_reply(Reply(error=end))

    def _give(self, worker: Worker, lookup: OpenLookup) -> None:
        """Gives a lookup to `worker`. Caller holds the bucket's lock."""
        request = lookup.request
        bucket, lookup.worker = self._core.buckets[request.table], worker
        bucket.last_lookup = max(bucket.last_lookup, request.step if request.trains else -1)
        # Of a step that had begun with other pservers these do not know all that was asked for.
        own = replace(request, complete=request.complete and request.step > bucket.begun)
        worker.tables.lookup(later(own, bucket.step_offset), functools.partial(self._take_rows, worker, lookup))

    def give_lookups(self, number: int, worker: Worker) -> None:
        for lookup in list(self._core.buckets[number].lookups):
            if lookup.worker is not worker:
                self._give(worker, lookup)

    def _take_rows(self, worker: Worker, lookup: OpenLookup, reply: Reply) -> None:
        """Takes an answer, unless another worker will be asked."""
        bucket = self._core.buckets[lookup.request.table]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and self._core.goes_on(reply.error)):
                return
            if lookup not in bucket.lookups:
                return
            bucket.lookups.remove(lookup)
        lookup.on_reply(reply)

    def prefetch(self, request: Lookup) -> Wait | None:
        bucket = declared(self._core.buckets, request.table)
        with bucket.lock:
            worker = bucket.worker
            if worker is None or bucket.needs_replay:
                return None
            wait = worker.tables.prefetch(later(request, bucket.step_offset))
        return None if wait is None else functools.partial(self._wait, worker, request, wait)

    def _wait(self, worker: Worker, request: Lookup, wait: Wait, on_reply: OnReply) -> None:
        """Waits for what `worker`, which may have been replaced meanwhile, has prefetched."""
        bucket = self._core.buckets[request.table]
        with bucket.lock:
            if bucket.worker is worker and self._core.failures.end is None:
                lookup = OpenLookup(request, on_reply, worker)
                bucket.lookups.append(lookup)
                bucket.last_lookup = max(bucket.last_lookup, request.step)
                wait(functools.partial(self._take_rows, worker, lookup))
                return
        self.lookup(request, on_reply)

    def apply(self, request: RowUpdate, on_reply: OnReply) -> None:
        self._pushing.put(request.table, RowsPush(None, on_reply, update=request))

    def drop_given(self, old: Worker) -> list[tuple[Push, Reply]]:
        """Drops gradients that pservers may have had, in other modes than "sync", and counts steps as they do now.

        Returns them, which are answered once all goes on. `old` has begun all steps but those that it refused at its
        end.
        """
        answered: list[tuple[Push, Reply]] = []
        for number, bucket in enumerate(self._core.buckets):
            if (journal := bucket.journal) is None or journal.files is None or journal.replay is not None:
                continue
            with bucket.lock:
                given = journal.dropped(bucket.pushes)
                for push in given:
                    bucket.pushes.remove(push)
                begun = [push.update.step + 1 for push in given if isinstance(push, RowsPush)]
                bucket.step_offset = bucket.replies - max(old.state.steps(number) - bucket.step_offset, *begun, 0)
            answered += [(push, Reply(sum=_NOTHING, step=bucket.replies)) for push in given]
        return answered

    def save(self, request: Save) -> SavedRows:
        bucket = declared(self._core.buckets, request.table)

        def save(worker: Worker) -> SavedRows:
            self._core.check_there(request.table)
            return worker.tables.save(later(request, bucket.step_offset))

        return self._core.call(save)

    def load(self, request: Load) -> SavedRows:
        return self._replace(request, lambda tables, own: tables.load(own))

    def assign(self, request: Assign) -> None:
        self._replace(request, lambda tables, own: tables.assign(own))

    def _replace(self, request: R, what: Callable[[Tables, R], _T]) -> _T:
        """Replaces rows and takes a snapshot of that, both again if a pserver is lost meanwhile."""
        core, bucket = self._core, declared(self._core.buckets, request.table)

        def replace(worker: Worker) -> _T:
            core.check_there(request.table)
            own = later(request, bucket.step_offset)
            if worker.joining.pending:
                return what(worker.tables, own)  # the others have done it
            found, journal, ranks = what(worker.tables, own), core.journal(bucket), worker.view.ranks
            if journal is not None and journal.files is not None:
                saved = saved_by(worker, journal.files.save(own.step)) if core.rank == ranks[0] else None
                with core.changed:
                    core.check_current(worker)
                    journal.replaced(ranks, saved)
            return found

        return core.call(replace)
