"""Who takes part in a job, and how that changes. Values only: no I/O, no locks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from tfps.errors import ConnectError, ProtocolError

MAX_GENERATION = 2**16 - 1  # a frame has two bytes for it


@dataclass(frozen=True, slots=True)
class View:
    """Who takes part in a job between two changes. ConnectError: nobody is left, or there have been too many changes.

    Every round belongs to a view: it is complete when all ranks of that view have pushed. Every frame of a round has
    the view's generation.
    """

    generation: int  # 1 for a job's first view, then one more for each change
    ranks: tuple[int, ...]  # the workers' numbers, ascending; a worker keeps its number from view to view
    pservers: tuple[int, ...]  # their places in the list that all workers have, ascending

    def __post_init__(self) -> None:
        for name, members in (("ranks", self.ranks), ("pservers", self.pservers)):
            if not members or members[0] < 0 or list(members) != sorted(set(members)):
                raise ConnectError(
                    f"{name} of a view must be different numbers, ascending, at least one, got {members}"
                )
        if not 1 <= self.generation <= MAX_GENERATION:
            raise ConnectError(f"generation of a view must be from 1 to {MAX_GENERATION}, got {self.generation}")

    @classmethod
    def first(cls, workers: int, pservers: int = 1) -> View:
        """A job's first view: all its workers, all its pservers."""
        return cls(1, tuple(range(workers)), tuple(range(pservers)))

    @property
    def workers(self) -> int:
        """How many workers take part."""
        return len(self.ranks)

    def place(self, rank: int) -> int:
        """The place of `rank` among those that take part, from 0. Raises ProtocolError if it does not."""
        if rank not in self.ranks:
            raise ProtocolError(f"rank must be one of {', '.join(map(str, self.ranks))}, got {rank}")
        return self.ranks.index(rank)

    def check(self, generation: int) -> None:
        """Raises ProtocolError if a frame is of another view."""
        if generation != self.generation:
            raise ProtocolError(
                f"generation of a frame must be {self.generation}, as that of the job's view is now, got {generation}"
            )

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
        return View(self.generation + 1, tuple(sorted(ranks)), tuple(sorted(pservers.difference(lost))))


@dataclass(frozen=True, slots=True)
class Membership:
    """A worker's place in its job."""

    rank: int
    view: View
    incarnation: str  # tells this run of the job from others; its members know it, nobody else

    @property
    def run(self) -> str:
        """Tells this run from others as well, to anybody: the incarnation cannot be found out by it."""
        return hashlib.sha256(self.incarnation.encode()).hexdigest()[:16]
