"""Where the rows of ids are: a hash table with open addressing (Knuth, The Art of Computer Programming 3, 6.4).

Many ids are looked for at a time: all look at their first slot; those that find neither themselves nor an empty slot
look at the next one, and so on.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.requests import Ids
from tfps.tables import hashing
from tfps.tables.region import Region
from tfps.types import Array

Positions = NDArray[np.int64]

MOST_POSITIONS = 2**31 - 2
PIECE = 2**14  # ids that are looked for at a time: what belongs to them stays in the cache
_FULL, _GROWTH = 0.7, 1.5  # the largest share of slots in use, and how many more rows a new table has room for
_LEAST_SLOTS = mmap.PAGESIZE // 4
_EMPTY, _REMOVED = 0, -1


class Index:
    """The position of each id, from 0 on; a position that has become free is taken again. No locks.

    4 bytes for each of 1.4 to 2.2 slots, 8 for an id, and 4 for each free position.
    """

    def __init__(self) -> None:
        self.rows, self.top = 0, 0  # ids that are here, and positions that have ever been taken
        self._free: list[NDArray[np.int32]] = []  # positions below `top`, the last ones first
        self._ids = Region(np.int64, _LEAST_SLOTS)  # by position
        self._slots = Region(np.int32, _LEAST_SLOTS)  # position + 1, `_EMPTY` or `_REMOVED`
        self._removed = 0  # slots that say so

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return 4 * self._slots.items + 8 * self.top + sum(each.nbytes for each in self._free)

    def ids(self, positions: Positions) -> Ids:
        """A copy of the ids at positions that are taken."""
        found: Ids = self._ids.array.take(positions)
        return found

    def find(self, ids: Ids) -> Positions:
        """The position of each id, -1 if it has none; ids may repeat."""
        if ids.size <= PIECE:
            return self._found(ids)
        found = np.empty(ids.size, np.int64)
        for begin in range(0, ids.size, PIECE):
            found[begin : begin + PIECE] = self._found(ids[begin : begin + PIECE])
        return found

    def reserve(self, more: int) -> None:
        """Makes room for so many more ids. Raises MemoryError, and then nothing has changed for who looks."""
        free = sum(each.size for each in self._free)
        top = self.top + max(more - free, 0)
        if top > MOST_POSITIONS:
            raise MemoryError(f"a pserver can have at most {MOST_POSITIONS} rows of a table, got {top}")
        if top > self._ids.items:
            self._ids.grow(min(max(top, int(self._ids.items * _GROWTH)), MOST_POSITIONS))
        if self.rows + self._removed + more > _FULL * self._slots.items:
            self._rebuild(int((self.rows + more) * _GROWTH / _FULL) + 1)

    def add(self, ids: Ids) -> Positions:
        """The new positions of ids that have none and are unique."""
        self.reserve(ids.size)
        positions = self._taken(ids.size)
        self._ids.array[positions] = ids
        self._insert(ids, positions)
        self.rows += ids.size
        return positions

    def remove(self, positions: Positions) -> None:
        """Makes positions free, which are taken and unique."""
        slots = self._slots.array
        for begin in range(0, positions.size, PIECE):
            entries = positions[begin : begin + PIECE] + 1
            at = self._first(self.ids(entries - 1))
            while True:
                other = slots.take(at) != entries
                slots[at[~other]] = _REMOVED
                if not other.any():
                    break
                at, entries = self._next(at[other]), entries[other]
        self._free.append(positions.astype(np.int32)[::-1].copy())
        self._removed += positions.size
        self.rows -= positions.size

    def _first(self, ids: Ids) -> Positions:
        return hashing.low_below(hashing.of_ids(ids), self._slots.items)

    def _next(self, at: Positions) -> Positions:
        at += 1
        at[at == self._slots.items] = 0
        return at

    def _found(self, ids: Ids) -> Positions:
        slots, known = self._slots.array, self._ids.array
        at = self._first(ids)
        entries = slots.take(at)
        found = entries.astype(np.int64)
        found -= 1
        hit = known.take(found, mode="clip") == ids
        hit &= entries > 0
        found[~hit] = -1
        hit |= entries == _EMPTY
        active = np.flatnonzero(~hit)
        at, ids = at[active], ids[active]
        while active.size:
            at = self._next(at)
            entries = slots.take(at)
            positions = entries.astype(np.int64) - 1
            hit = known.take(positions, mode="clip") == ids
            hit &= entries > 0
            found[active[hit]] = positions[hit]
            hit |= entries == _EMPTY
            on = ~hit
            active, at, ids = active[on], at[on], ids[on]
        return found

    def _taken(self, count: int) -> Positions:
        """Free positions: those that became so last, then new ones."""
        parts: list[Array] = []
        needed = count
        while needed and self._free:
            last = self._free.pop()
            if last.size > needed:
                self._free.append(last[:-needed].copy())
                last = last[-needed:]
            parts.append(last[::-1])
            needed -= last.size
        parts.append(np.arange(self.top, self.top + needed))
        self.top += needed
        return np.concatenate(parts).astype(np.int64)

    def _insert(self, ids: Ids, positions: Positions) -> None:
        """Each takes the first slot on its way that is empty or removed; who loses one to another goes on."""
        slots = self._slots.array
        for begin in range(0, ids.size, PIECE):
            at = self._first(ids[begin : begin + PIECE])
            entries = (positions[begin : begin + PIECE] + 1).astype(np.int32)
            while entries.size:
                before = slots.take(at)
                vacant = before <= 0
                slots[at[vacant]] = entries[vacant]
                lost = slots.take(at) != entries
                self._removed -= int(np.count_nonzero((before == _REMOVED) & ~lost))
                at, entries = self._next(at[lost]), entries[lost]

    def _rebuild(self, slots: int) -> None:
        """A new table of slots for the ids that are here; the old one goes first."""
        slots = max(slots, _LEAST_SLOTS)
        free = np.zeros(self.top, np.bool_)
        for each in self._free:
            free[each] = True
        self._slots, self._removed = Region(np.int32, slots), 0
        for begin in range(0, self.top, PIECE):
            positions = np.flatnonzero(~free[begin : begin + PIECE]) + begin
            self._insert(self.ids(positions), positions)
