"""A table's rows on one pserver: asked for by id, updated by the ranks' gradients. `AppliesEach` is for other modes.

In mode "sync" a rank that asks in step n + 1 gets rows as step n has left them. It may ask before that, as soon as it
has the batch: then it gets at once the rows that step n does not touch, and the others when step n has been applied.
What step n touches is known before its gradients come: a rank says when it has asked for the last rows of a step, and
has gradients of those only.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ConfigError, MismatchError, ProtocolError
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.requests import Ids
from tfps.exchange.update_spec import StepScalars, difference
from tfps.membership.view import RankSets, View
from tfps.pserver.async_slice import StalenessBound
from tfps.pserver.slices import Answer, Late, OwnedSlice, Push
from tfps.tables.files import remove_saves, restored, write_shard
from tfps.tables.spec import TableSpec
from tfps.tables.table import Table, TableStats
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import ASK, EMPTY, LAST, WHOLE, Header
from tfps.wire.rows import decode_ids, decode_push, decode_rows, encode_some

_NOTHING = memoryview(b"")
_MOST_AHEAD = 100  # steps that a rank may be ahead of those that have been applied: they are kept
_LOOK_S = 0.5  # between looks whether the job has failed


@dataclass(eq=False, slots=True)
class _Asked:
    """Rows that a rank has asked for and not got, or not all of them."""

    push: Push
    ids: Ids
    came_ns: int  # on the recorder's clock
    left: NDArray[np.bool_] | None = None  # which it has not got; None: all


@dataclass(eq=False, slots=True)
class _Added:
    """What a rank adds in a step, as far as it has come."""

    ids: list[Ids] = field(default_factory=list)
    gradients: list[Floats] = field(default_factory=list)
    scalars: bytes = b""
    push: Push | None = None  # the last of its frames; None: more follow
    came_ns: int = 0  # when that came, on the recorder's clock

    def part(self, dim: int) -> tuple[Ids, Floats]:
        if len(self.ids) == 1:
            return self.ids[0], self.gradients[0]
        if not self.ids:
            return np.empty(0, np.int64), np.empty((0, dim), np.float32)
        return np.concatenate(self.ids), np.concatenate(self.gradients)


@dataclass(eq=False, slots=True)
class _Step:
    """What is known of a step that has not been applied, by rank."""

    added: dict[int, _Added] = field(default_factory=dict)
    asked: dict[int, list[Ids]] = field(default_factory=dict)  # rows that it may have gradients of
    complete: dict[int, int] = field(default_factory=dict)  # who asks for no more, in which attempt at the step

    @property
    def whole(self) -> set[int]:
        """Who has added all."""
        return {rank for rank, each in self.added.items() if each.push is not None}


class Traffic(NamedTuple):
    """Totals since the table was declared."""

    asked: int = 0  # rows
    early: int = 0  # rows that were answered before the step before had been applied
    pushed: int = 0  # rows with gradients, of all ranks
    updates: int = 0  # of the table: one for each step, or in mode "async" for each step of a rank
    updated: int = 0  # rows with gradients in an update, each once, also those that were not admitted


class TableSlice(OwnedSlice):
    """Rounds of all ranks, for mode "sync"."""

    def __init__(
        self,
        recorder: Recorder,
        label: str,
        table: Table,
        codec: Codec | None,
        sets: RankSets,
        view: View,
        saved: dict[str, str],
        step: int = 0,
    ) -> None:
        super().__init__(recorder, 0, sets)
        self.label, self.table, self._codec, self._view = label, table, codec, view
        self.step = step  # how many have been applied
        self.traffic = Traffic()
        self._applied = threading.Condition(self.lock)  # notified when a step has been, and when nothing is held
        self._held = 0  # by so many nothing is applied
        self._restoring = False  # nor is anything read
        self._saved = saved  # by all tables: folders, by what `restore` gets as identity of files beside a model
        self._meetings: dict[str, set[int]] = {}  # who has come to replace rows, by what with
        self._restored: list[str] = []  # what has been put in place of rows, by its id
        self._restored_by: Counter[int] = Counter()  # by rank, how much of it
        self._steps: dict[int, _Step] = {}  # that have begun
        self._waiting: list[_Asked] = []

    @property
    def steps_over(self) -> int:
        return self.step

    # Frames

    def take(self, push: Push, upcoming: Container[int] = ()) -> tuple[list[Answer], int]:
        now_ns = self._recorder.clock()
        with self.lock:
            if push.rank not in self._view.ranks:
                return [], 0  # it has just been lost
            if push.target is not None:
                raise ProtocolError(f"rows of {self.label} must come in frames, got {push.target.place}")
            self._arrived(push, now_ns)
            if push.header.flags & ASK:
                return self._ask(push, now_ns), 0
            late_ns = self._late_ns(push, now_ns)
            return self._add(push, now_ns), late_ns

    def _late_ns(self, push: Push, now_ns: int) -> int:
        """How long after the first rank's gradients of its step the last ones of this rank come."""
        step = self._steps.get(push.header.step) if push.header.flags & LAST else None
        return now_ns - min([each.came_ns for each in step.added.values() if each.push] or [now_ns]) if step else 0

    def _ask(self, push: Push, now_ns: int) -> list[Answer]:
        ids, size = decode_ids(push.payload)
        if size != len(push.payload) or push.header.flags & ~(ASK | LAST | EMPTY):
            raise ProtocolError(f"rows of {self.label} must be asked for by ids alone, got {len(push.payload)} bytes")
        self.table.spec.check(ids)
        step, rank = push.header.step, push.rank
        self._check_step(rank, step)
        self.traffic = self.traffic._replace(asked=self.traffic.asked + len(ids))
        if not push.header.flags & EMPTY:  # it trains
            begun = self._steps.setdefault(step, _Step())
            begun.asked.setdefault(rank, []).append(ids)
            if push.header.flags & LAST:
                begun.complete[rank] = push.header.generation
        asked = _Asked(push._replace(payload=_NOTHING), ids, now_ns)
        if self._is_current(rank, step):
            return [*self._early(), self._answer(asked)]
        self._waiting.append(asked)
        return self._early()

    def _add(self, push: Push, now_ns: int) -> list[Answer]:
        rank, step = push.rank, push.header.step
        self._check_step(rank, step)
        added = self._steps.setdefault(step, _Step()).added.setdefault(rank, _Added())
        if added.push is not None or self._is_applied(rank, step + 1):
            raise ProtocolError(f"rank {rank} must push step {step} of {self.label} once")
        update = self.table.spec.update
        part = decode_push(push.payload, self.table.spec.dim, self._codec)
        self.table.spec.check(part.ids)
        self._check_asked(self._steps[step], rank, part.ids)
        added.scalars = part.scalars
        if len(part.ids):
            added.ids.append(part.ids)
            added.gradients.append(part.gradients)
        self.traffic = self.traffic._replace(pushed=self.traffic.pushed + len(part.ids))
        if not push.header.flags & LAST:
            return []
        scalars = StepScalars.unpack(part.scalars, update)
        for other, theirs in self._steps[step].added.items():
            if theirs.push is not None:
                self._compare(other, StepScalars.unpack(theirs.scalars, update), rank, scalars)
                break
        added.push, added.came_ns = push._replace(payload=_NOTHING), now_ns
        return self._completed()

    def _check_asked(self, step: _Step, rank: int, ids: Ids) -> None:
        """Checks that a rank that has said which rows it may have gradients of has no others."""
        if rank not in step.complete or any(np.array_equal(ids, asked) for asked in step.asked[rank]):
            return
        others = np.setdiff1d(ids, np.concatenate(step.asked[rank]), assume_unique=True)
        if others.size:
            raise ProtocolError(
                f"gradients of {self.label} must be of rows that were asked for in their step, got id {others[0]} of "
                f"rank {rank}"
            )

    def _compare(self, other: int, theirs: StepScalars, rank: int, ours: StepScalars) -> None:
        if (what := difference(self.table.spec.update.scalars, theirs, ours)) is not None:
            raise MismatchError(
                f"the workers do not train the same: ranks {other} and {rank} update {self.label} with different {what}"
            )

    # Rounds

    def _check_step(self, rank: int, step: int) -> None:
        most = self.step + _MOST_AHEAD
        if step > most:
            raise ProtocolError(f"step of {self.label} must be at most {most}, got {step} of rank {rank}")

    def _is_current(self, rank: int, step: int) -> bool:
        """Whether a rank that asks in `step` may have the rows as they are."""
        return step <= self.step and not self._restoring

    def _completed(self) -> list[Answer]:
        """Applies steps to which all ranks have added; answers them, and who waited for that."""
        answers: list[Answer] = []
        while not self._held and (step := self._steps.get(self.step)) and step.whole >= set(self._view.ranks):
            whole = step.whole
            del self._steps[self.step]
            dim, ranks = self.table.spec.dim, sorted(whole)
            scalars = StepScalars.unpack(step.added[ranks[0]].scalars, self.table.spec.update)
            self.table.update([step.added[rank].part(dim) for rank in ranks], scalars, self.step)
            self.step += 1
            self._applied.notify_all()
            number = self._sets.number(ranks)
            answers += [_acknowledged(added.push, number) for added in step.added.values() if added.push is not None]
            self._end([step.added[rank] for rank in ranks])
            answers += self._current()
        return answers + self._early() if answers else []

    def _end(self, added: Sequence[_Added]) -> None:
        """Counts and records an update by what these ranks have added."""
        ids = [some for each in added for some in each.ids]
        traffic = self.traffic
        self.traffic = traffic._replace(updates=traffic.updates + 1, updated=traffic.updated + _unique(ids))
        last = max(added, key=lambda each: each.came_ns)
        if last.push is not None:
            first_ns = min(each.came_ns for each in added)
            self._record(last.push, first_ns, 4 * self.table.spec.dim * sum(map(len, ids)), NONE)

    def _answered(self, asked: _Asked) -> None:
        """Records how long rows that were asked for have been held back."""
        if self._recorder.enabled and len(asked.ids):
            rank, header = asked.push.rank, asked.push.header
            of_push = {"step": header.step, "bucket": header.bucket, "priority": header.priority, "rank": rank}
            nbytes = 4 * self.table.spec.dim * len(asked.ids)
            self._recorder.span(
                "held", asked.came_ns, self._recorder.clock(), slice=header.index, nbytes=nbytes, **of_push
            )

    def totals(self) -> tuple[TableStats, Traffic]:
        """What there is now, and what has come so far."""
        with self.lock:
            return self.table.stats(), self.traffic

    def _current(self) -> list[Answer]:
        """Answers to who has waited for what is there now."""
        ready = [each for each in self._waiting if self._is_current(each.push.rank, each.push.header.step)]
        self._waiting = [each for each in self._waiting if each not in ready]
        return [self._answer(each) for each in ready]

    def _early(self) -> list[Answer]:
        """Answers with rows that the current step does not touch, once it is known which it does."""
        step, ranks = self._steps.get(self.step), set(self._view.ranks)
        if step is None or not self._waiting or not step.complete.keys() >= ranks:
            return []
        if len({step.complete[rank] for rank in ranks}) > 1:  # some have begun it again, with other rows
            return []
        waiting = [each for each in self._waiting if each.left is None and each.push.header.step == self.step + 1]
        if not waiting:
            return []
        touched, answers = [ids for each in step.asked.values() for ids in each], []
        for each in waiting:
            each.left = left = _are_among(each.ids, touched)
            self.traffic = self.traffic._replace(early=self.traffic.early + len(left) - int(left.sum()))
            if not left.any():
                answers.append(self._answer(each))
                self._waiting.remove(each)
            elif not left.all():
                answers.append(self._some(each, ~left, flags=0))
        return answers

    def _answer(self, asked: _Asked) -> Answer:
        if asked.left is not None and asked.left.any() and not asked.left.all():
            some = self._some(asked, asked.left, flags=LAST)
            self._answered(asked)
            return some
        rows = self.table.lookup(asked.ids)
        self._answered(asked)
        return Answer((asked.push.rank,), _header(asked.push, LAST | WHOLE), _bytes(rows))

    def _some(self, asked: _Asked, chosen: NDArray[np.bool_], flags: int) -> Answer:
        payload = encode_some(chosen, self.table.lookup(asked.ids[chosen]))
        return Answer((asked.push.rank,), _header(asked.push, flags), memoryview(payload))

    def change(self, spec: TableSpec, codec: Codec | None, step: int = 0) -> None:
        """Updates rows otherwise from now on, with nothing under way; from `step`, if a job goes on."""
        with self.lock:
            self.table.change(spec)
            self._codec, self.step = codec, max(self.step, step)

    # Files

    def hold(self, rank: int, step: int, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Applies nothing until `release`, once the steps of `rank` before `step` have been; False: not in time."""

        def ready() -> bool:
            return over() or (self._is_applied(rank, step) and not self._held)

        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            while not ready() and (left_s := deadline_s - time.monotonic()) > 0:
                self._applied.wait(min(left_s, _LOOK_S))
            if over() or not ready():
                return False
            self._held += 1
            return True

    def meet(self, rank: int, what: str, timeout_s: float, over: Callable[[], bool]) -> list[int]:
        """Waits until all ranks have come for `what`; returns who has not in time."""
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            came = self._meetings.setdefault(what, set())
            came.add(rank)
            if came >= set(self._view.ranks):
                del self._meetings[what]  # who comes for it again waits again
                self._applied.notify_all()
            while (missing := sorted(set(self._view.ranks) - came)) and not over():
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    came.discard(rank)
                    return missing
                self._applied.wait(min(left_s, _LOOK_S))
            if self._meetings.get(what) is came:  # the others were lost
                del self._meetings[what]
            return []

    def release(self) -> list[Answer]:
        with self.lock:
            self._held -= 1
            self._applied.notify_all()
            return [*self._completed(), *self._current()]

    def save(
        self, folder: str, name: str, since: int | None, before: str = "", remove: Iterable[str] = ()
    ) -> dict[str, object]:
        """Writes this pserver's shard; the caller holds the table. See `remove_saves`."""
        try:
            found = write_shard(self.table, folder, name, since=since, before=before, lock=self.lock)
            if self.table.place == 0:
                remove_saves(folder, remove)
        except OSError as error:
            raise ConfigError(f"{self.label} could not be written to {folder}: {error}") from error
        self._saved[f"{Path(folder).name}/{name}"] = folder
        full = found["since"] is None
        return {"step": found["step"], "rows": found["rows"], "nbytes": found["nbytes"], "full": full}

    def restore(self, folders: Sequence[str], name: str, rank: int, identity: str, seed: str = "") -> dict[str, object]:
        """Replaces all rows, unless another rank has asked for the same; the caller holds the table."""
        with self.lock:
            if self._is_restored(rank, identity):
                return {"step": self.table.step, "rows": self.table.stats().rows, "slots": True}
            self._restoring = True  # not the lock: it may take long, and who asks for rows meanwhile waits
        try:
            if folders and not Path(folders[0]).is_dir() and identity in self._saved:
                folders = [self._saved[identity]]  # another rank's path is that of the files
            found = restored(self.table, folders, name, seed)
        finally:
            with self.lock:
                self._restoring = False
                self.table.follow(self.step)
        with self.lock:
            self._note_restored(rank, identity)
        return {"step": found["step"], "rows": found["rows"], "nbytes": found["nbytes"], "slots": found["slots"]}

    def put(self, ids: bytes, values: bytes, rank: int, identity: str) -> None:
        """Replaces some rows, unless another rank has asked for the same; the caller holds the table."""
        found = np.frombuffer(ids, "<i8").astype(np.int64)
        rows = decode_rows(memoryview(values), len(found), self.table.spec.dim)
        with self.lock:
            if not self._is_restored(rank, identity):
                self.table.assign(found, rows)
                self._note_restored(rank, identity)

    def _is_restored(self, rank: int, identity: str) -> bool:
        """Whether what `identity` names has been put here since `rank` asked for something last."""
        begin = self._restored_by[rank]
        if identity not in self._restored[begin:]:
            return False
        self._restored_by[rank] = self._restored.index(identity, begin) + 1
        return True

    def _note_restored(self, rank: int, identity: str) -> None:
        self._restored.append(identity)
        self._restored_by[rank] = len(self._restored)

    def _is_applied(self, rank: int, step: int) -> bool:
        return self.step >= step

    # Other ranks

    def change_view(self, view: View, upcoming: Container[int] = ()) -> list[Answer]:
        with self.lock:
            self._view = view
            self._waiting = [each for each in self._waiting if each.push.rank in view.ranks]
            for step in self._steps.values():
                step.added = {rank: each for rank, each in step.added.items() if each.push or rank in view.ranks}
            return [*self._completed(), *self._early()]

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            whole = step.whole if (step := self._steps.get(self.step)) else set()
            # Who only asks ahead waits for nobody yet; whose step it is has added to the one before.
            return [rank for rank in self._view.ranks if rank not in whole] if whole else []

    def late(self, ranks: Iterable[int]) -> Late | None:
        with self.lock:
            whole = step.whole if (step := self._steps.get(self.step)) else set()
            return next((Late(rank, self.step) for rank in ranks if whole and rank not in whole), None)


class AppliesEach(TableSlice):
    """Each push is applied as it comes: workers step by themselves. Who is too far ahead waits for rows."""

    def __init__(self, *arguments: object, bound: StalenessBound, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.bound = bound
        self._of_rank = dict.fromkeys(self._view.ranks, self.step)  # how many steps of each have been applied
        self._done = dict.fromkeys(self._view.ranks, 0)  # in this phase
        self._phase = bound.phase.number

    def _is_applied(self, rank: int, step: int) -> bool:
        return self._of_rank.get(rank, 0) >= step

    def _check_step(self, rank: int, step: int) -> None:
        most = self._of_rank.setdefault(rank, step) + _MOST_AHEAD
        if step > most:
            raise ProtocolError(f"step of {self.label} must be at most {most} for rank {rank}, got {step}")

    def _is_current(self, rank: int, step: int) -> bool:
        self._align()
        applied = step <= self._of_rank[rank] and not self._restoring
        return applied and not self.bound.slower(self._done, rank)

    def _align(self) -> None:
        """In a new phase nobody is ahead."""
        if self._phase != (number := self.bound.phase.number):
            self._phase, self._done = number, dict.fromkeys(self.bound.view.ranks, 0)

    def _add(self, push: Push, now_ns: int) -> list[Answer]:
        self._align()
        rank, step = push.rank, push.header.step
        if not self._held and step > (expected := self._of_rank.setdefault(rank, step)):
            raise ProtocolError(f"rank {rank} must push step {expected} of {self.label}, got {step}")
        return super()._add(push, now_ns)

    def _compare(self, other: int, theirs: StepScalars, rank: int, ours: StepScalars) -> None:
        """Ranks are at different steps."""

    def _completed(self) -> list[Answer]:
        answers: list[Answer] = []
        for number, step in list(self._steps.items()) if not self._held else ():
            for rank in step.whole:
                added = step.added.pop(rank)
                step.asked.pop(rank, None)
                scalars = StepScalars.unpack(added.scalars, self.table.spec.update)
                # Rows expire by the steps of the rank that is first.
                self.step = max(self.step, number)
                self.table.update([added.part(self.table.spec.dim)], scalars, self.step)
                self._applied.notify_all()
                self._of_rank[rank] = number + 1
                self._done[rank] = self._done.get(rank, 0) + 1
                self.step = max(self._of_rank.values())
                if added.push is not None:
                    answers.append(_acknowledged(added.push))
                self._end([added])
            if not step.added and number < min(self._of_rank.values()):
                del self._steps[number]
        return [*answers, *self._current()]

    def _early(self) -> list[Answer]:
        return []

    def released(self) -> list[Answer]:
        with self.lock:
            return self._current()

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            late: set[int] = set()
            for each in self._waiting:
                if asking in (None, each.push.rank):
                    late.update(self.bound.slower(self._done, each.push.rank))
            return sorted(late)

    def late(self, ranks: Iterable[int]) -> Late | None:
        return None


def _header(push: Push, flags: int, ranks: int = 1) -> Header:
    return push.reply(flags)._replace(generation=ranks)


def _acknowledged(push: Push, ranks: int = 1) -> Answer:
    """The answer to what a rank has added; `ranks`: the number of the set of those whose gradients were applied."""
    return Answer((push.rank,), _header(push, LAST, ranks), _NOTHING)


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


def _bytes(rows: Floats) -> memoryview:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
