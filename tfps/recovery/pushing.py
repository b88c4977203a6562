"""Pushes of an `ElasticExchange`: each is given to the worker that there is, and to the next one until it is answered.

Tested in tests/worker/test_lost_pservers.py and tests/worker/test_kept_by_workers.py.
"""

from __future__ import annotations

import functools

from tfps.errors import TfpsError
from tfps.exchange.interface import Reply, declared
from tfps.recovery.core import Core
from tfps.recovery.journal import Push
from tfps.recovery.machine import LATER
from tfps.recovery.replay import Replaying
from tfps.recovery.rows import RowsPush
from tfps.recovery.snapshots import Snapshots
from tfps.worker.worker import Worker


class Pushing:
    """Gives pushes and takes their replies; any thread."""

    def __init__(self, core: Core, replaying: Replaying, snapshots: Snapshots) -> None:
        self._core, self._replaying, self._snapshots = core, replaying, snapshots

    def put(self, number: int, push: Push) -> None:
        """Begins `push`."""
        core, bucket = self._core, declared(self._core.buckets, number)
        with bucket.lock:
            # Under the lock: either this sees the end, or the end sees this push.
            if (end := core.failures.end) is None:
                core.check_there(number)
                bucket.pushes.append(push)
                if (kept := core.journal(bucket)) is not None:
                    kept.add(push)
                    if bucket.behind:
                        return
                if bucket.worker is not None:
                    try:
                        self.give(number, bucket.worker, push)
                    except TfpsError:
                        bucket.pushes.remove(push)
                        if kept is not None:
                            kept.drop_last()
                        raise
        if end is not None:
            push.on_reply(Reply(error=end))

    def give(self, number: int, worker: Worker, push: Push) -> None:
        """Gives `push` to `worker`. Caller holds the bucket's lock."""
        kept = self._core.journal(self._core.buckets[number])
        try:
            if isinstance(push, RowsPush) and self._snapshots.begins_before(number, worker, push, kept, self.give):
                return
            if kept is not None:
                kept.give(self._core.rank, worker)
            push.give(number, worker, functools.partial(self._take, number, worker, push))
        except LATER:
            if kept is None or not self._core.is_lost(worker):  # else all is given again
                raise

    def _take(self, number: int, worker: Worker, push: Push, reply: Reply) -> None:
        """Takes a reply, unless the push is for another worker now, or will be."""
        core, bucket = self._core, self._core.buckets[number]
        with bucket.lock:
            if bucket.worker is not worker or (reply.error is not None and core.goes_on(reply.error)):
                return
            if (kept := core.journal(bucket)) is not None and reply.error is None:
                kept.answered(push, reply)
                self._replaying.answered(number, push, tuple(sorted(reply.ranks)))
            if push not in bucket.pushes:  # it has been answered before
                return
            bucket.pushes.remove(push)
            on_reply = push.answered()
            if reply.error is None:
                if kept is None:
                    bucket.last, core.quiesced = reply, False
                bucket.replies = bucket.replies + 1 if worker.joining.candidate else reply.step + 1
        on_reply(reply)
