"""What an `ElasticExchange` has declared, so that it can be declared again.

Tested in tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tfps.exchange.interface import BucketSpec
from tfps.exchange.kinds import ONLY_ON_PSERVERS
from tfps.recovery.core import Core, ElasticBucket, journal_of
from tfps.recovery.machine import Joined
from tfps.recovery.snapshots import Snapshots
from tfps.worker.worker import Worker


class Declarations:
    """Declarations of the job `run`; the core's lock guards all."""

    def __init__(self, core: Core, snapshots: Snapshots, run: str) -> None:
        self._core, self._snapshots, self._run = core, snapshots, run
        self.count = core.worker.declarations
        self.lines: list[str] = []  # details of declarations without buckets, in order
        self.latest: tuple[Sequence[BucketSpec], Sequence[str]] = (), ()
        self.tried: list[tuple[Sequence[BucketSpec], Sequence[str]]] = []  # what this candidate has declared

    def declare(self, specs: Sequence[BucketSpec], details: Sequence[str], stop: threading.Event | None) -> list[int]:
        """See `Exchange.declare`."""

        def declare(worker: Worker) -> list[int]:
            ids = worker.declare(specs, details, stop)
            with self._core.changed:
                self._core.check_current(worker)  # else it declares again, with the next ones
                if worker.declarations != self.count:  # else the job had declared it before this worker came
                    self.count, self.latest = worker.declarations, (specs, details)
                self.lines += [] if specs else list(details)
                self.tried += [(specs, details)] if worker.joining.candidate else []
                self._know(worker)
            return ids

        return self._core.call(declare, stop, after_replay=False)  # others may declare again before they replay

    def joined(self, worker: Worker, lines: Sequence[str]) -> None:
        """`worker` takes part from now on, in a job that has declared `lines`."""
        core = self._core
        with core.changed:
            core.check_current(worker)  # else it asks again
            core.deliver(Joined())
            self.lines, self.count = list(lines), worker.declarations
            self._know(worker)
            for number, bucket in enumerate(core.buckets):
                bucket.replies = worker.state.steps(number)
                if bucket.log is not None:
                    bucket.log.begin(bucket.replies)

    def _know(self, worker: Worker) -> None:
        """Knows all buckets that `worker` has. Caller holds the lock."""
        buckets = self._core.buckets
        first = len(buckets)
        for number, spec in enumerate(worker.pushes.specs()[first:], first):
            buckets.append(ElasticBucket(journal_of(number, spec, self._core.config, self._run), worker=worker))
            if ONLY_ON_PSERVERS[spec.kind]:
                self._snapshots.know(number, spec)
