"""A table on its worker: asks the owners of rows, puts their answers together, and sends gradients to them.

Many requests may be under way at a time, in any order.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError, TfpsError
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import BucketSpec, OnReply, Reply
from tfps.exchange.layout import Cutting
from tfps.tables.spec import TableSpec
from tfps.wire.frames import ASK, EMPTY, LAST, WHOLE, Header, Kind
from tfps.wire.rows import Ids, decode_rows, decode_some, encode_ids, encode_push, rows_of_frame
from tfps.wire.send_queue import Outgoing
from tfps.wire.shared_memory import aligned_empty
from tfps.worker.bucket import Push, PushedBucket

FIRST_ASKED = 2**16  # the index of a frame that asks for rows; those with gradients count from 0
_MOST_ASKED = 2**30  # then they begin anew
NO_ROWS = np.empty(0, np.uint8)

Frames = Iterator[tuple[int, Outgoing]]  # each with the pserver that it goes to


@dataclass(eq=False, slots=True)
class _Asked:
    """A request for rows, for all its frames."""

    push: Push
    rows: Floats  # [n, dim], as far as they have come
    left: int  # frames that have not been answered
    foreseen: ForeseenRows | None = None


@dataclass(eq=False, slots=True)
class ForeseenRows:
    """Rows that were asked for ahead. See `Foreseen`."""

    bucket: TableBucket
    step: int
    end: Callable[[], TfpsError | None]  # why the exchange has ended
    push: Push = field(default_factory=lambda: Push(None, lambda reply: None))
    reply: Reply | None = None
    waits: bool = False

    def wait(self, on_reply: OnReply) -> None:
        with self.bucket.lock:  # as in `Worker.ask`
            reply = self.reply if (error := self.end()) is None else Reply(error=error)
            if reply is None:
                self.waits, self.push.on_reply = True, on_reply
                self.bucket.begin(self.push, self.step)
                return
        on_reply(reply)


@dataclass(eq=False, slots=True)
class _Frame:
    """One frame of it."""

    asked: _Asked
    step: int
    pserver: int
    places: NDArray[np.intp]  # of its ids among those asked for
    left: NDArray[np.bool_] | None = None  # which have not come, if some have


@dataclass(slots=True)
class TableBucket(PushedBucket):
    """A declared table. `current` and `waiting` are all requests under way, the oldest first."""

    table: TableSpec = field(kw_only=True)
    _frames: dict[int, _Frame] = field(default_factory=dict)  # that ask, by index
    _added: dict[int, tuple[Push, set[int]]] = field(default_factory=dict)  # by step, with pservers that have not done
    _indices: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def of(cls, spec: BucketSpec, pservers: Sequence[int], workers: int) -> TableBucket:
        """One that has just been declared; `pservers` as in a view."""
        everybody = frozenset(range(workers))
        return cls(spec, Cutting([], list(pservers)), everybody, table=TableSpec.parse(spec.table))

    def ask(
        self, number: int, ids: Ids, step: int, push: Push, *, trains: bool, complete: bool, attempt: int
    ) -> Frames:
        """Begins a request; yields its frames, none if there is nothing to ask. Caller holds the lock, and sends."""
        frames = self._asking(number, ids, step, push, trains=trains, complete=complete, attempt=attempt)
        if frames:
            self.begin(push, step)
        return iter(frames)

    def foresee(self, number: int, ids: Ids, foreseen: ForeseenRows) -> Frames:
        """Begins a request that nobody waits for yet; as `ask`."""
        frames = self._asking(number, ids, foreseen.step, foreseen.push, trains=True, foreseen=foreseen)
        if not frames:
            foreseen.reply = Reply(sum=NO_ROWS, ranks=self.everybody, step=foreseen.step)
        return iter(frames)

    def _asking(
        self,
        number: int,
        ids: Ids,
        step: int,
        push: Push,
        *,
        trains: bool,
        complete: bool = False,
        attempt: int = 0,
        foreseen: ForeseenRows | None = None,
    ) -> list[tuple[int, Outgoing]]:
        dim = self.table.dim
        rows = aligned_empty(4 * dim * len(ids)).view(np.float32).reshape(len(ids), dim)
        asked = _Asked(push, rows, 0, foreseen)
        flags = ASK | (0 if trains else EMPTY)
        frames: list[tuple[int, Outgoing]] = []
        for pserver, places in self._by_owner(ids):
            pieces = range(0, len(places), rows_of_frame(dim)) if len(places) else range(1)
            for begin in pieces:
                own = places[begin : begin + rows_of_frame(dim)]
                if not len(own) and not complete:
                    continue  # only all owners together must know that it is complete
                last = complete and begin == pieces[-1]
                index = FIRST_ASKED + next(self._indices) % _MOST_ASKED
                self._frames[index] = _Frame(asked, step, pserver, own)
                asked.left += 1
                header = Header(
                    Kind.PUSH,
                    flags | (LAST if last else 0),
                    number,
                    index,
                    self.spec.priority,
                    step,
                    generation=attempt % 2**16,
                )
                payload = memoryview(encode_ids(ids[own]))
                frames.append((pserver, Outgoing(header, len(payload), payload)))
        return frames

    def add(
        self, number: int, ids: Ids, gradients: Floats, step: int, scalars: bytes, on_reply: OnReply
    ) -> Iterator[tuple[int, Outgoing]]:
        """As `ask`, with what is added in `step`."""
        push = Push(None, on_reply)
        if step in self._added:
            raise ProtocolError(f"step {step} of table '{self.spec.name}' must be added to once")
        self._added[step] = push, set(self.cutting.owners)
        self.steps = max(self.steps, step + 1)
        frames: list[tuple[int, Outgoing]] = []
        for pserver, places in self._by_owner(ids):
            pieces = range(0, len(places), rows_of_frame(self.table.dim)) if len(places) else range(1)
            for index, begin in enumerate(pieces):
                own = places[begin : begin + rows_of_frame(self.table.dim)]
                payload = memoryview(encode_push(scalars, ids[own], gradients[own], self.spec.codec))
                flags = LAST if begin == pieces[-1] else 0
                header = Header(Kind.PUSH, flags, number, index, self.spec.priority, step)
                frames.append((pserver, Outgoing(header, len(payload), payload)))
        self.begin(push, step)
        return iter(frames)

    def _by_owner(self, ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each pserver and the places of its ids, in ascending order of ids."""
        order = np.argsort(ids)
        pservers = self.cutting.owners
        if len(pservers) == 1:
            yield pservers[0], order
            return
        owners = self.table.owners(ids, len(pservers))[order]
        for place, pserver in enumerate(pservers):
            yield pserver, order[owners == place]

    def begin(self, push: Push, step: int) -> None:
        """Notes that somebody waits for a request. Caller holds the lock."""
        push.step, push.started_s = step, time.monotonic()
        self.started_s = push.started_s
        if self.current is None:
            self.current = push
        else:
            self.waiting.append(push)

    def _end(self, push: Push) -> bool:
        """Notes that a request has been answered; False: it had been before, by a failure."""
        if self.current is push:
            self.current = self.waiting.popleft() if self.waiting else None
            return True
        if push in self.waiting:
            self.waiting.remove(push)
            return True
        return False

    def answered(
        self, pserver: int, header: Header, payload: memoryview, ranks: Collection[int]
    ) -> tuple[OnReply, Reply] | None:
        """Takes a frame; returns who gets a reply now, and which. Takes the lock."""
        with self.lock:
            if header.index < FIRST_ASKED:
                return self._applied(pserver, header, ranks)
            frame = self._frames.get(header.index)
            if frame is None or frame.pserver != pserver or frame.step != header.step:
                if self.current is None:  # a failure has answered
                    return None
                raise ProtocolError(
                    f"an answer of table '{self.spec.name}' must follow a question, got index {header.index} of step "
                    f"{header.step}"
                )
            self._put(frame, header.flags, payload)
            if not header.flags & LAST:
                return None
            del self._frames[header.index]
            asked = frame.asked
            asked.left -= 1
            if asked.left:
                return None
            data = asked.rows.reshape(-1).view(np.uint8)
            reply = Reply(sum=data, ranks=self.everybody, step=header.step)
            if asked.foreseen is not None and not asked.foreseen.waits:
                asked.foreseen.reply = reply
                return None
            return (asked.push.on_reply, reply) if self._end(asked.push) else None

    def _put(self, frame: _Frame, flags: int, payload: memoryview) -> None:
        dim, rows = self.table.dim, frame.asked.rows
        if flags & WHOLE:
            rows[frame.places] = decode_rows(payload, len(frame.places), dim)
            return
        chosen, found = decode_some(payload, len(frame.places), dim)
        left = np.ones(len(frame.places), np.bool_) if frame.left is None else frame.left
        if (chosen & ~left).any() or (flags & LAST and (left != chosen).any()):
            raise ProtocolError(f"answers of table '{self.spec.name}' must have each row once")
        rows[frame.places[chosen]] = found
        frame.left = left & ~chosen

    def _applied(self, pserver: int, header: Header, ranks: Collection[int]) -> tuple[OnReply, Reply] | None:
        if header.step not in self._added:
            if self.current is None:
                return None
            raise ProtocolError(f"table '{self.spec.name}' has no step {header.step} under way")
        push, missing = self._added[header.step]
        # Where one was lost meanwhile its gradients may have come to some owners only.
        push.ranks = ranks if len(missing) == len(self.cutting.owners) else set(push.ranks).intersection(ranks)
        missing.discard(pserver)
        if missing or not self._end(push):
            return None
        del self._added[header.step]
        return push.on_reply, Reply(sum=NO_ROWS, ranks=push.ranks, step=header.step)
