"""What a worker keeps of a bucket that pservers update push by push, so that others can go on with it (mode "async").

Ranks step apart, so there are no rounds to compute again. But each reply has the newest parameters: of these each
worker writes its part to the next pservers, as it got them last. Of slots it takes its part of a **snapshot** every
`Config.snapshot_steps` of its steps. So what others have pushed since a worker's last reply is lost for that worker's
part, and slots are up to so many steps old. The parts are of different moments, as slices are in this mode. A gradient
in flight is not pushed again: parts of others may have it, and none counts twice.

Tested in tests/worker/test_newest_of_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tfps.exchange.codecs import Bytes
from tfps.exchange.interface import BucketSpec, Reply, kept_arrays
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.journal import Journal, Push, Snapshot, Write, part_of
from tfps.worker.worker import Worker


class Latest(Journal):
    """The newest parameters of bucket `number`, and a snapshot of its slots."""

    def __init__(self, number: int, spec: BucketSpec, update: UpdateSpec, every: int) -> None:
        self._number, self._nbytes, self._update, self._every = number, spec.nbytes, update, every
        self._slots = range(1, kept_arrays(spec))
        self.begin(0)

    def begin(self, step: int) -> None:
        self.writes: list[Write] = []  # before the next push
        self._given = 0  # pushes
        self._parameters: Bytes | None = None  # as they came last; None: nothing has been answered
        self._reads = 0  # of this program, that have been answered
        self._marked = 0  # pushes with which this rank has assigned values
        self._assigned = 0  # how often all ranks have assigned values together
        self._snapshot, self._snapshot_assigned = Snapshot(), 0  # and how often they had before it

    @property
    def oldest(self) -> tuple[int, ...] | None:
        """Nobody while all assign values."""
        if self._marked != self._assigned:
            return ()
        if not (self._slots and self._assigned):
            return None
        return self._snapshot.ranks if self._snapshot_assigned == self._assigned else ()

    def write(self, write: Write) -> None:
        self.writes.append(write)

    def add(self, push: Push) -> None:
        push.writes, self.writes = self.writes, []
        push.reads = not push.step_scalars
        push.assigns = not push.reads and StepScalars.unpack(push.step_scalars, self._update).mark != 0
        self._marked += push.assigns

    def give(self, rank: int, worker: Worker) -> None:
        ranks = worker.view.ranks
        due = (self._given + self._number) % self._every == 0  # not of all buckets at once
        changed = (self._snapshot.ranks, self._snapshot_assigned) != (ranks, self._assigned)
        if self._assigned and self._slots and (due or changed):
            begin, end = part_of(self._nbytes, ranks.index(rank), len(ranks))
            values = [worker.state.read(self._number, array, begin, end - begin) for array in self._slots]
            self._snapshot, self._snapshot_assigned = Snapshot(ranks, begin, values), self._assigned
        self._given += 1

    def answered(self, push: Push, reply: Reply) -> None:
        """`push` has been answered, with the newest parameters."""
        self._parameters = np.asarray(reply.sum).view(np.uint8)
        self._assigned += push.assigns
        self._reads += push.reads

    def report(self, report: pb.BucketReport) -> None:
        latest = report.latest
        latest.SetInParent()
        latest.assigned, latest.reads, latest.slots = self._assigned, self._reads, bool(self._slots)
        latest.ranks[:], latest.snapshot_assigned = self._snapshot.ranks, self._snapshot_assigned

    def resume(
        self, worker: Worker, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]
    ) -> None:
        """If one rank has the newest parameters, it writes all: it has read them at a barrier, others have not yet."""
        if decision.unrecoverable:
            return
        for push in pushes:
            if push.given and not push.assigns:
                push.payload, push.step_scalars = None, b""  # it only reads
        if not self._assigned or self._parameters is None:
            return
        begin, end = part_of(self._nbytes, ranks.index(worker.rank), len(ranks))
        if decision.HasField("latest"):
            if decision.latest == worker.rank:
                worker.state.write(self._number, 0, 0, self._parameters)
        elif end > begin:
            worker.state.write(self._number, 0, begin, self._parameters[begin:end])
        if end > begin:
            for array, values in zip(self._slots, self._snapshot.values, strict=False):
                worker.state.write(self._number, array, begin, values)
