"""The files of a table's snapshots, as far as one worker knows them.

Tested in tests/worker/test_replay_of_rows.py and tests/elastic/test_lost_tables.py.
"""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import NamedTuple

from tfps.exchange.requests import Load, Save, SavedRows

_MOST_CHANGES = 2  # times the rows of the last full save are written before another one


class Saved(NamedTuple):
    """A snapshot that pservers have written."""

    folder: str
    found: SavedRows


class Files:
    """The snapshots of table `number` under `base`, as far as this worker knows them."""

    def __init__(self, number: int, base: str) -> None:
        self._number, self._base = number, PurePath(base)
        self.name = f"table{number}"  # of the files
        self.begin()

    def begin(self) -> None:
        self._before: tuple[str, int] | None = None  # the folder and the step of the last one
        self._since_full: list[str] = []  # names of the folders that are read with it
        self._old: list[str] = []  # of those that are not needed once the next one is there
        self._rows, self._changes = 0, 0  # of the last full one, and since

    def save(self, step: int) -> Save:
        """Has pservers write one before `step`."""
        folder = str(self._base / f"{self.name}-{step}-{uuid.uuid4().hex[:8]}")
        before, since = ("", None) if self._before is None else self._before
        if self._changes > _MOST_CHANGES * self._rows:
            before, since = "", None
        return Save(self._number, step, folder, self.name, since, before, tuple(self._old))

    def wrote(self, saved: Saved) -> None:
        found, name = saved.found, PurePath(saved.folder).name
        self._before = saved.folder, found.step
        # The other ranks may still need what is before this one, until they push again.
        self._old = self._since_full if found.full else []
        if found.full:
            self._since_full, self._rows, self._changes = [name], found.rows, 0
        else:
            self._since_full.append(name)
            self._changes += found.rows

    def load(self, step: int, folder: str) -> Load:
        """Has pservers read one, so that the table is as before `step`."""
        # The first rank to come does it; nothing is read or added before all have come.
        return Load(self._number, step, [folder], self.name, folder, alone=True)

    def read(self, folder: str, found: SavedRows) -> None:
        """Pservers have read one."""
        self._before = folder, found.step
        name, known = PurePath(folder).name, self._since_full
        place = known.index(name) + 1 if name in known else 0
        self._since_full, unused = known[:place] if place else [name], known[place:]
        self._old += unused
