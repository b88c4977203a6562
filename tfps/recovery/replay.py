"""Gives other pservers what journals have: their part of what pservers keep, then pushes again, one after the other.

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tfps.errors import TfpsError, WorkerLostError
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.core import Core
from tfps.recovery.journal import Push, Resumption
from tfps.recovery.phase import Phase
from tfps.worker.worker import Worker

Give = Callable[[int, Worker, Push], None]
GiveAsks = Callable[[int, Worker], None]


class Replaying:
    """Restores and replays; one thread "tfps-replay" for each worker that has something to be given again."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._restored_with: tuple[int, ...] = ()  # who took part when other pservers got what is kept

    def waits(self, number: int) -> bool:
        """Whether what is pushed now comes after pushes that are to be given again."""
        kept = self._core.buckets[number].kept
        return self._core.phase is Phase.REPLAYING and kept is not None and not kept.caught_up

    def report(self, report: pb.Report) -> None:
        """Adds all that this worker has."""
        for bucket in self._core.buckets:
            if bucket.kept is not None:
                bucket.kept.report(report)

    def restore(self, worker: Worker, reply: pb.RegroupReply) -> None:
        """Gives `worker`, which goes on as `reply` says, this rank's part of what pservers keep."""
        steps, ranks = list(reply.steps), tuple(reply.ranks)
        newest, folders = {each.bucket: each.rank for each in reply.newest}, dict(reply.folders)
        self._restored_with = ranks
        for number, bucket in enumerate(self._core.buckets):
            step = steps[number] if number < len(steps) else 0  # others declare it again
            if (kept := bucket.kept) is not None:
                if kept.replay is None:  # ranks step apart: all go on with the number of the first
                    bucket.replies = step
                folder = folders.get(number, "")
                to = Resumption(step, self._core.rank, ranks, bucket.gone, newest.get(number), folder)
                kept.resume(worker, to, bucket.pushes)
            bucket.begun = bucket.asked

    def begin(self) -> set[int]:
        """Returns the buckets of which pushes are given again; enters the next phase. Caller holds the core's lock."""
        core = self._core
        behind = {
            number
            for number, bucket in enumerate(core.buckets)
            if (bucket.log is not None and not core.is_candidate) or (bucket.gone and bucket.pushes)
        }
        ready = core.to_replay = queue.SimpleQueue()
        for number in behind:
            core.buckets[number].behind = True
            ready.put(number)
        core.enter(Phase.REPLAYING if behind else Phase.RUNNING)
        return behind

    def start(self, worker: Worker, behind: set[int], give: Give, give_asks: GiveAsks) -> None:
        """Gives them on a thread of its own."""
        if behind:
            arguments = [worker, behind, self._core.to_replay, give, give_asks]
            threading.Thread(target=self._run, args=arguments, name="tfps-replay", daemon=True).start()

    def _run(
        self, worker: Worker, behind: set[int], ready: queue.SimpleQueue[int | None], give: Give, give_asks: GiveAsks
    ) -> None:
        """Gives what is kept to `worker`, each push when the one before has been answered.

        It needs nothing of this program, nor of others': all ranks have kept what they had pushed.
        """
        core = self._core
        try:
            while behind:
                if (number := ready.get()) is None:
                    return
                bucket = core.buckets[number]
                with bucket.lock:
                    if bucket.worker is not worker:
                        return
                    if bucket.pushes or bucket.asks:
                        core.check_there(number)
                    if (log := bucket.log) is None:
                        return
                    if log.idle:
                        give(number, worker, log.next)
                    if log.all_given and log.replies >= bucket.replies:
                        behind.discard(number)
                        bucket.behind = False
                        give_asks(number, worker)
            with core.changed:
                if core.worker is worker and core.phase is Phase.REPLAYING:
                    core.enter(Phase.RUNNING)
        except TfpsError as error:
            core.fail(error)
        except Exception as bug:  # else whatever asks this worker would wait for ever
            core.fail(TfpsError(f"rank {core.rank}: could not give other pservers what it has kept: {bug!r}"))

    def answered(self, number: int, push: Push) -> None:
        """Goes on after `push` of a bucket has been answered, maybe not for the first time. Caller holds its lock."""
        core, bucket = self._core, self._core.buckets[number]
        if core.phase is Phase.REPLAYING and (log := bucket.log) is not None:
            core.to_replay.put(number)
            if push not in bucket.pushes and log.ranks != self._restored_with:
                self._differs(number)

    def _differs(self, number: int) -> None:
        """Fails, as a round that programs have had is computed again without a worker that has just gone."""
        text = f"a worker has gone while pservers computed again what they had: {self._core.missing(number)}"
        error = WorkerLostError(text)
        threading.Thread(target=self._core.fail, args=[error], name="tfps-replay-failed", daemon=True).start()
