"""Takes snapshots of tables: a rank has the pservers write them, while its pushes wait.

Tested in tests/worker/test_kept_tables.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from tfps.errors import TfpsError
from tfps.exchange.interface import BucketSpec, Tables, declared
from tfps.exchange.requests import R, later
from tfps.recovery.core import Core
from tfps.recovery.files import Files
from tfps.recovery.journal import Journal, Push
from tfps.recovery.machine import LATER
from tfps.recovery.rows import RowsPush
from tfps.worker.worker import Worker

logger = logging.getLogger("tfps")
_T = TypeVar("_T")
Give = Callable[[int, Worker, Push], None]


class Snapshots:
    """Snapshots of all tables; any thread."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def know(self, number: int, spec: BucketSpec) -> None:
        """Knows a table, which may go on with the rows of another one."""
        core, bucket = self._core, self._core.buckets[number]
        if bucket.kept is None and core.rank == core.view.ranks[0]:
            logger.warning(
                "tfps: the loss of a pserver ends this job, as it has the rows of table '%s' alone: snapshot_steps "
                "and snapshot_folder let training survive that",
                spec.name,
            )
        if bucket.kept is not None and spec.replaces is not None:
            old = core.buckets[spec.replaces]
            bucket.added, bucket.ahead = old.added, old.ahead
            if old.kept is not None:
                bucket.kept.follow(old.kept)
            old.kept = None

    def begins_before(self, number: int, worker: Worker, push: RowsPush, kept: Journal | None, give: Give) -> bool:
        """Whether `push` waits for a snapshot, which this rank has pservers write. Caller holds the lock."""
        push.ahead = self._core.buckets[number].ahead
        if kept is None or (files := kept.files) is None:
            return False
        if files.saving is worker:
            return True
        if not kept.is_due_of(self._core.rank, worker.view.ranks):
            return False
        files.saving = worker
        arguments = [number, worker, kept, files, push, give]
        threading.Thread(target=self._save, args=arguments, name="tfps-snapshot", daemon=True).start()
        return True

    def _save(self, number: int, worker: Worker, kept: Journal, files: Files, push: RowsPush, give: Give) -> None:
        """Takes a snapshot before `push`, and goes on; on its own thread, as it may take long."""
        core, bucket = self._core, self._core.buckets[number]
        name = core.worker.pushes.specs()[number].name
        try:
            save = files.write(worker, push.update.step + push.ahead)
            with bucket.lock:
                if bucket.worker is worker and files.saving is worker:
                    kept.wrote(save)
                    files.saving = None
                    # Those that are to be given again follow one by one (`Replaying`).
                    for each in [push] if bucket.behind else [each for each in bucket.pushes if not each.given]:
                        give(number, worker, each)
        except TfpsError as error:
            if not (isinstance(error, LATER) and core.is_lost(worker)):  # else all is given again
                core.fail(type(error)(f"no snapshot of table '{name}' could be taken (snapshot_folder): {error}"))
        except Exception as bug:  # else every push would wait for ever
            core.fail(TfpsError(f"no snapshot of table '{name}' could be taken: {bug!r}"))

    def replace(self, request: R, what: Callable[[Tables, R], _T]) -> _T:
        """Replaces rows and takes a snapshot of that, both again if a pserver is lost meanwhile."""
        core, bucket = self._core, declared(self._core.buckets, request.table)

        def replace(worker: Worker) -> _T:
            core.check_there(request.table)
            own = later(request, bucket.ahead)
            found, kept, ranks = what(worker.tables, own), core.journal(bucket), worker.view.ranks
            if kept is not None and kept.files is not None:
                save = kept.files.write(worker, own.step) if core.rank == ranks[0] else None
                with core.changed:
                    core.check_current(worker)
                    kept.replaced(ranks, save)
            return found

        return core.call(replace)
