"""Pushes of an `ElasticExchange`: each is given to the worker that there is, and to the next one until it is answered.

Before some of them snapshots are taken. A rank has pservers write that of a table, while its pushes wait.

Tested in tests/worker/test_lost_pservers.py, tests/worker/test_replay.py and tests/worker/test_replay_of_rows.py.
"""

from __future__ import annotations

import functools
import threading

from tfps.errors import TfpsError
from tfps.exchange.interface import OnReply, Reply, declared
from tfps.exchange.requests import Save, later
from tfps.recovery.core import Core, saved_by, take
from tfps.recovery.journal import Journal, Push
from tfps.recovery.machine import LATER, Answered
from tfps.recovery.rows import RowsPush
from tfps.worker.worker import Worker


class Pushing:
    """Gives pushes and takes their replies; any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def put(self, number: int, push: Push) -> None:
        """Begins `push`."""
        core, bucket = self._core, declared(self._core.buckets, number)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this push.
            if (end := core.failures.end) is None:
                core.check_there(number)
                bucket.pushes.append(push)
                if (journal := core.journal(bucket)) is not None:
                    journal.add(push)
                    if bucket.needs_replay:
                        return
                if bucket.worker is not None:
                    try:
                        self.give(number, bucket.worker, push)
                    except TfpsError:
                        bucket.pushes.remove(push)
                        if journal is not None:
                            journal.drop_last()
                        raise
        if end is not None:
            push.on_reply(Reply(error=end))

    def give(self, number: int, worker: Worker, push: Push) -> None:
        """Gives `push` to `worker`. Caller holds the bucket's lock."""
        bucket = self._core.buckets[number]
        journal, step = self._core.journal(bucket), 0
        if isinstance(push, RowsPush):
            push.step_offset = bucket.step_offset
            step = push.update.step + push.step_offset
        try:
            if journal is not None:
                if bucket.saving is worker:
                    return
                if (wanted := journal.due(worker.view.ranks, step)) is not None:
                    if wanted.save is not None:
                        self._begin_saving(number, worker, journal, wanted.ranks, wanted.save, push)
                        return
                    take(number, worker, journal, wanted)
                journal.give(worker.view.ranks)
            push.given = True
            _give(number, worker, push, functools.partial(self._take, number, worker, push))
        except LATER:
            if journal is None or not self._core.is_lost(worker):  # else all is given again
                raise

    def _take(self, number: int, worker: Worker, push: Push, reply: Reply) -> None:
        """Takes a reply, unless the push is for another worker now, or will be."""
        core, bucket = self._core, self._core.buckets[number]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and core.goes_on(reply.error)):
                return
            again = push not in bucket.pushes  # it has been answered before
            if (journal := core.journal(bucket)) is not None and reply.error is None:
                journal.answered(push, reply)
                if bucket.needs_replay:
                    name = core.worker.pushes.specs()[number].name
                    core.to_do.put(Answered(core.recovery.session, number, tuple(sorted(reply.ranks)), again, name))
            if again:
                return
            bucket.pushes.remove(push)
            on_reply = push.answered()
            if reply.error is None:
                if journal is None:
                    bucket.last, core.quiesced = reply, False
                bucket.replies = bucket.replies + 1 if worker.joining.pending else reply.step + 1
        if reply.error is None:
            core.tell_received(worker, reply)
        on_reply(reply)

    def _begin_saving(
        self, number: int, worker: Worker, journal: Journal, ranks: tuple[int, ...], save: Save, push: Push
    ) -> None:
        """Takes a table's snapshot before `push`, and goes on; on its own thread, as it may take long."""
        core, bucket = self._core, self._core.buckets[number]
        name = core.worker.pushes.specs()[number].name

        def run() -> None:
            try:
                saved = saved_by(worker, save)
                with bucket.lock:
                    if bucket.worker is worker:
                        journal.wrote(ranks, saved)
                        bucket.saving = None
                        # Those that are to be given again follow one by one (`Reconfiguration._give`).
                        for each in (
                            [push] if bucket.needs_replay else [each for each in bucket.pushes if not each.given]
                        ):
                            self.give(number, worker, each)
            except TfpsError as error:
                if not (isinstance(error, LATER) and core.is_lost(worker)):  # else all is given again
                    core.fail(type(error)(f"no snapshot of table '{name}' could be taken (snapshot_folder): {error}"))
            except Exception as bug:  # else every push would wait for ever
                core.fail(TfpsError(f"no snapshot of table '{name}' could be taken: {bug!r}"))

        bucket.saving = worker
        threading.Thread(target=run, name="tfps-snapshot", daemon=True).start()


def _give(number: int, worker: Worker, push: Push, on_reply: OnReply) -> None:
    for write in push.writes:
        worker.state.write(number, *write)
    if isinstance(push, RowsPush):
        worker.tables.apply(later(push.update, push.step_offset), on_reply)
    elif push.collects:
        worker.state.collect_residual(number, on_reply)
    else:
        worker.push(number, push.payload, on_reply, push.step_scalars)
