"""The gradients of several ranks as one for each row, added in the order of ranks, some rows at a time.

Tested in tests/tables/test_index.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfps.exchange.requests import Ids
from tfps.exchange.rules import Floats
from tfps.types import Array


class Part(NamedTuple):
    """What one rank contributes: ids, each once, and the gradient of each [n, dim]."""

    ids: Ids
    gradients: Floats


class One:
    """The gradients of one rank: as they are, not a bit is changed."""

    def __init__(self, part: Part) -> None:
        self.ids, self._gradients = part

    def rows(self, chosen: Array | slice) -> Floats:
        """The gradients of so many of `ids`, not to be written to."""
        return self._gradients[chosen] if isinstance(chosen, slice) else self._gradients.take(chosen, axis=0)


class Several:
    """The sums of the gradients of several ranks; where one rank only has an id, its gradient as it is."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(*_ascending(part.ids), part.gradients) for part in parts]
        every = np.concatenate([part.ids for part in parts])
        every.sort()
        first = np.ones(every.size, np.bool_)
        np.not_equal(every[1:], every[:-1], out=first[1:])
        self.ids: Ids = every[first]

    def rows(self, chosen: Array | slice) -> Floats:
        """The sums for so many of `ids`, in new memory."""
        wanted = self.ids[chosen]
        sums = np.empty((wanted.size, self._parts[0][2].shape[1]), np.float32)
        begun = np.zeros(wanted.size, np.bool_)
        for ids, order, gradients in self._parts:
            places = ids.searchsorted(wanted)
            has = ids.take(places, mode="clip") == wanted
            for which, add in ((has & ~begun, False), (has & begun, True)):
                at = np.flatnonzero(which)
                if not at.size:
                    continue
                rows = places[at] if order is None else order[places[at]]
                if add:
                    with np.errstate(all="ignore"):  # training that diverges is no business of a pserver's log
                        sums[at] += gradients.take(rows, axis=0)
                else:
                    sums[at] = gradients.take(rows, axis=0)
            begun |= has
        return sums


def merged(parts: Sequence[Part]) -> One | Several:
    """The gradients of all `parts`, in their order."""
    some = [part for part in parts if part.ids.size] or list(parts[:1])
    return One(some[0]) if len(some) == 1 else Several(some)


def first_repeated(ids: Ids) -> int | None:
    """An id that is there more than once, None if there is none."""
    if ids.size < 2 or (ids[1:] > ids[:-1]).all():
        return None
    ascending = np.sort(ids)
    again = np.flatnonzero(ascending[1:] == ascending[:-1])
    return int(ascending[again[0]]) if again.size else None


def _ascending(ids: Ids) -> tuple[Ids, Array | None]:
    """The ids in order, and where each was; None if they were in order."""
    if (ids[1:] > ids[:-1]).all():
        return ids, None
    order = np.argsort(ids)
    return ids[order], order
