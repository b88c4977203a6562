"""A table on its owner: frames become questions and gradients, answers become frames; and what replaces rows.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.codecs import Codec
from tfps.exchange.requests import Assign, Load, Save, SavedRows
from tfps.membership.view import RankSets, View
from tfps.pserver.slices import Answer, Late, OwnedSlice, Push
from tfps.tables import files
from tfps.tables.messages import decode_ids, decode_push, encode_some
from tfps.tables.rounds import Answers, Applied, OpenLookup, Rounds, Rows
from tfps.tables.spec import TableSpec
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import COMPLETE, EMPTY, LAST, LOOKUP

_NOTHING = memoryview(b"")
_LOOK_S = 0.5  # between looks whether the job has failed


class TableSlice(OwnedSlice):
    """The rows of a table that this pserver has. `saved`: folders of all tables, by what `Load.identity` names."""

    def __init__(
        self, recorder: Recorder, rounds: Rounds, codec: Codec | None, sets: RankSets, saved: dict[str, str]
    ) -> None:
        super().__init__(recorder, 0, sets)
        self.label, self.table, self.rounds = rounds.table.label, rounds.table, rounds
        self._codec, self._saved = codec, saved
        self._applied = threading.Condition(self.lock)  # notified when a step has been, and when nothing is held
        self._replacing: dict[str, set[int]] = {}  # who has come to replace rows, by what with
        self._kept_at: dict[str, dict[int, int]] = {}  # the steps of each rank then, by name of what is kept
        self._restored: list[str] = []  # what has been put in place of rows, by its id
        self._restored_by: Counter[int] = Counter()  # by rank, how much of it

    @property
    def steps_over(self) -> int:
        return self.rounds.step

    # Frames

    def take(self, push: Push, upcoming: Container[int] = ()) -> tuple[list[Answer], int]:
        now_ns, header = self._recorder.clock(), push.header
        with self.lock:
            if push.rank not in self.rounds.view.ranks:
                return [], 0  # it has just been lost
            if push.target is not None:
                raise ProtocolError(f"rows of {self.label} must come in frames, got {push.target.place}")
            self._arrived(push, now_ns)
            last = bool(header.flags & LAST)
            if header.flags & LOOKUP:
                ids, size = decode_ids(push.payload)
                if size != len(push.payload) or header.flags & ~(LOOKUP | LAST | EMPTY):
                    size = len(push.payload)
                    raise ProtocolError(f"rows of {self.label} must be asked for by ids alone, got {size} bytes")
                lookup = OpenLookup(push.rank, header, ids, now_ns)
                return self._frames(self.rounds.lookup(lookup, trains=not header.flags & EMPTY, complete=last)), 0
            part = decode_push(push.payload, self.table.spec.dim, self._codec)
            late_ns = self.rounds.late_ns(header.step, now_ns) if last else 0
            return self._frames(self.rounds.add(push.rank, header, part, now_ns, last=last)), late_ns

    def _frames(self, answers: Answers) -> list[Answer]:
        frames: list[Answer] = []
        for each in answers:
            frames += self._of_update(each) if isinstance(each, Applied) else [self._of_rows(each)]
        return frames

    def _of_rows(self, answer: Rows) -> Answer:
        lookup, rows, chosen, last = answer
        push = Push(lookup.rank, lookup.header, _NOTHING)
        if last and len(lookup.ids):  # how long they have been held back
            self._record(push, lookup.came_ns, 4 * self.table.spec.dim * len(lookup.ids), push.header.index, "held")
        data = rows.reshape(-1).view(np.uint8).data if chosen is None else memoryview(encode_some(chosen, rows))
        header = push.reply(LAST * last | COMPLETE * (chosen is None))
        return Answer((push.rank,), header, data)

    def _of_update(self, answer: Applied) -> list[Answer]:
        """To those who have added; with the number of the set of all whose gradients have been applied."""
        self._applied.notify_all()
        pushes = {each.rank: Push(each.rank, each.header, _NOTHING) for each in answer.added if each.header is not None}
        number = self._sets.number(pushes) if answer.together else 1
        nbytes = 4 * self.table.spec.dim * sum(len(ids) for each in answer.added for ids in each.ids)
        last = max(answer.added, key=lambda each: each.came_ns)
        self._record(pushes[last.rank], min(each.came_ns for each in answer.added), nbytes, NONE)
        headers = {rank: push.reply(LAST, number) for rank, push in pushes.items()}
        return [Answer((rank,), header, _NOTHING) for rank, header in headers.items()]

    def totals(self) -> dict[str, int]:
        """What there is now, and what has come so far: `TableStats` and `Traffic`."""
        with self.lock:
            return {**self.table.stats()._asdict(), **asdict(self.rounds.traffic)}

    def change(self, spec: TableSpec, codec: Codec | None, step: int = 0) -> None:
        """Updates rows otherwise from now on, with nothing under way; from `step`, if a job goes on."""
        with self.lock:
            self.table.change(spec)
            self._codec, self.rounds.step = codec, max(self.rounds.step, step)

    # What replaces rows, and files

    def hold(self, rank: int, step: int, timeout_s: float, over: Callable[[], bool]) -> bool:
        """Applies nothing until `release`, once the steps of `rank` before `step` have been; False: not in time."""
        with self.lock:
            if not self._wait(lambda: self.rounds.is_applied(rank, step) and not self.rounds.held, timeout_s, over):
                return False
            self.rounds.held += 1
            return True

    def _wait(self, ready: Callable[[], bool], timeout_s: float, over: Callable[[], bool]) -> bool:
        """Waits until something is ready; False: the job is over, or not in time. Caller holds the lock."""
        deadline_s = time.monotonic() + timeout_s
        while not over() and not ready() and (left_s := deadline_s - time.monotonic()) > 0:
            self._applied.wait(min(left_s, _LOOK_S))
        return not over() and ready()

    def release(self) -> list[Answer]:
        with self.lock:
            self.rounds.held -= 1
            self._applied.notify_all()
            return self._frames([*self.rounds.completed(), *self.rounds.current()])

    def meet(self, rank: int, what: str, timeout_s: float, over: Callable[[], bool]) -> list[int]:
        """Waits until all ranks have come for `what`; returns who has not in time."""
        with self.lock:
            came = self._replacing.setdefault(what, set())
            came.add(rank)
            if came >= set(self.rounds.view.ranks):
                del self._replacing[what]  # who comes for it again waits again
                self._applied.notify_all()
            if not self._wait(lambda: came >= set(self.rounds.view.ranks), timeout_s, over) and not over():
                missing = sorted(set(self.rounds.view.ranks) - came)
                came.discard(rank)
                return missing
            if self._replacing.get(what) is came:  # the others were lost
                del self._replacing[what]
            return []

    def save(self, request: Save, rank: int) -> SavedRows:
        """Writes this pserver's shard, or keeps it; the caller holds the table."""
        if not request.folder and request.name and not self._may_keep(request, rank):
            return SavedRows(self.table.step, 0, 0, full=False)
        try:
            found = files.save(self.table, request, self.lock, rank)
        except OSError as error:
            raise ConfigError(f"{self.label} could not be written to {request.folder}: {error}") from error
        if request.folder:
            self._saved[f"{Path(request.folder).name}/{request.name}"] = request.folder
        return found

    def _may_keep(self, request: Save, rank: int) -> bool:
        """Whether what is kept under the name is what `rank` sees: where ranks step by themselves others may have gone
        on since, but not this one.
        """
        with self.lock:
            self.table.moments.forget(request.remove, rank)
            self._kept_at = {name: steps for name, steps in self._kept_at.items() if self.table.moments.get(name)}
            now = {each: self.rounds.steps_of(each) for each in self.rounds.view.ranks}
            return self._kept_at.setdefault(request.name, now).get(rank, now[rank]) == now[rank]

    def load(self, request: Load, rank: int) -> SavedRows:
        """Replaces all rows, unless another rank has asked for the same; the caller holds the table."""
        folders, identity = request.folders, request.identity
        with self.lock:
            if self._is_restored(rank, identity):
                return SavedRows(self.table.step, self.table.stats().rows, 0)
            self.rounds.restoring = True  # not the lock: it may take long, and who asks for rows meanwhile waits
        try:
            if folders and not Path(folders[0]).is_dir() and identity in self._saved:
                folders = [self._saved[identity]]  # another rank's path is that of the files
            found = files.load(self.table, replace(request, folders=folders))
        finally:
            with self.lock:
                self.rounds.restoring = False
                self.table.follow(self.rounds.step)
        with self.lock:
            self._note_restored(rank, identity)
        return found

    def assign(self, request: Assign, rank: int) -> None:
        """Replaces some rows, unless another rank has asked for the same; the caller holds the table."""
        with self.lock:
            if not self._is_restored(rank, request.identity):
                self.table.assign(request.ids, request.rows)
                self._note_restored(rank, request.identity)

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

    # Other ranks

    def change_view(self, view: View, upcoming: Container[int] = ()) -> list[Answer]:
        with self.lock:
            for rank in set(view.ranks) - set(self.rounds.view.ranks):
                self._restored_by[rank] = len(self._restored)  # it has what the others have put here so far
            return self._frames(self.rounds.change_view(view))

    def released(self) -> list[Answer]:
        with self.lock:
            return self._frames(self.rounds.current())

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            return self.rounds.missing(asking)

    def late(self, ranks: Iterable[int]) -> Late | None:
        with self.lock:
            rank = self.rounds.late(ranks)
            return None if rank is None else Late(rank, self.rounds.step)
