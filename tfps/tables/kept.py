"""What the rows of a table were at a moment, as far as they have changed since: so a program can go back to it.

Nothing is copied at that moment. Before rows change, what they are is kept, once: memory is that of the rows that have
changed, without slots.

Tested in tests/tables/test_kept.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tfps.exchange.codecs import Floats
from tfps.exchange.requests import Ids
from tfps.tables.index import PIECE
from tfps.tables.spec import TableSpec
from tfps.tables.storage import Growing
from tfps.types import Array

_WAS_INITIAL, _WAS_ROW = 1, 2  # stamps


class Kept:
    """The moment at which the newest step of a table was `step`, and its ids without rows read as `spec` says."""

    def __init__(self, spec: TableSpec, step: int) -> None:
        self.spec, self.step = spec, step
        self.holders: set[int] = set()  # ranks
        self._stored = Growing(spec.dim, 1)

    @property
    def nbytes(self) -> int:
        return self._stored.nbytes

    def new(self, ids: Ids) -> Ids:
        """Those of `ids` of which nothing is kept yet."""
        return ids[self._stored.find(ids) < 0]

    def add(self, ids: Ids, rows: Floats, there: Array) -> None:
        """Keeps what new `ids` read as, [n, dim], and whether they had rows, bool [n]."""
        positions = self._stored.place(ids)
        self._stored.write(positions, [rows])
        self._stored.stamps.array[positions] = np.where(there, _WAS_ROW, _WAS_INITIAL)

    def pieces(self) -> Iterator[tuple[Ids, Floats, Array]]:
        """All that `add` has got, some at a time."""
        for found in self._stored.stamped(_WAS_INITIAL, _WAS_ROW):
            for begin in range(0, found.size, PIECE):
                at = found[begin : begin + PIECE]
                (rows,) = self._stored.read(at)
                yield self._stored.ids_at(at), rows, self._stored.stamps.array[at] == _WAS_ROW
