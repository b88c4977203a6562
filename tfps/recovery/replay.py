"""Gives other pservers what journals have: their part of what pservers keep, then pushes again, one after the other.

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

from tfps.protos import tfps_pb2 as pb
from tfps.recovery.core import Core
from tfps.recovery.journal import Push
from tfps.recovery.machine import Answered
from tfps.worker.worker import Worker


class Replaying:
    """Restores, and says what is to be given again: see `Reconfiguration`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def report(self) -> list[pb.BucketReport]:
        """What this worker has of each bucket."""
        found, everybody = [], sorted(self._core.view.ranks)
        for bucket in self._core.buckets:
            last = sorted(bucket.last.ranks)
            found.append(pb.BucketReport(step=bucket.replies, last=last if last != everybody else ()))
            if bucket.kept is not None:
                bucket.kept.report(found[-1])
        return found

    def restore(self, worker: Worker, decision: pb.Decision) -> None:
        """Gives `worker`, which goes on as all have decided, this rank's part of what pservers keep."""
        for number, bucket in enumerate(self._core.buckets):  # others declare again those that not all have
            each = decision.buckets[number] if number < len(decision.buckets) else pb.BucketDecision()
            if bucket.gone:
                each = pb.BucketDecision(step=each.step, unrecoverable=True)
            bucket.gone = each.unrecoverable
            if (kept := bucket.kept) is not None:
                if kept.replay is None:  # ranks step apart: all go on with the number of the first
                    bucket.replies = each.step
                kept.resume(worker, each, tuple(decision.ranks), bucket.pushes)
            bucket.begun = bucket.asked

    def behind(self) -> frozenset[int]:
        """The buckets of which pushes are given again, which wait from now on. Caller holds the core's lock."""
        core = self._core
        for bucket in core.buckets:
            bucket.behind = (bucket.log is not None and not core.is_candidate) or (bucket.gone and bool(bucket.pushes))
        return frozenset(number for number, bucket in enumerate(core.buckets) if bucket.behind)

    def answered(self, number: int, push: Push, ranks: tuple[int, ...]) -> None:
        """`push` has been answered, maybe not for the first time. Caller holds the lock of its bucket."""
        core, bucket = self._core, self._core.buckets[number]
        if bucket.behind:
            name, again = core.worker.pushes.specs()[number].name, push not in bucket.pushes
            core.to_do.put(Answered(core.recovery.session, number, ranks, again, name))
