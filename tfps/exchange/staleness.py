"""How far ranks may be apart in mode "async".

Tested in tests/pserver/test_async_slice.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from tfps.membership.view import View


class Phase(NamedTuple):
    """What holds from one meeting of all ranks to the next: its number, and the ranks that still step."""

    number: int
    active: frozenset[int]


class StalenessBound:
    """How many steps a rank may be ahead of the slowest active one. Once all are quiesced a new phase begins."""

    def __init__(self, view: View, staleness: int | None) -> None:
        self.staleness = staleness
        self.view = view  # replaced by `Shard.set_view`
        self._lock = threading.Lock()  # guards what follows
        self._departed: set[int] = set()
        self.phase = Phase(0, frozenset(view.ranks))  # replaced as a whole, so that it is read without the lock

    def quiesce(self, rank: int, *, departed: bool = False) -> None:
        """`rank` steps no further in this phase or, if it has `departed`, in any."""
        with self._lock:
            if departed:
                self._departed.add(rank)
            number, active = self.phase.number, self.phase.active - {rank}
            if not active:
                number, active = number + 1, frozenset(self.view.ranks) - self._departed
            self.phase = Phase(number, active)

    def quiesced(self) -> list[int]:
        """The ranks that are quiesced while others step."""
        others = self.phase.active | self._departed
        return [rank for rank in self.view.ranks if rank not in others]

    def slower(self, steps: Mapping[int, int], rank: int) -> list[int]:
        """The ranks for which `rank` has to wait, given the steps of each rank in this phase."""
        if self.staleness is None:
            return []
        return [other for other in sorted(self.phase.active) if steps[rank] - steps[other] > self.staleness]
