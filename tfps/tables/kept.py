"""What the rows of a table were at a moment, as far as they have changed since: so a program can go back to it.

Nothing is copied at that moment. Before rows change, what they are is kept, once: memory is that of the rows that have
changed, without slots.

Tested in tests/tables/test_kept.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tfps.exchange.codecs import Floats
from tfps.exchange.requests import Ids
from tfps.tables.index import PIECE, Positions
from tfps.tables.spec import TableSpec
from tfps.tables.storage import Growing
from tfps.types import Array

_WAS_INITIAL, _WAS_ROW = 1, 2  # stamps


class Piece(NamedTuple):
    """Ids, what they read as, [n, dim], and whether that is a row, bool [n]; else it is an initial value."""

    ids: Ids
    rows: Floats
    there: Array


class Kept:
    """The moment at which the latest step of a table was `step`, and its ids without rows read as `spec` says."""

    def __init__(self, spec: TableSpec, step: int) -> None:
        self.spec, self.step = spec, step
        self.holders: set[int] = set()  # ranks
        self._stored = Growing(spec.dim, 1)

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def note(self, ids: Ids, find: Callable[[Ids, int], Positions], rows: Floats) -> None:
        """Keeps what those of unique `ids` read as of which nothing is kept yet; see `Moments.note`."""
        ids = ids[self._stored.find(ids) < 0]
        for begin in range(0, ids.size, PIECE):
            some = ids[begin : begin + PIECE]
            found = find(some, self.step)
            there = found >= 0
            values = self.spec.initial.values(self.spec.seed, some, self.spec.dim)
            values[there] = rows.take(found[there], axis=0)
            positions = self._stored.place(some)
            self._stored.write(positions, [values])
            self._stored.stamps.array[positions] = np.where(there, _WAS_ROW, _WAS_INITIAL)

    def pieces(self) -> Iterator[Piece]:
        """All that is kept, some at a time."""
        for found in self._stored.stamped(_WAS_INITIAL, _WAS_ROW):
            for begin in range(0, found.size, PIECE):
                at = found[begin : begin + PIECE]
                (rows,) = self._stored.read(at)
                yield Piece(self._stored.ids_at(at), rows, self._stored.stamps.array[at] == _WAS_ROW)


class Moments:
    """The moments that ranks may want to go back to, by name. No locks."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    @property
    def nbytes(self) -> int:
        """Memory in use; 0: there are none."""
        return sum(kept.nbytes for kept in self._kept.values())

    def keep(self, name: str, rank: int, spec: TableSpec, step: int) -> None:
        """It is now, until all ranks that have said so `forget`. What is kept under that name already stays as it is.

        `spec` and `step` are those of the table.
        """
        self._kept.setdefault(name, Kept(spec, step)).holders.add(rank)

    def get(self, name: str) -> Kept | None:
        return self._kept.get(name)

    def forget(self, names: Iterable[str], rank: int) -> None:
        for name in names:
            if (kept := self._kept.get(name)) is not None:
                kept.holders.discard(rank)
                if not kept.holders:
                    del self._kept[name]

    def note(self, ids: Ids, find: Callable[[Ids, int], Positions], rows: Floats) -> None:
        """Before rows of unique `ids` change: `find(ids, step)` has their positions in `rows`, -1 where the table had
        none when `step` was its latest.
        """
        for kept in self._kept.values():
            kept.note(ids, find, rows)
