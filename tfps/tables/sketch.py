"""Counts updates of ids that have no row: a count-min sketch (Cormode, Muthukrishnan: Journal of Algorithms 55, 2005).

Each id has a counter in each of four lines, which it shares with others; the least of them counts. Only those that are
the least are raised (conservative update: Estan and Varghese, SIGCOMM 2002), so others raise a count less often.

A sketch that has counted too much says of every id that it is frequent. So all counters are halved whenever those of
a line would have counted, on average, half of what admits an id (as TinyLFU does: https://arxiv.org/abs/1512.00727): up
to then counts are too low for no id, and too high for few; beyond, ids that come rarely are forgotten.

Tested in tests/tables/test_index.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfps.exchange.requests import Ids
from tfps.tables.hashing import GOLDEN, mix
from tfps.tables.index import PIECE
from tfps.types import Array

WIDTH = 2**22  # counters of a line
_LINES = 4


class Sketch:
    """Counts up to `most`, at most 2**16 - 1."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Array = np.zeros(_LINES * WIDTH, np.uint8 if most < 2**8 else np.uint16)
        self._counted, self._full = 0, WIDTH * max(most // 2, 1)

    @property
    def nbytes(self) -> int:
        """Of all counters."""
        return self._counts.nbytes

    def add(self, ids: Ids) -> NDArray[np.int64]:
        """Counts each of `ids`, which are unique, once; returns their counts, at most `most`."""
        counts = np.empty(ids.size, np.int64)
        for begin in range(0, ids.size, PIECE):
            counts[begin : begin + PIECE] = self._added(ids[begin : begin + PIECE])
        self._counted += ids.size
        if self._counted >= self._full:
            self._counts >>= 1
            self._counted //= 2
        return counts

    def _added(self, ids: Ids) -> Array:
        # Two hashes make four, as good for this (Kirsch and Mitzenmacher, ESA 2006).
        hashes = mix(ids.astype(np.uint64) + GOLDEN)
        cell, step = (hashes >> np.uint64(32)).view(np.int64), (hashes & np.uint64(2**32 - 1)).view(np.int64) | 1
        cells = np.empty((_LINES, ids.size), np.int64)
        for line in range(_LINES):
            cells[line] = (cell & (WIDTH - 1)) + line * WIDTH
            cell += step
        counts: Array = self._counts.take(cells).min(axis=0)
        counts += counts < self._most
        for each in cells:
            np.maximum.at(self._counts, each, counts)
        return counts
