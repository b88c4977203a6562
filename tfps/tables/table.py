"""The rows of a table that one pserver holds, with their slots. No I/O and no locks: the caller holds one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ConfigError, ProtocolError
from tfps.exchange import rules
from tfps.exchange.requests import Ids
from tfps.exchange.rules import CHUNK, Floats
from tfps.exchange.update_spec import StepScalars
from tfps.tables import hashing
from tfps.tables.index import MOST_POSITIONS, PIECE, Positions
from tfps.tables.initial import Initial
from tfps.tables.kept import Moments, Piece
from tfps.tables.merging import One, Part, Several, first_repeated, merged
from tfps.tables.sketch import Sketch
from tfps.tables.spec import MOST_STEP, TableSpec
from tfps.tables.storage import Fixed, Growing
from tfps.tables.tombstones import Tombstones
from tfps.types import Array

Steps = NDArray[np.int32]

_SLACK = 16  # where rows are too many, one more of so many goes: looking for the oldest is dear
_SWEEPS = 8  # in the time that rows are kept


class TableStats(NamedTuple):
    """Of one pserver's part of a table, since it was made."""

    rows: int  # that are there, also such as are past their time and not yet swept
    memory_bytes: int  # rows, slots, stamps, index and all else
    made_rows: int  # by updates
    evicted_rows: int  # there were more than `max_rows`
    expired_rows: int
    refused_rows: int  # gradients of ids that had no row yet (`admit_after`)


class Chunk(NamedTuple):
    """Some rows of a table: n ids, the step of each one's last update, and arrays [n, dim]: rows, then each slot."""

    ids: Ids
    steps: Steps
    arrays: list[Floats]


class Table:
    """Those rows of a table that `place` of `count` pservers owns.

    Time passes by steps: the **latest** is the largest that an update has named (-1 before), also one of no rows. With
    `expire_after=S` a row is there as long as the latest step is less than S steps after its last update; what is past
    its time is no more read, and freed now and then.

    With `max_rows` rows go after the update that made too many, the least recently updated first, and among those of
    one step in an order that depends on their ids only. One row in sixteen goes more than must.

    Counts of `admit_after` are those of a sketch: they may be too high, rarely, and forget what is rare once very many
    other ids have come (`sketch.py`). They are not saved. A row that has gone is made again at once if its id is still
    counted.
    """

    def __init__(self, spec: TableSpec, place: int = 0, count: int = 1, label: str = "table") -> None:
        if not 0 <= place < count <= 2**31:
            raise ConfigError(f"place of {label} must be from 0 to below count, at most 2**31, got {place} and {count}")
        self.spec, self.place, self.count, self.label = spec, place, count, label
        if spec.rows is not None and -(-(spec.rows - place) // count) > MOST_POSITIONS:
            raise ConfigError(
                f"rows of {label} must be at most {MOST_POSITIONS} for each pserver, got {spec.rows} for {count}"
            )
        self._slots = [name for name, _ in spec.update.slots]
        self._limit = None if spec.max_rows is None else -(-spec.max_rows // count)
        self._sketch = Sketch(spec.admit_after) if spec.admit_after > 1 else None
        self._tombstones = Tombstones()
        self.moments = Moments()  # that `go_back` may go back to
        self._each = max(CHUNK // spec.dim, 1)  # rows that are worked on at a time
        self._made = self._evicted = self._expired = self._refused = 0
        self._step_offset = 0  # by so many steps the latest is ahead of the job's; see `follow`
        self._begin()

    def _begin(self) -> None:
        spec, arrays = self.spec, 1 + len(self._slots)
        items = max(-(-((spec.rows or 0) - self.place) // self.count), 1)
        self._stored: Fixed | Growing = (
            Growing(spec.dim, arrays) if spec.rows is None else Fixed(items, spec.dim, arrays, self.place, self.count)
        )
        self._step, self._next_sweep = -1, 0

    @property
    def step(self) -> int:
        """The latest step, -1 before the first."""
        return self._step

    def follow(self, step: int) -> None:
        """What is `step` from now on comes after the latest: a job goes on with rows of one that was further."""
        self._step_offset = max(self._step + 1 - step, 0)

    # What workers do

    def lookup(self, ids: Ids) -> Floats:
        """The rows of `ids` (int64 [n], may repeat) as float32 [n, dim], a copy; changes nothing.

        Raises ProtocolError: an id is out of range or owned by another pserver.
        """
        ids = self._checked(ids)
        pulled = np.empty((ids.size, self.spec.dim), np.float32)
        rows = self._stored.arrays[0].array
        for begin in range(0, ids.size, PIECE):
            some, out = ids[begin : begin + PIECE], pulled[begin : begin + PIECE]
            positions = self._find(some, self._step)
            if (missing := np.flatnonzero(positions < 0)).size == 0:
                rows.take(positions, axis=0, out=out, mode="clip")
                continue
            there = np.flatnonzero(positions >= 0)
            out[there] = rows.take(positions[there], axis=0)
            out[missing] = self.spec.initial.values(self.spec.seed, some[missing], self.spec.dim)
        return pulled

    def update(self, parts: Sequence[tuple[Ids, Floats]], scalars: StepScalars, step: int) -> None:
        """Applies the rule of the spec to the rows of the ids in `parts`, in which they have no duplicates.

        The gradients [n, dim] of an id are added in the order of `parts` (one for each rank); what only one has is not
        added to anything. A `step` below the latest counts as the latest.

        Raises ProtocolError, and then nothing has changed: an id is out of range, owned by another pserver or repeated,
        or shapes, scalars or the step are wrong.
        """
        checked = [self._checked_part(ids, gradients) for ids, gradients in parts]
        if len(scalars.values) != len(names := self.spec.update.scalars):
            raise ProtocolError(
                f"scalars of {self.label} must be {', '.join(names)}, got {len(scalars.values)} of them"
            )
        step = self._checked_step(step)
        if checked:
            gradients = merged(checked)
            self._keep(gradients.ids)
            positions = self._find_or_make(gradients.ids, step)
            self._apply(gradients, positions, dict(zip(names, scalars.values, strict=True)), step)
        self._pass(step)

    def sweep(self) -> None:
        """Frees all rows that are past their time. Updates do so now and then; what is read does not depend on it."""
        if self.spec.expire_after is None:
            return
        latest = self._step - self.spec.expire_after + 1  # stamps up to it are past their time
        for positions in self._stored.stamped(1, latest):
            self._expired += positions.size
            self._remove(positions, self._step)
        self._next_sweep = self._step + max(self.spec.expire_after // _SWEEPS, 1)

    def stats(self) -> TableStats:
        """See there."""
        used = self._stored.nbytes + self._tombstones.nbytes + self.moments.nbytes
        used += self._sketch.nbytes if self._sketch else 0
        return TableStats(self._stored.rows, used, self._made, self._evicted, self._expired, self._refused)

    def _checked(self, ids: Ids) -> Ids:
        found = np.asarray(ids)
        if found.dtype != np.int64 or found.ndim != 1:
            raise ProtocolError(f"ids of {self.label} must be int64 [n], got {found.dtype} {list(found.shape)}")
        found = np.ascontiguousarray(found)
        self.spec.check(found)
        if self.count > 1:
            for begin in range(0, found.size, PIECE):
                some = found[begin : begin + PIECE]
                other = self.spec.owners(some, self.count) != self.place
                if other.any():
                    wrong = some[other][0]
                    owner = int(self.spec.owners(wrong.reshape(1), self.count)[0])
                    raise ProtocolError(
                        f"ids of {self.label} must be owned by place {self.place} of {self.count}, got {wrong} of "
                        f"place {owner}"
                    )
        return found

    def _checked_part(self, ids: Ids, gradients: Floats) -> Part:
        ids, found = self._checked(ids), np.asarray(gradients)
        if found.dtype != np.float32 or found.shape != (ids.size, self.spec.dim):
            raise ProtocolError(
                f"gradients of {self.label} must be float32 [{ids.size}, {self.spec.dim}] for {ids.size} ids, got "
                f"{found.dtype} {list(found.shape)}"
            )
        if (again := first_repeated(ids)) is not None:
            raise ProtocolError(f"ids of one rank's update of {self.label} must be unique, got {again} more than once")
        return Part(ids, np.ascontiguousarray(found))

    def _checked_step(self, step: int) -> int:
        step += self._step_offset
        if not 0 <= step <= MOST_STEP:
            raise ProtocolError(f"step of {self.label} must be from 0 to {MOST_STEP}, got {step}")
        return max(step, self._step)

    # Rows come

    def _find(self, ids: Ids, now: int) -> Positions:
        """The positions of rows that are there when the latest step is `now`, -1 for others."""
        positions = self._stored.find(ids)
        if self.spec.expire_after is not None:
            latest = now - self.spec.expire_after + 1
            positions[self._stored.stamps.array.take(positions, mode="clip") <= latest] = -1
        return positions

    def _find_or_make(self, ids: Ids, step: int) -> Positions:
        """The positions of the rows of unique `ids`, -1 where there must be none yet."""
        now = max(self._step, step - 1)  # as whoever has computed the gradients has seen it
        positions = np.empty(ids.size, np.int64)
        for begin in range(0, ids.size, PIECE):
            positions[begin : begin + PIECE] = self._find(ids[begin : begin + PIECE], now)
        missing = np.flatnonzero(positions < 0)
        if not missing.size:
            return positions
        if self.spec.expire_after is not None:  # what is there, but past its time
            past = self._stored.find(ids[missing])
            if (past := past[past >= 0]).size:
                self._expired += past.size
                self._remove(past, now)
        if self._sketch is not None:
            self._stored.reserve(missing.size)
            enough = self._sketch.add(ids[missing]) >= self.spec.admit_after
            self._refused += int(missing.size - np.count_nonzero(enough))
            missing = missing[enough]
        positions[missing] = self._make(ids[missing])
        return positions

    def _make(self, ids: Ids) -> Positions:
        """Rows of `ids`, which have none: initial values. The caller stamps them."""
        positions, stored = self._stored.place(ids), self._stored
        for begin in range(0, ids.size, self._each):
            some = positions[begin : begin + self._each]
            values = self.spec.initial.values(self.spec.seed, ids[begin : begin + self._each], self.spec.dim)
            slots = [np.full(values.shape, value, np.float32) for _, value in self.spec.update.slots]
            stored.write(some, [values, *slots])
        self._made += ids.size
        return positions

    def _apply(self, gradients: One | Several, positions: Positions, scalars: dict[str, float], step: int) -> None:
        chosen: Array | None = None
        if positions.size and positions.min() < 0:
            chosen = np.flatnonzero(positions >= 0)
            positions = positions[chosen]
        dim, spec = self.spec.dim, self.spec.update
        for begin in range(0, positions.size, self._each):
            part = slice(begin, min(begin + self._each, positions.size))
            at = positions[part]
            copies = self._stored.read(at)
            w, *slots = (copy.reshape(-1) for copy in copies)
            g = gradients.rows(part if chosen is None else chosen[part]).reshape(-1)
            runs = [(0, at.size * dim, spec.decayed[0])]
            rules.update(spec, runs, w, dict(zip(self._slots, slots, strict=True)), g, scalars)
            self._stored.write(at, copies)
        self._stored.stamps.array[positions] = step + 1

    # Rows go

    def _pass(self, step: int) -> None:
        self._step = step
        if self.spec.expire_after is not None and step >= self._next_sweep:
            self.sweep()
        if self._limit is not None and self._stored.rows > self._limit:
            self.sweep()
            if self._stored.rows > self._limit:
                self._evict(self._stored.rows - self._limit + self._limit // _SLACK)

    def _evict(self, count: int) -> None:
        """Removes `count` rows: those with the lowest stamps and, of the last stamp, with the lowest hashes."""
        low, high = 1, self._step + 1  # by halves to the least stamp up to which there are enough
        while low < high:
            middle = (low + high) // 2
            if self._stored.count_stamped(middle) >= count:
                high = middle
            else:
                low = middle + 1
        for positions in self._stored.stamped(1, low - 1):
            self._evicted += positions.size
            self._remove(positions, self._step)
            count -= positions.size
        last = np.concatenate(list(self._stored.stamped(low, low)))
        if count < last.size:
            last = last[np.argpartition(hashing.of_ids(self._stored.ids_at(last)), count - 1)[:count]]
        self._evicted += last.size
        self._remove(np.sort(last), self._step)

    def _remove(self, positions: Positions, step: int) -> None:
        if positions.size:
            ids = self._stored.ids_at(positions)
            self._keep(ids)
            self._tombstones.add(step, ids, self._stored.rows - positions.size)
            self._stored.remove(positions)

    # Going back

    def go_back(self, spec: TableSpec, pieces: Callable[[], Iterable[Piece]]) -> None:
        """All ids read as `pieces` say, others as they do, or if they have no row as initial values of `spec`.

        Slots stay, as those of an optimizer do when a program assigns weights; those of a row that has gone since begin
        anew. Counts as an update in the latest step.
        """
        self.sweep()  # before pieces say what has gone
        if (spec.seed, spec.initial) != (self.spec.seed, self.spec.initial):
            self.begin_as(spec.seed, spec.initial)
            # The next save, which says how ids without rows read, is a full one.
            self._tombstones.begin(self._step + 1)
        for ids, _, there in pieces() if self._limit is not None else ():
            positions = self._stored.find(ids[~there])  # else rows of other ids might go for these
            self._remove(positions[positions >= 0], self._step)
        for ids, rows, there in pieces():
            chosen = there | (self._stored.find(ids) >= 0)
            self.assign(ids[chosen], rows[chosen])

    def _keep(self, ids: Ids) -> None:
        """Notes what unique `ids` read as, before that changes."""
        self.moments.note(ids, self._find, self._stored.arrays[0].array)

    # Rows are saved and restored

    def chunks(self, since: int | None = None, most_rows: int = 2**16) -> Iterator[Chunk]:
        """All rows, or those whose last update was in step `since` **or later**; at most `most_rows` at a time.

        That of `since` itself: another update of that step may have come after what was saved then. Rows that are past
        their time are left out. Fixed: by ascending id; otherwise in no order.

        Chunks are copies, so the lock may be given up between two. For all rows to be as of one step no update (nor
        `restore`, `remove`, `clear`) may come before the last chunk; pulls may. If updates do come, each row is as of
        its own chunk; rows made meanwhile may be left out, and also such as go and come again: their steps are newer
        than the latest step at the first chunk, so chunks since that step have them.
        """
        begin = 0
        while True:
            first = 1 if since is None else max(since + 1, 1)
            if self.spec.expire_after is not None:
                first = max(first, self._step - self.spec.expire_after + 2)
            found = list[Positions]()
            size = 0
            for positions in self._stored.stamped(first, MOST_STEP + 1, begin):
                found.append(positions)
                size += positions.size
                if size >= most_rows:
                    break
            if not size:
                return
            chosen = np.concatenate(found)[:most_rows]
            begin = int(chosen[-1]) + 1
            steps: Steps = self._stored.stamps.array.take(chosen)
            steps -= 1
            yield Chunk(self._stored.ids_at(chosen), steps, self._stored.read(chosen))

    def gone(self, since: int) -> Ids | None:
        """Ids whose rows have gone in step `since` or later, also if they have come again: unique, ascending.

        None: that is no more known, as too many have gone since, or rows have been restored or slots changed since.
        """
        self.sweep()
        return self._tombstones.since(since)

    def clear(self) -> None:
        """Removes all rows and gives their memory back; the latest step is -1 again. Counts since the start remain."""
        for positions in self._stored.stamped(1, MOST_STEP + 1) if self.moments.nbytes else ():
            self._keep(self._stored.ids_at(positions))
        if self._sketch is not None:
            self._sketch = Sketch(self.spec.admit_after)
        self._tombstones.begin(self._step + 1)
        self._begin()

    def restore(self, chunk: Chunk) -> None:
        """Puts the rows of `chunk` (ids unique) that this place owns, in place of what is there; skips others.

        Raises ProtocolError, and then nothing has changed: shapes are wrong, or an id is out of range.
        """
        ids, steps = np.ascontiguousarray(chunk.ids), chunk.steps
        every: list[Array] = [ids, steps, *chunk.arrays]
        got = [f"{array.dtype} {list(array.shape)}" for array in every]
        rows = [f"float32 [{ids.size}, {self.spec.dim}]"] * len(self._stored.arrays)
        if got != [f"int64 [{ids.size}]", f"int32 [{ids.size}]", *rows]:
            raise ProtocolError(
                f"a chunk of {self.label} must have ids int64 [n], steps int32 [n] and {len(rows)} arrays float32 "
                f"[n, {self.spec.dim}], got {', '.join(got)}"
            )
        if steps.size and not (steps.min() >= 0 and steps.max() <= MOST_STEP):
            raise ProtocolError(f"steps of a chunk of {self.label} must be from 0 to {MOST_STEP}, got {steps.min()}")
        self.spec.check(ids)
        if (again := first_repeated(ids)) is not None:
            raise ProtocolError(f"ids of a chunk of {self.label} must be unique, got {again} more than once")
        for begin in range(0, ids.size, PIECE):
            some = ids[begin : begin + PIECE]
            own = np.flatnonzero(self.spec.owners(some, self.count) == self.place)
            if not own.size:
                continue
            self._keep(some[own])
            positions = self._stored.find(some[own])
            missing = np.flatnonzero(positions < 0)
            positions[missing] = self._stored.place(some[own[missing]])
            self._stored.write(positions, [array[begin + own] for array in chunk.arrays])
            self._stored.stamps.array[positions] = steps[begin + own] + 1
            self._step = max(self._step, int(steps[begin + own].max()))
            self._tombstones.begin(self._step + 1)  # what their owner has removed before is not known here

    def assign(self, ids: Ids, rows: Floats) -> None:
        """Replaces the rows [n, dim] of `ids` (unique), which this place owns; slots stay, or begin where there is no
        row. Counts as an update in the latest step. Raises ProtocolError as `update` does.
        """
        part = self._checked_part(ids, rows)
        self.sweep()  # what is past its time has no slots to keep
        self._keep(part.ids)
        positions = self._stored.find(part.ids)
        missing = np.flatnonzero(positions < 0)
        positions[missing] = self._make(part.ids[missing])
        self._stored.arrays[0].put(positions, part.gradients)
        self._stored.stamps.array[positions] = max(self._step, 0) + 1
        self._pass(max(self._step, 0))

    def change(self, spec: TableSpec) -> None:
        """Takes another rule of update: all slots begin anew. Raises ConfigError: anything else would change.

        The seed and initial values stay, which a restore may have taken from elsewhere.
        """
        spec = dataclasses.replace(spec, seed=self.spec.seed, initial=self.spec.initial)
        changed = dataclasses.replace(self.spec, update=spec.update)
        if changed != spec:
            raise ConfigError(f"{self.label} can only change its update, {self.spec.text()}, got {spec.text()}")
        self.spec, self._slots = spec, [name for name, _ in spec.update.slots]
        self._tombstones.begin(self._step + 1)  # slots of all rows have changed, so the next save is a full one
        self._stored.renew_slots([value for _, value in spec.update.slots])

    def remove(self, ids: Ids) -> None:
        """Removes the rows of `ids` (unique), if they are here, for a restore: they are in no count, nor in `gone`."""
        for begin in range(0, ids.size, PIECE):
            self._keep(ids[begin : begin + PIECE])
            positions = self._stored.find(ids[begin : begin + PIECE])
            self._stored.remove(positions[positions >= 0])
        self._tombstones.begin(self._step + 1)

    def remove_owned(self, place: int, count: int) -> None:
        """Likewise all rows that `place` of `count` pservers would own."""
        for positions in self._stored.stamped(1, MOST_STEP + 1):
            owned = positions[self.spec.owners(self._stored.ids_at(positions), count) == place]
            self._keep(self._stored.ids_at(owned))
            self._stored.remove(owned)

    def begin_as(self, seed: int, initial: Initial) -> None:
        """Ids without a row read as these initial values from now on; for a table that has been cleared."""
        self.spec = dataclasses.replace(self.spec, seed=seed, initial=initial)

    def restored(self, step: int) -> None:
        """A restore of what was saved in `step` is complete: it is the latest; what goes from now on is in `gone`."""
        self._step = max(self._step, step)
        self._tombstones.begin(step)
