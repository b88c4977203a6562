"""Who takes part in a job, and how that changes. Values only: no I/O, no locks."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tfps.errors import ConnectError, ProtocolError

MAX_GENERATION = 2**16 - 1  # a frame has two bytes for it


@dataclass(frozen=True, slots=True)
class View:
    """Who takes part in a job between two changes. ConnectError: nobody is left, or there have been too many changes.

    A round is complete when all ranks of the view in force have pushed. A rank keeps its number from view to view, and
    the number of `workers` stays: those that are lost leave their numbers free.
    """

    generation: int  # 1 for a job's first view, then one more for each change
    ranks: tuple[int, ...]  # the workers' numbers, ascending; a worker keeps its number from view to view
    pservers: tuple[int, ...]  # their places in the list that all workers have, ascending
    workers: int  # with which the job was started: numbers are below

    def __post_init__(self) -> None:
        for name, members in (("ranks", self.ranks), ("pservers", self.pservers)):
            if not members or members[0] < 0 or list(members) != sorted(set(members)):
                raise ConnectError(
                    f"{name} of a view must be different numbers, ascending, at least one, got {members}"
                )
        if self.ranks[-1] >= self.workers:
            raise ConnectError(f"ranks of a view must be below {self.workers}, its number of workers, got {self.ranks}")
        if not 1 <= self.generation <= MAX_GENERATION:
            raise ConnectError(f"generation of a view must be from 1 to {MAX_GENERATION}, got {self.generation}")

    @classmethod
    def first(cls, workers: int, pservers: int = 1) -> View:
        """A job's first view: all its workers, all its pservers."""
        return cls(1, tuple(range(workers)), tuple(range(pservers)), workers)

    def place(self, rank: int) -> int:
        """The place of `rank` among those that take part, from 0. Raises ProtocolError if it does not."""
        if rank not in self.ranks:
            raise ProtocolError(f"rank must be one of {', '.join(map(str, self.ranks))}, got {rank}")
        return self.ranks.index(rank)

    def next(self, *, left: Collection[int] = (), joined: Collection[int] = (), lost: Collection[int] = ()) -> View:
        """The view after ranks have `left` and `joined`, and pservers were `lost`.

        A number may be given anew, but not within one change. ConnectError: who goes is not here, who comes is here
        already, or nobody would be left.
        """
        here, pservers = set(self.ranks), set(self.pservers)
        if not here.issuperset(left) or not pservers.issuperset(lost) or not here.isdisjoint(joined):
            raise ConnectError(
                f"a change must take out who is in {self} and add who is not, got left {sorted(left)}, joined "
                f"{sorted(joined)} and lost pservers {sorted(lost)}"
            )
        ranks = here.difference(left).union(joined)
        return View(self.generation + 1, tuple(sorted(ranks)), tuple(sorted(pservers.difference(lost))), self.workers)


class RankSets:
    """Numbers the sets of ranks whose pushes are in replies: 1 is `everybody`; any thread.

    `notify` gets the number and the ranks of every other set, before `number` first returns it.
    """

    def __init__(self, everybody: Collection[int], notify: Callable[[int, tuple[int, ...]], object]) -> None:
        self._notify, self._lock = notify, threading.Lock()  # guards _numbers
        self._everybody = len(everybody)
        self._numbers = {frozenset(everybody): 1}

    def number(self, ranks: Collection[int]) -> int:
        """The number of the set of `ranks`, which are among everybody's."""
        if len(ranks) == self._everybody:  # as nearly always
            return 1
        found = frozenset(ranks)
        with self._lock:
            if found not in self._numbers:
                if len(self._numbers) == MAX_GENERATION:
                    raise ProtocolError(f"a job can have {MAX_GENERATION} sets of ranks that push, and has had so many")
                self._numbers[found] = len(self._numbers) + 1
                self._notify(self._numbers[found], tuple(sorted(found)))
            return self._numbers[found]

    def notified(self) -> list[tuple[int, tuple[int, ...]]]:
        """All that `notify` has got, for somebody who comes later."""
        with self._lock:
            return [(number, tuple(sorted(ranks))) for ranks, number in self._numbers.items() if number > 1]


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's place in its job."""

    rank: int
    view: View
    incarnation: str  # tells this run of the job from others; its members know it, nobody else

    @property
    def run(self) -> str:
        """Tells this run from others as well, to anybody: the incarnation cannot be found out by it."""
        return run_of(self.incarnation)


def run_of(incarnation: str) -> str:
    """See `Membership.run`."""
    return hashlib.sha256(incarnation.encode()).hexdigest()[:16]
