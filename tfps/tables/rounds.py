"""What an owner of rows knows of the steps of all ranks, and what it answers. No I/O; the caller holds a lock.

In mode "sync" (`Rounds`) a rank that looks up rows in step n + 1 gets them as step n has left them. It may ask before
that, as soon as it has the batch: then it gets at once the rows that step n does not touch, and the others when step n
has been applied. What step n touches is known before its gradients come: a rank says when it has asked for the last
rows of a step, and has gradients of those only. In other modes (`Apart`) each rank's update is applied as it comes.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import MismatchError, ProtocolError
from tfps.exchange.codecs import Floats
from tfps.exchange.requests import Ids
from tfps.exchange.staleness import StalenessBound
from tfps.exchange.update_spec import StepScalars, difference
from tfps.membership.view import View
from tfps.tables.messages import PushedRows
from tfps.tables.table import Table
from tfps.wire.frames import Header

_MOST_AHEAD = 100  # steps that a rank may be ahead of those that have been applied: they are kept


@dataclass(eq=False, slots=True)
class OpenLookup:
    """A lookup of a rank that has not got all its rows yet."""

    rank: int
    header: Header  # of its frame
    ids: Ids
    came_ns: int
    left: NDArray[np.bool_] | None = None  # which it has not got; None: all


@dataclass(eq=False, slots=True)
class Added:
    """What a rank adds in a step, as far as it has come."""

    rank: int
    ids: list[Ids] = field(default_factory=list)
    gradients: list[Floats] = field(default_factory=list)
    scalars: bytes = b""
    header: Header | None = None  # of the last of its frames; None: more follow
    came_ns: int = 0  # when that came

    def part(self, dim: int) -> tuple[Ids, Floats]:
        if len(self.ids) == 1:
            return self.ids[0], self.gradients[0]
        if not self.ids:
            return np.empty(0, np.int64), np.empty((0, dim), np.float32)
        return np.concatenate(self.ids), np.concatenate(self.gradients)


class Rows(NamedTuple):
    """Answers a lookup, or a part of it."""

    lookup: OpenLookup
    rows: Floats  # of the ids that are chosen
    chosen: NDArray[np.bool_] | None  # None: all
    last: bool


class Applied(NamedTuple):
    """Answers those whose gradients have been applied together."""

    added: Sequence[Added]
    together: bool  # as all ranks have in this step


Answers = list[Rows | Applied]


@dataclass(eq=False, slots=True)
class _Step:
    """What is known of a step that has not been applied, by rank."""

    added: dict[int, Added] = field(default_factory=dict)
    looked_up: dict[int, list[Ids]] = field(default_factory=dict)  # rows that it may have gradients of
    complete: dict[int, int] = field(default_factory=dict)  # who asks for no more, in which attempt at the step

    @property
    def added_all(self) -> set[int]:
        """Who has added all."""
        return {rank for rank, each in self.added.items() if each.header is not None}


@dataclass(slots=True)
class Traffic:
    """Totals since the table was declared."""

    asked_rows: int = 0
    early_rows: int = 0  # that were answered before the step before had been applied
    gradient_rows: int = 0  # with gradients, of all ranks
    updates: int = 0  # of the table: one for each step, or in mode "async" for each step of a rank
    updated_rows: int = 0  # with gradients in an update, each once, also those that were not admitted


class Rounds:
    """Rounds of all ranks, for mode "sync"."""

    def __init__(self, table: Table, view: View, step: int = 0) -> None:
        self.table, self.view, self.step = table, view, step  # how many steps have been applied
        self.traffic = Traffic()
        self.held = 0  # by so many nothing is applied
        self.restoring = False  # nor is anything read
        self._steps: dict[int, _Step] = {}  # that have begun
        self._waiting: list[OpenLookup] = []

    def lookup(self, lookup: OpenLookup, *, trains: bool, complete: bool) -> Answers:
        """A rank looks up rows."""
        header, rank = lookup.header, lookup.rank
        self.table.spec.check(lookup.ids)
        self._check_step(rank, header.step)
        self.traffic.asked_rows += len(lookup.ids)
        if trains:
            begun = self._steps.setdefault(header.step, _Step())
            begun.looked_up.setdefault(rank, []).append(lookup.ids)
            if complete:
                begun.complete[rank] = header.generation
        if self._is_current(rank, header.step):
            return [*self._early(), self._rest(lookup)]
        self._waiting.append(lookup)
        return self._early()

    def add(self, rank: int, header: Header, part: PushedRows, now_ns: int, *, last: bool) -> Answers:
        """A rank adds a part of its gradients of a step."""
        step, spec = header.step, self.table.spec
        self._check_step(rank, step)
        added = self._steps.setdefault(step, _Step()).added.setdefault(rank, Added(rank))
        if added.header is not None or self.is_applied(rank, step + 1):
            raise ProtocolError(f"rank {rank} must push step {step} of {self.table.label} once")
        spec.check(part.ids)
        self._check_looked_up(self._steps[step], rank, part.ids)
        added.scalars = part.scalars
        if len(part.ids):
            added.ids.append(part.ids)
            added.gradients.append(part.gradients)
        self.traffic.gradient_rows += len(part.ids)
        if not last:
            return []
        scalars = StepScalars.unpack(part.scalars, spec.update)
        for other, theirs in self._steps[step].added.items():
            if theirs.header is not None:
                self._compare(other, StepScalars.unpack(theirs.scalars, spec.update), rank, scalars)
                break
        added.header, added.came_ns = header, now_ns
        return self.completed()

    def late_ns(self, step: int, now_ns: int) -> int:
        """How long ago the first rank has added all in `step`."""
        added = begun.added.values() if (begun := self._steps.get(step)) else ()
        return now_ns - min((each.came_ns for each in added if each.header), default=now_ns)

    def completed(self) -> Answers:
        """Applies steps to which all ranks have added; answers them, and who waited for that."""
        answers: Answers = []
        while not self.held and (step := self._steps.get(self.step)) and step.added_all >= set(self.view.ranks):
            del self._steps[self.step]
            answers.append(self._apply([step.added[rank] for rank in sorted(step.added_all)], together=True))
            self.step += 1
            answers += self.current()
        return answers + self._early() if answers else []

    def _apply(self, added: Sequence[Added], *, together: bool) -> Applied:
        spec, ids = self.table.spec, [some for each in added for some in each.ids]
        scalars = StepScalars.unpack(added[0].scalars, spec.update)
        self.table.update([each.part(spec.dim) for each in added], scalars, self.step)
        self.traffic.updates += 1
        self.traffic.updated_rows += _unique(ids)
        return Applied(added, together)

    def current(self) -> Answers:
        """Answers to who has waited for what is there now."""
        ready = [each for each in self._waiting if self._is_current(each.rank, each.header.step)]
        self._waiting = [each for each in self._waiting if each not in ready]
        return list(map(self._rest, ready))

    def change_view(self, view: View) -> Answers:
        self.view = view
        self._waiting = [each for each in self._waiting if each.rank in view.ranks]
        for step in self._steps.values():
            step.added = {rank: each for rank, each in step.added.items() if each.header or rank in view.ranks}
        return [*self.completed(), *self._early()]

    def missing(self, asking: int | None = None) -> list[int]:
        """The ranks that others wait for, or `asking` alone if it is not the same for all."""
        done = self._added_all
        # Who only prefetches waits for nobody yet; whose step it is has added to the one before.
        return [rank for rank in self.view.ranks if rank not in done] if done else []

    def late(self, ranks: Iterable[int]) -> int | None:
        """The first of `ranks` that others wait for and cannot do without."""
        done = self._added_all
        return next((rank for rank in ranks if done and rank not in done), None)

    @property
    def _added_all(self) -> set[int]:
        """Who has added all in the current step."""
        return step.added_all if (step := self._steps.get(self.step)) else set()

    def steps_of(self, rank: int) -> int:
        """How many steps of `rank` have been applied."""
        return self.step

    def is_applied(self, rank: int, step: int) -> bool:
        """Whether the steps of `rank` before `step` have been."""
        return self.steps_of(rank) >= step

    def _check_step(self, rank: int, step: int) -> None:
        most = self.step + _MOST_AHEAD
        if step > most:
            raise ProtocolError(f"step of {self.table.label} must be at most {most}, got {step} of rank {rank}")

    def _check_looked_up(self, step: _Step, rank: int, ids: Ids) -> None:
        """Checks that a rank that has said which rows it may have gradients of has no others."""
        if rank not in step.complete or any(np.array_equal(ids, own) for own in step.looked_up[rank]):
            return
        others = np.setdiff1d(ids, np.concatenate(step.looked_up[rank]), assume_unique=True)
        if others.size:
            raise ProtocolError(
                f"gradients of {self.table.label} must be of rows that were asked for in their step, got id "
                f"{others[0]} of rank {rank}"
            )

    def _compare(self, other: int, theirs: StepScalars, rank: int, ours: StepScalars) -> None:
        if (what := difference(self.table.spec.update.scalars, theirs, ours)) is not None:
            raise MismatchError(
                f"the workers do not train the same: ranks {other} and {rank} update {self.table.label} with "
                f"different {what}"
            )

    def _is_current(self, rank: int, step: int) -> bool:
        """Whether a rank that asks in `step` may have the rows as they are."""
        return step <= self.step and not self.restoring

    def _early(self) -> Answers:
        """Answers with rows that the current step does not touch, once it is known which it does."""
        step, ranks = self._steps.get(self.step), set(self.view.ranks)
        if step is None or not self._waiting or not step.complete.keys() >= ranks:
            return []
        if len({step.complete[rank] for rank in ranks}) > 1:  # some have begun it again, with other rows
            return []
        touched, answers = [ids for each in step.looked_up.values() for ids in each], Answers()
        for each in [each for each in self._waiting if each.left is None and each.header.step == self.step + 1]:
            each.left = left = _are_among(each.ids, touched)
            self.traffic.early_rows += len(left) - int(left.sum())
            if not left.any():
                answers.append(self._rest(each))
                self._waiting.remove(each)
            elif not left.all():
                answers.append(self._rows(each, ~left, last=False))
        return answers

    def _rest(self, lookup: OpenLookup) -> Rows:
        """What a rank has not got of what it has asked for."""
        left = lookup.left
        return self._rows(lookup, left if left is not None and left.any() and not left.all() else None, last=True)

    def _rows(self, lookup: OpenLookup, chosen: NDArray[np.bool_] | None, *, last: bool) -> Rows:
        ids = lookup.ids if chosen is None else lookup.ids[chosen]
        return Rows(lookup, self.table.lookup(ids), chosen, last)


class Apart(Rounds):
    """Each update is applied as it comes: workers step by themselves. Who is too far ahead waits for rows."""

    def __init__(self, table: Table, view: View, step: int, bound: StalenessBound) -> None:
        super().__init__(table, view, step)
        self._bound = bound
        self._of_rank = dict.fromkeys(view.ranks, step)  # how many steps of each have been applied
        self._done = dict.fromkeys(view.ranks, 0)  # in this phase
        self._phase = bound.phase.number

    def steps_of(self, rank: int) -> int:
        return self._of_rank.get(rank, 0)

    def _check_step(self, rank: int, step: int) -> None:
        most = self._of_rank.setdefault(rank, step) + _MOST_AHEAD
        if step > most:
            raise ProtocolError(f"step of {self.table.label} must be at most {most} for rank {rank}, got {step}")

    def _is_current(self, rank: int, step: int) -> bool:
        self._align()
        applied = step <= self._of_rank[rank] and not self.restoring
        return applied and not self._bound.slower(self._done, rank)

    def _align(self) -> None:
        """In a new phase nobody is ahead."""
        if self._phase != (number := self._bound.phase.number):
            self._phase, self._done = number, dict.fromkeys(self._bound.view.ranks, 0)

    def add(self, rank: int, header: Header, part: PushedRows, now_ns: int, *, last: bool) -> Answers:
        self._align()
        step = header.step
        if not self.held and step > (expected := self._of_rank.setdefault(rank, step)):
            raise ProtocolError(f"rank {rank} must push step {expected} of {self.table.label}, got {step}")
        return super().add(rank, header, part, now_ns, last=last)

    def _compare(self, other: int, theirs: StepScalars, rank: int, ours: StepScalars) -> None:
        """Ranks are at different steps."""

    def completed(self) -> Answers:
        answers: Answers = []
        for number, step in list(self._steps.items()) if not self.held else ():
            for rank in step.added_all:
                added = step.added.pop(rank)
                step.looked_up.pop(rank, None)
                # Rows expire by the steps of the rank that is first.
                self.step = max(self.step, number)
                answers.append(self._apply([added], together=False))
                self._of_rank[rank] = number + 1
                self._done[rank] = self._done.get(rank, 0) + 1
                self.step = max(self._of_rank.values())
            if not step.added and number < min(self._of_rank.values()):
                del self._steps[number]
        return [*answers, *self.current()]

    def _early(self) -> Answers:
        return []

    def missing(self, asking: int | None = None) -> list[int]:
        late: set[int] = set()
        for each in self._waiting:
            if asking in (None, each.rank):
                late.update(self._bound.slower(self._done, each.rank))
        return sorted(late)

    def late(self, ranks: Iterable[int]) -> int | None:
        return None


def _are_among(ids: Ids, others: Sequence[Ids]) -> NDArray[np.bool_]:
    """Which of `ids` are in one of `others`, which are ascending."""
    found = np.zeros(len(ids), np.bool_)
    for some in others:
        if some.size:  # np.isin would sort again
            found |= some.take(some.searchsorted(ids), mode="clip") == ids
    return found


def _unique(ids: Sequence[Ids]) -> int:
    """How many different ids there are in several arrays."""
    if len(ids) < 2:
        return sum(map(len, ids))
    every = np.concatenate(ids)
    every.sort()
    return int(np.count_nonzero(every[1:] != every[:-1])) + bool(every.size)
