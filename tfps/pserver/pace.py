"""Which ranks step in mode "async", and how far each may be ahead of the others.

Tested in tests/pserver/test_async_slice.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """What holds from one meeting of all ranks to the next: its number, and the ranks that still step."""

    number: int
    active: frozenset[int]


class Pace:
    """The ranks of a job on one pserver. Any thread.

    A rank that rests holds nobody up, until all rest: then all of them are at one place, and a new stage begins.

    Args:
        staleness: how many steps a rank may be ahead of the slowest one that does not rest; None: any number.

    Attributes:
        stage: replaced as a whole, so that it is read without a lock.
    """

    def __init__(self, workers: int, staleness: int | None) -> None:
        self.workers, self.staleness = workers, staleness
        self._lock = threading.Lock()  # guards what follows
        self._gone: set[int] = set()
        self.stage = Stage(0, frozenset(range(workers)))

    def rest(self, rank: int) -> None:
        """`rank` steps no further in this stage."""
        with self._lock:
            self._without(rank)

    def leave(self, rank: int) -> None:
        """`rank` has left the job."""
        with self._lock:
            self._gone.add(rank)
            self._without(rank)

    def _without(self, rank: int) -> None:
        number, active = self.stage.number, self.stage.active - {rank}
        if not active:
            number, active = number + 1, frozenset(range(self.workers)) - self._gone
        self.stage = Stage(number, active)

    def resting(self) -> list[int]:
        """The ranks that rest, while others step."""
        active = self.stage.active
        return [rank for rank in range(self.workers) if rank not in active and rank not in self._gone]

    def may_go_on(self, steps: Sequence[int], rank: int) -> bool:
        """Whether `rank` may take its next step, given the steps of each rank in this stage."""
        return not self.slower(steps, rank)

    def slower(self, steps: Sequence[int], rank: int) -> list[int]:
        """The ranks for which `rank` has to wait."""
        limit = self.staleness
        if limit is None:
            return []
        return [other for other in sorted(self.stage.active) if steps[rank] - steps[other] > limit]
