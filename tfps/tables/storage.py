"""Where the rows of a table are: a row, its slots and a stamp at each position, and the position of each id.

A **stamp** is the step of a row's last update + 1, or 0: there is no row. `Fixed` is for tables of a fixed number of
rows, whose positions follow from ids; `Growing` is for any ids.

Tested in tests/tables/test_table.py.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator

import numpy as np

from tfps.exchange.codecs import ITEM_BYTES, Floats
from tfps.exchange.requests import Ids
from tfps.tables.index import MOST_POSITIONS, Index, Positions
from tfps.tables.region import Region
from tfps.tables.spec import MOST_STEP
from tfps.types import Array

_SCANNED = 2**16  # stamps that are looked at at a time
_BLOCK_BYTES = 4096  # memory is taken by the page
_LEAST_ROWS = 1024  # there is room for
_GROWTH = 1.5  # times as many when it is full


class Storage(abc.ABC):
    """`arrays` of `dim` floats for each row: the rows, then each slot. No locks."""

    def __init__(self, items: int, dim: int, arrays: int, *, sparse: bool) -> None:
        self._dim, self._sparse = dim, sparse
        self.stamps = Region(np.int32, items, sparse=sparse)
        self.arrays = self._more(arrays)
        self.rows = 0  # how many there are

    def _more(self, arrays: int) -> list[Region]:
        return [Region(np.float32, self.stamps.items, self._dim, sparse=self._sparse) for _ in range(arrays)]

    @property
    @abc.abstractmethod
    def top(self) -> int:
        """Rows are at positions below it."""

    @property
    def _item_bytes(self) -> int:
        return ITEM_BYTES * (self._dim * len(self.arrays) + 1)

    def reserve(self, more: int) -> None:
        """Makes room for so many more rows, or MemoryError."""
        return

    def remove(self, positions: Positions) -> None:
        """Removes rows, which are there."""
        self.stamps.array[positions] = 0
        self.rows -= positions.size

    def read(self, positions: Positions) -> list[Floats]:
        """A copy of what is at each position, [n, dim] of each array."""
        return [region.array.take(positions, axis=0) for region in self.arrays]

    def write(self, positions: Positions, values: list[Floats]) -> None:
        for region, array in zip(self.arrays, values, strict=True):
            region.put(positions, array)

    def renew_slots(self, values: list[float]) -> None:
        """Other slots, of these initial values, in place of those that are there."""
        self.arrays = [self.arrays[0], *self._more(len(values))]
        for positions in self.stamped(1, MOST_STEP + 1):
            for value, region in zip(values, self.arrays[1:], strict=True):
                region.put(positions, np.full((positions.size, self._dim), value, np.float32))

    def count_stamped(self, last: int) -> int:
        """Rows with a stamp up to `last`."""
        return sum(int(np.count_nonzero((stamps <= last) & (stamps > 0))) for _, stamps in self._scanned(0))

    def stamped(self, first: int, last: int, begin: int = 0) -> Iterator[Positions]:
        """Positions from `begin` on of rows with stamps from `first` (at least 1) to `last`, ascending, by and by."""
        for at, stamps in self._scanned(begin) if first <= last else ():
            found = np.flatnonzero((stamps >= first) & (stamps <= last)) + at
            del stamps  # what is yielded to may grow the storage
            if found.size:
                yield found

    def _scanned(self, begin: int) -> Iterator[tuple[int, Array]]:
        while begin < self.top:
            yield begin, self.stamps.array[begin : min(begin + _SCANNED, self.top)]
            begin += _SCANNED


class Fixed(Storage):
    """The ids that `place` of `count` pservers owns of a fixed number: each has its position, whether it has a row."""

    def __init__(self, items: int, dim: int, arrays: int, place: int, count: int) -> None:
        super().__init__(items, dim, arrays, sparse=True)
        self._place, self._count = place, count
        # Which blocks of rows, and of stamps, something has been written to.
        self._rows_of_block = max(_BLOCK_BYTES // (ITEM_BYTES * dim), 1)
        self._written = np.zeros(-(-items // self._rows_of_block), np.bool_)

    @property
    def top(self) -> int:
        return self.stamps.items

    @property
    def nbytes(self) -> int:
        blocks = int(np.count_nonzero(self._written))
        return int(self._written.nbytes) + blocks * self._rows_of_block * self._item_bytes

    def find(self, ids: Ids) -> Positions:
        positions = ids if self._count == 1 else ids // self._count
        return np.where(self.stamps.array.take(positions) > 0, positions, -1)

    def ids_at(self, positions: Positions) -> Ids:
        return positions * self._count + self._place

    def place(self, ids: Ids) -> Positions:
        positions = ids // self._count
        self._written[positions // self._rows_of_block] = True
        self.rows += ids.size
        return positions


class Growing(Storage):
    """Any ids, with an index."""

    def __init__(self, dim: int, arrays: int) -> None:
        super().__init__(_LEAST_ROWS, dim, arrays, sparse=False)
        self._index = Index()

    @property
    def top(self) -> int:
        return self._index.top

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._index.top * self._item_bytes

    def find(self, ids: Ids) -> Positions:
        return self._index.find(ids)

    def ids_at(self, positions: Positions) -> Ids:
        return self._index.ids(positions)

    def reserve(self, more: int) -> None:
        self._index.reserve(more)
        needed = self._index.top + more
        if needed > self.stamps.items:
            items = min(max(needed, int(self.stamps.items * _GROWTH)), MOST_POSITIONS)
            for region in (*self.arrays, self.stamps):
                region.grow(items)

    def place(self, ids: Ids) -> Positions:
        self.reserve(ids.size)
        positions = self._index.add(ids)
        self.rows += ids.size
        return positions

    def remove(self, positions: Positions) -> None:
        self._index.remove(positions)
        super().remove(positions)
