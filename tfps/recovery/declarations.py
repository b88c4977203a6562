"""What an `ElasticExchange` has declared, so that it can be declared again.

Tested in tests/worker/test_lost_meanwhile.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from tfps.exchange.interface import BucketSpec
from tfps.exchange.kinds import ONLY_ON_PSERVERS
from tfps.recovery.core import Core, ElasticBucket, journal_of
from tfps.recovery.machine import Joined
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")


class Declarations:
    """Declarations of the job `run`; the core's lock guards all."""

    def __init__(self, core: Core, run: str) -> None:
        self._core, self._run = core, run
        self.count = core.worker.client.declarations
        self.lines: list[str] = []  # details of declarations without buckets, in order
        self.latest: tuple[Sequence[BucketSpec], Sequence[str]] = (), ()
        self.tried: list[tuple[Sequence[BucketSpec], Sequence[str]]] = []  # what this joining worker has declared

    def declare(self, specs: Sequence[BucketSpec], details: Sequence[str], stop: threading.Event | None) -> list[int]:
        """See `Exchange.declare`."""

        def declare(worker: Worker) -> list[int]:
            ids = worker.declare(specs, details, stop)
            with self._core.changed:
                self._core.check_current(worker)  # else it declares again, with the next ones
                if worker.client.declarations != self.count:  # else the job had declared it before this worker came
                    self.count, self.latest = worker.client.declarations, (specs, details)
                self.lines += [] if specs else list(details)
                self.tried += [(specs, details)] if worker.joining.pending else []
                self._know(worker)
            return ids

        return self._core.call(declare, stop, after_replay=False)  # others may declare again before they replay

    def joined(self, worker: Worker, lines: Sequence[str]) -> None:
        """`worker` takes part from now on, in a job that has declared `lines`."""
        core = self._core
        with core.changed:
            core.check_current(worker)  # else it asks again
            core.deliver(Joined())
            self.lines, self.count = list(lines), worker.client.declarations
            self._know(worker)
            for number, bucket in enumerate(core.buckets):
                bucket.replies = worker.state.steps(number)
                if bucket.replay is not None:
                    bucket.replay.begin(bucket.replies)

    def _know(self, worker: Worker) -> None:
        """Knows all buckets that `worker` has. Caller holds the lock."""
        core, first = self._core, len(self._core.buckets)
        for number, spec in enumerate(worker.pushes.specs()[first:], first):
            journal = journal_of(number, core.rank, spec, core.config, self._run)
            core.buckets.append(bucket := ElasticBucket(journal, worker=worker))
            if journal is None and ONLY_ON_PSERVERS[spec.kind] and core.rank == core.view.ranks[0]:
                logger.warning(
                    "tfps: the loss of a pserver ends this job, as it has the rows of table '%s' alone: snapshot_steps "
                    "and snapshot_folder let training survive that",
                    spec.name,
                )
            if journal is not None and spec.replaces is not None:  # it goes on with the rows of another one
                old = core.buckets[spec.replaces]
                bucket.step_offset = old.step_offset
                if old.journal is not None:
                    journal.follow(old.journal)
                old.journal = None
