"""What a worker keeps of a table, so that others can go on with it (`Config.snapshot_folder`).

A **snapshot** is files: before a step that is due, the lowest rank has the pservers write what has changed since the
snapshot before, each its own rows, and then pushes. Nothing of the table's size is on a worker.

* In mode "sync" (`KeptTable`) all ranks keep the gradients that they have pushed since. When a pserver is lost, the
  next ones read the files, and the workers push again, as for buckets of variables (kept.py).
* Where each push is applied as it comes (`NewestTable`), rows go on as they were in the last snapshot (newest.py).

Where ranks have replaced rows, a snapshot counts only if all ranks have done so as often (`assigned`).

Tested in tests/worker/test_kept_tables.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.codecs import Floats
from tfps.exchange.interface import OnReply, Reply, SavedRows
from tfps.protos import tfps_pb2 as pb
from tfps.worker.kept import Kept, Push, Snapshot
from tfps.worker.worker import Worker

_MOST_CHANGES = 2  # times the rows of the last full save are written before another one


@dataclass(eq=False, slots=True)
class RowsPush(Push):
    """Gradients of rows."""

    ids: NDArray[np.int64] = field(kw_only=True)
    gradients: Floats = field(kw_only=True)
    step: int = field(kw_only=True)  # as the program counts
    ahead: int = 0  # by how much pservers count more

    def give(self, number: int, worker: Worker, take: OnReply) -> None:
        self.given = True
        worker.add(number, self.ids, self.gradients, self.step + self.ahead, self.step_scalars, take)


@dataclass(eq=False, slots=True)
class Ask:
    """A request for rows that has not been answered."""

    ids: NDArray[np.int64]
    step: int
    on_reply: OnReply
    trains: bool
    complete: bool = False
    attempt: int = 0
    worker: Worker | None = None  # to which it has been given


class Save(NamedTuple):
    """A snapshot that pservers have written."""

    folder: str
    found: SavedRows


class Files:
    """The snapshots of table `number` under `base`, as far as this worker knows them."""

    def __init__(self, number: int, base: str) -> None:
        self._number, self._base = number, PurePath(base)
        self.name = f"table{number}"  # of the files
        self.saving: Worker | None = None  # that has pservers write one: pushes wait for it
        self.begin()

    def begin(self) -> None:
        self._before: tuple[str, int] | None = None  # the folder and the step of the last one
        self._since_full: list[str] = []  # names of the folders that are read with it
        self._old: list[str] = []  # of those that are not needed once the next one is there
        self._rows, self._changes = 0, 0  # of the last full one, and since

    def write(self, worker: Worker, step: int) -> Save:
        """Has pservers write one before `step`, and waits. It needs no lock."""
        folder = str(self._base / f"{self.name}-{step}-{uuid.uuid4().hex[:8]}")
        before, since = ("", None) if self._before is None else self._before
        if self._changes > _MOST_CHANGES * self._rows:
            before, since = "", None
        return Save(folder, worker.save_rows(self._number, step, folder, self.name, since, before, tuple(self._old)))

    def wrote(self, save: Save) -> None:
        found, name = save.found, PurePath(save.folder).name
        self._before = save.folder, found.step
        # The other ranks may still need what is before this one, until they push again.
        self._old = self._since_full if found.full else []
        if found.full:
            self._since_full, self._rows, self._changes = [name], found.rows, 0
        else:
            self._since_full.append(name)
            self._changes += found.rows

    def read(self, worker: Worker, step: int, folder: str) -> None:
        """Has pservers read one, so that the table is as before `step`."""
        self.saving = None
        if not folder:
            return
        # The first rank to come does it; nothing is read or added before all have come.
        found = worker.restore_rows(self._number, step, [folder], self.name, folder, alone=True)
        self._before = folder, found.step
        name, known = PurePath(folder).name, self._since_full
        place = known.index(name) + 1 if name in known else 0
        self._since_full, unused = known[:place] if place else [name], known[place:]
        self._old += unused


class KeptTable(Kept):
    """Snapshots of table `number`, and the gradients since the oldest one. The caller holds the lock."""

    def __init__(self, number: int, every: int, base: str) -> None:
        self.files = Files(number, base)
        super().__init__(number, 0, 0, every)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.files.begin()

    def is_due_of(self, rank: int, ranks: tuple[int, ...]) -> bool:
        """Whether this rank has pservers write a snapshot before the next push."""
        return self.is_due and rank == self.ranks[0]

    def take(self, rank: int, worker: Worker, ranks: tuple[int, ...]) -> None:
        if self._lacks(ranks):
            self.taken(ranks, self.files.write(worker, self.given) if rank == ranks[0] else None)

    def taken(self, ranks: tuple[int, ...], save: Save | None, assigned: int = 0) -> None:
        """A snapshot of `ranks` has been taken; without `save`, the lowest rank knows where."""
        if save is not None:
            self.files.wrote(save)
        self.snapshots[self.given] = Snapshot(ranks, folder=save.folder if save else "", assigned=assigned)

    def wrote(self, save: Save) -> None:
        """This rank has had one written before the next push."""
        self.taken(self.ranks, save)

    def replaced(self, ranks: tuple[int, ...], save: Save | None) -> None:
        """All ranks have replaced rows, with nothing under way, and a snapshot has been taken of that."""
        self.taken(ranks, save, self.snapshots[max(self.snapshots)].assigned + 1)
        self._forget(self.given)

    def follow(self, other: KeptTable | NewestTable) -> None:
        """Goes on where `other` has ended, as the table has got another optimizer: a snapshot is due."""
        if isinstance(other, KeptTable):
            self.begin(other.replies)
            self.ranks = other.ranks

    def restore_files(self, step: int, worker: Worker, folder: str) -> None:
        """Has pservers read the snapshot before `step`; all gradients since then are to be given again."""
        super().restore(step, worker)
        self.files.read(worker, step, folder)
        self.snapshots = {step: self.snapshots[step]._replace(folder=folder)}


class NewestTable:
    """The last snapshot of table `number`, where pushes are applied as they come. The caller holds the lock."""

    def __init__(self, number: int, every: int, base: str) -> None:
        self.files = Files(number, base)
        self._number, self._every = number, every
        self.begin(0)

    def begin(self, _: int) -> None:
        self.files.begin()
        self._given = 0  # pushes, since the last snapshot
        self._save, self._saved = "", -1  # the folder, and the newest step in it
        self._own = False  # whether this rank has had it written
        self._assigned = 0

    @property
    def oldest(self) -> tuple[int, ...] | None:
        """As of `Newest`: None, as the files are there."""
        return None

    def is_due_of(self, rank: int, ranks: tuple[int, ...]) -> bool:
        """Whether this rank has pservers write a snapshot before the next push; at once if it has none of its own."""
        return rank == ranks[0] and (not self._own or self._given >= self._every)

    def add(self, push: Push) -> None:
        """Nothing is kept of it."""

    def give(self, rank: int, worker: Worker) -> None:
        self._given += 1
        if rank != worker.view.ranks[0]:
            self._save, self._own = "", False  # the lowest rank takes newer ones

    def answered(self, push: Push, reply: Reply) -> None:
        """Nothing is kept of it."""

    def wrote(self, save: Save) -> None:
        self.files.wrote(save)
        self._save, self._saved, self._given, self._own = save.folder, save.found.step, 0, True

    def replaced(self, ranks: tuple[int, ...], save: Save | None) -> None:
        self._assigned += 1
        self._save = ""
        if save is not None:
            self.wrote(save)

    def follow(self, other: KeptTable | NewestTable) -> None:
        """As `KeptTable.follow`."""

    def report(self) -> pb.Newest:
        return pb.Newest(bucket=self._number, assigned=self._assigned, folder=self._save, saved=self._saved + 1)

    def restore_files(self, step: int, worker: Worker, folder: str) -> None:
        """Has pservers read the last snapshot."""
        self.files.read(worker, step, folder)
        self._save, self._given, self._own = folder, 0, False
