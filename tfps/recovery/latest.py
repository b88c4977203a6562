"""What a worker keeps of a bucket that pservers update push by push, so that others can go on with it (mode "async").

Ranks step apart, so there are no rounds to compute again. But each reply has the latest parameters: of these each
worker writes its part to the next pservers, as it got them last. Of slots it takes its part of a **snapshot** every
`Config.snapshot_steps` of its steps. So what others have pushed since a worker's last reply is lost for that worker's
part, and slots are up to so many steps old. The parts are of different moments, as slices are in this mode. A gradient
in flight is not pushed again: parts of others may have it, and none counts twice.

Tested in tests/worker/test_latest.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tfps.exchange.codecs import Bytes
from tfps.exchange.interface import BucketSpec, Reply, kept_arrays
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.journal import Journal, Push, Snapshot, Wanted, Write, part_of


class Latest(Journal):
    """The latest parameters of bucket `number` of `rank`, and a snapshot of its slots."""

    def __init__(self, number: int, rank: int, spec: BucketSpec, update: UpdateSpec, every: int) -> None:
        self._number, self._rank, self._every = number, rank, every
        self._nbytes, self._update = spec.nbytes, update
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

    def due(self, ranks: tuple[int, ...], step: int) -> Wanted | None:
        due = (self._given + self._number) % self._every == 0  # not of all buckets at once
        changed = (self._snapshot.ranks, self._snapshot_assigned) != (ranks, self._assigned)
        if not (self._assigned and self._slots and (due or changed)):
            return None
        begin, end = part_of(self._nbytes, ranks.index(self._rank), len(ranks))
        return Wanted(ranks, self._slots, begin, end - begin)

    def took(self, snapshot: Snapshot) -> None:
        self._snapshot, self._snapshot_assigned = snapshot, self._assigned

    def give(self, ranks: tuple[int, ...]) -> None:
        self._given += 1

    def answered(self, push: Push, reply: Reply) -> None:
        """`push` has been answered, with the latest parameters."""
        self._parameters = np.asarray(reply.sum).view(np.uint8)
        self._assigned += push.assigns
        self._reads += push.reads

    def report(self, report: pb.BucketReport) -> None:
        latest = report.latest
        latest.SetInParent()
        latest.assigned, latest.reads, latest.slots = self._assigned, self._reads, bool(self._slots)
        latest.ranks[:], latest.snapshot_assigned = self._snapshot.ranks, self._snapshot_assigned

    def resume(self, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]) -> Sequence[Write]:
        """If one rank has the latest parameters, it writes all: it has read them at a barrier, others have not yet."""
        if decision.unrecoverable:
            return ()
        for push in pushes:
            if push.given and not push.assigns:
                push.payload, push.step_scalars = None, b""  # it only reads
        if not self._assigned or self._parameters is None:
            return ()
        begin, end = part_of(self._nbytes, ranks.index(self._rank), len(ranks))
        writes = [Write(0, begin, self._parameters[begin:end])]
        if decision.HasField("latest"):
            writes = [Write(0, 0, self._parameters)] if decision.latest == self._rank else []
        writes += [Write(each, begin, values) for each, values in zip(self._slots, self._snapshot.values, strict=False)]
        return [write for write in writes if len(write.values)]
