"""What a worker keeps of a table, so that others can go on with it (`Config.snapshot_folder`).

A **snapshot** is files: before a step that is due, the lowest rank has the pservers write what has changed since the
snapshot before, each its own rows, and then pushes. Nothing of the table's size is on a worker.

* In mode "sync" (`RowsReplay`) all ranks keep the gradients that they have pushed since. When a pserver is lost, the
  next ones read the files, and the workers push again, as for buckets of variables (journal.py).
* Where each push is applied as it comes (`RowsLatest`), rows go on as they were in the last snapshot (latest.py).

Where ranks have replaced rows, a snapshot counts only if all ranks have done so as often (`assigned`).

Tested in tests/worker/test_replay_of_rows.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tfps.exchange.interface import OnReply, Reply
from tfps.exchange.requests import Lookup, RowUpdate
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.files import Files, Saved
from tfps.recovery.journal import Journal, Push, Replay, Snapshot, Wanted, Write


@dataclass(eq=False, slots=True)
class RowsPush(Push):
    """An update of rows."""

    update: RowUpdate = field(kw_only=True)  # with the step as the program counts
    step_offset: int = 0  # by how much pservers count more


@dataclass(eq=False, slots=True)
class OpenLookup:
    """A lookup that has not been answered."""

    request: Lookup
    on_reply: OnReply
    worker: object = None  # to which it has been given


class RowsReplay(Replay):
    """Snapshots of table `number`, and the gradients since the oldest one."""

    def __init__(self, number: int, rank: int, every: int, base: str) -> None:
        self._files = Files(number, base)
        super().__init__(number, rank, 0, 0, every)

    @property
    def files(self) -> Files:
        return self._files

    def begin(self, step: int) -> None:
        super().begin(step)
        self._files.begin()

    def _wanted(self, ranks: tuple[int, ...]) -> Wanted | None:
        if self._rank == ranks[0]:
            return Wanted(ranks, save=self._files.save(self.given))
        self.wrote(ranks, None)
        return None

    def wrote(self, ranks: tuple[int, ...], saved: Saved | None, assigned: int = 0) -> None:
        """A snapshot of `ranks` has been taken; without `saved`, the lowest rank knows where."""
        if saved is not None:
            self._files.wrote(saved)
        self.snapshots[self.given] = Snapshot(ranks, folder=saved.folder if saved else "", assigned=assigned)

    def replaced(self, ranks: tuple[int, ...], saved: Saved | None) -> None:
        self.wrote(ranks, saved, self.snapshots[max(self.snapshots)].assigned + 1)
        self._forget(self.given)

    def follow(self, other: Journal) -> None:
        """A snapshot is due."""
        if isinstance(other, RowsReplay):
            self.begin(other.replies)
            self.ranks = other.ranks

    def _say(self, message: pb.Snapshot, step: int, snapshot: Snapshot) -> None:
        super()._say(message, step, snapshot)
        message.part, message.folder, message.assigned = bool(snapshot.ranks), snapshot.folder, snapshot.assigned

    def resume(self, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]) -> Sequence[Write]:
        """Pservers have read the snapshot before the step; all gradients since then are to be given again."""
        super().resume(decision, ranks, pushes)
        if not decision.unrecoverable:
            self.snapshots = {decision.step: self.snapshots[decision.step]._replace(folder=decision.folder)}
        return ()


class RowsLatest(Journal):
    """The last snapshot of table `number`, where pushes are applied as they come."""

    def __init__(self, number: int, rank: int, every: int, base: str) -> None:
        self._files = Files(number, base)
        self._rank, self._every = rank, every
        self.begin(0)

    @property
    def files(self) -> Files:
        return self._files

    def begin(self, step: int) -> None:
        self._files.begin()
        self._given = 0  # pushes, since the last snapshot
        self._save, self._saved = "", -1  # the folder, and the latest step in it
        self._own = False  # whether this rank has had it written
        self._assigned = 0

    @property
    def oldest(self) -> tuple[int, ...] | None:
        return None  # the files are there

    def due(self, ranks: tuple[int, ...], step: int) -> Wanted | None:
        """At once if this rank has none of its own."""
        due = self._rank == ranks[0] and (not self._own or self._given >= self._every)
        return Wanted(ranks, save=self._files.save(step)) if due else None

    def add(self, push: Push) -> None:
        """Nothing is kept of it."""

    def give(self, ranks: tuple[int, ...]) -> None:
        self._given += 1
        if self._rank != ranks[0]:
            self._save, self._own = "", False  # the lowest rank takes newer ones

    def answered(self, push: Push, reply: Reply) -> None:
        """Nothing is kept of it."""

    def wrote(self, ranks: tuple[int, ...], saved: Saved) -> None:
        self._files.wrote(saved)
        self._save, self._saved, self._given, self._own = saved.folder, saved.found.step, 0, True

    def replaced(self, ranks: tuple[int, ...], saved: Saved | None) -> None:
        self._assigned += 1
        self._save = ""
        if saved is not None:
            self.wrote(ranks, saved)

    def report(self, report: pb.BucketReport) -> None:
        report.latest.assigned, report.latest.folder, report.latest.saved = self._assigned, self._save, self._saved + 1

    def resume(self, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]) -> Sequence[Write]:
        """Pservers have read the last snapshot."""
        if not decision.unrecoverable:
            self._save, self._given, self._own = decision.folder, 0, False
        return ()

    def dropped(self, pushes: Collection[Push]) -> Sequence[Push]:
        return [push for push in pushes if push.given]
