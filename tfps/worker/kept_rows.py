"""What a worker keeps of a table, so that others can go on with it (`Config.snapshot_folder`).

A **snapshot** is files: before a step that is due, the lowest rank has the pservers write what has changed since the
snapshot before, each its own rows, and then pushes. With it all ranks keep the gradients that they have pushed since.
When a pserver is lost, the next ones read the files, and the workers push again, as for buckets of variables (kept.py).
Nothing of the table's size is on a worker.

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
from tfps.exchange.interface import OnReply, SavedRows
from tfps.worker.kept import Kept, Push, Snapshot
from tfps.worker.worker import Worker

_MOST_CHANGES = 2  # times the rows of the last full save are written before another one


@dataclass(eq=False, slots=True)
class RowsPush(Push):
    """Gradients of rows."""

    ids: NDArray[np.int64] = field(kw_only=True)
    gradients: Floats = field(kw_only=True)
    step: int = field(kw_only=True)

    def give(self, number: int, worker: Worker, take: OnReply) -> None:
        self.given = True
        worker.add(number, self.ids, self.gradients, self.step, self.step_scalars, take)


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
    """What pservers write."""

    folder: str
    since: int | None  # what has changed since this step of the save in `before`; None: all
    before: str
    remove: tuple[str, ...]  # names of folders beside it that nobody needs any more


class KeptTable(Kept):
    """Snapshots of table `number` and the gradients since the oldest one, under `base`. The caller holds the lock.

    Where ranks have replaced rows, those of a snapshot count only if all ranks have done so as often since
    (`Snapshot.assigned`).
    """

    def __init__(self, number: int, every: int, base: str) -> None:
        self._base = PurePath(base)
        self.name = f"table{number}"  # of the files
        super().__init__(number, 0, 0, every)

    def begin(self, step: int) -> None:
        super().begin(step)
        self.saving: Worker | None = None  # that has pservers write a snapshot: pushes wait for it
        self._before: tuple[str, int] | None = None  # the folder and the step of the last save
        self._since_full: list[str] = []  # names of the folders that are read with it
        self._old: list[str] = []  # of those that are not needed once the next save is there
        self._rows, self._changes = 0, 0  # of the last full save, and since

    def take(self, rank: int, worker: Worker, ranks: tuple[int, ...]) -> None:
        if not self._lacks(ranks):
            return
        self.taken(ranks, *(self.write(worker) if rank == ranks[0] else ()))

    def next_save(self) -> Save:
        """What pservers are to write before the next push."""
        folder = str(self._base / f"{self.name}-{self.given}-{uuid.uuid4().hex[:8]}")
        if self._before is None or self._changes > _MOST_CHANGES * self._rows:
            return Save(folder, None, "", tuple(self._old))
        return Save(folder, self._before[1], self._before[0], tuple(self._old))

    def write(self, worker: Worker) -> tuple[Save, SavedRows]:
        """Has pservers write a snapshot, and waits. It needs no lock."""
        save = self.next_save()
        return save, worker.save_rows(self._number, self.given, save.folder, self.name, *save[1:])

    def taken(
        self, ranks: tuple[int, ...], save: Save | None = None, found: SavedRows | None = None, assigned: int = 0
    ) -> None:
        """A snapshot of `ranks` has been taken; without `save`, the lowest rank knows where."""
        self.snapshots[self.given] = Snapshot(ranks, folder=save.folder if save else "", assigned=assigned)
        if save is None or found is None:
            return
        self._before = save.folder, found.step
        name = PurePath(save.folder).name
        # The other ranks may still need what is before this one, until they push again.
        self._old = self._since_full if found.full else []
        if found.full:
            self._since_full, self._rows, self._changes = [name], found.rows, 0
        else:
            self._since_full.append(name)
            self._changes += found.rows

    def replaced(self, ranks: tuple[int, ...], save: Save | None = None, found: SavedRows | None = None) -> None:
        """All ranks have replaced rows, with nothing under way, and a snapshot has been taken of that."""
        self.taken(ranks, save, found, self.snapshots[max(self.snapshots)].assigned + 1)
        self._forget(self.given)

    def follow(self, other: KeptTable) -> None:
        """Goes on where `other` has ended, as the table has got another optimizer: a snapshot is due."""
        self.begin(other.replies)
        self.ranks = other.ranks

    def restore_files(self, step: int, worker: Worker, folder: str) -> None:
        """Has pservers read the snapshot before `step`; all gradients since then are to be given again."""
        super().restore(step, worker)
        self.saving = None
        if folder:
            # The first rank to come does it; nothing is read or added before all have come.
            found = worker.restore_rows(self._number, step, [folder], self.name, folder, alone=True)
            self._before = folder, found.step
            name, known = PurePath(folder).name, self._since_full
            place = known.index(name) + 1 if name in known else 0
            self._since_full, unused = known[:place] if place else [name], known[place:]
            self._old += unused
        self.snapshots = {step: self.snapshots[step]._replace(folder=folder)}
