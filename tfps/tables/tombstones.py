"""Which rows have gone since a step, for saves of what has changed. Tested in tests/tables/test_index.py."""

from __future__ import annotations

import collections

import numpy as np

from tfps.exchange.requests import Ids

LEAST_KEPT, SHARE_KEPT = 2**16, 4  # ids that are kept: so many, or one for so many rows


class Tombstones:
    """The ids whose rows have gone, with the step. Older ones are forgotten if there are too many."""

    def __init__(self) -> None:
        self._ids: collections.deque[tuple[int, Ids]] = collections.deque()
        self._kept = 0
        self._forgotten = -2  # the last step of which some may be missing; -1 is before the first

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return 8 * self._kept

    def add(self, step: int, ids: Ids, rows: int) -> None:
        """Ids go in `step` or, more exactly, before the next; `rows` remain."""
        self._ids.append((step, ids))
        self._kept += ids.size
        while self._kept > max(LEAST_KEPT, rows // SHARE_KEPT):
            when, forgotten = self._ids.popleft()
            self._forgotten = max(self._forgotten, when)
            self._kept -= forgotten.size

    def since(self, step: int) -> Ids | None:
        """The ids that have gone in `step` or later, unique and ascending; None if that is not known any more."""
        if step <= self._forgotten:
            return None
        found = [ids for when, ids in self._ids if when >= step]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def begin(self, step: int) -> None:
        """Forgets all: from `step` on all that go will be known."""
        self._ids.clear()
        self._kept, self._forgotten = 0, step - 1
