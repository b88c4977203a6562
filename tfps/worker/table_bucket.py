"""A table on its worker: makes the frames of requests to the owners of rows, and puts their answers together.

Many requests may be under way at a time, in any order.

Tested in tests/worker/test_tables.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange.codecs import Floats
from tfps.exchange.interface import BucketSpec, FailureState, OnReply, Reply
from tfps.exchange.layout import Cutting, Placer
from tfps.exchange.requests import Ids, Lookup, RowUpdate
from tfps.membership.view import View
from tfps.tables.messages import decode_rows, decode_some, encode_ids, encode_push, rows_of_frame
from tfps.tables.spec import TableSpec
from tfps.wire.frames import COMPLETE, EMPTY, LAST, LOOKUP, Header, Kind
from tfps.wire.send_queue import Outgoing
from tfps.wire.shared_memory import Place, aligned_empty
from tfps.worker.bucket import Incoming, Push, PushedBucket

FIRST_LOOKUP = 2**16  # the index of a frame that asks for rows; those with gradients count from 0
_MOST_LOOKUPS = 2**30  # then they begin anew
_NO_ROWS = np.empty(0, np.uint8)

Frames = list[tuple[int, Outgoing]]  # each with the pserver that it goes to


@dataclass(eq=False, slots=True)
class LookedUp:
    """A lookup, for all its frames."""

    bucket: TableBucket
    step: int
    failures: FailureState
    rows: Floats  # [n, dim], as far as they have come
    left: int = 0  # frames that have not been answered
    push: Push | None = None  # once somebody waits

    def wait(self, on_reply: OnReply) -> None:
        with self.bucket.lock:
            # Under the lock: either this sees a failure, or the failure sees this.
            if (end := self.failures.end) is None and self.left:
                self.push = Push(None, on_reply)
                self.bucket.begin(self.push, self.step)
                return
        on_reply(self.reply if end is None else Reply(error=end))

    @property
    def reply(self) -> Reply:
        """Once all rows have come."""
        return Reply(sum=self.rows.reshape(-1).view(np.uint8), ranks=self.bucket.everybody, step=self.step)


@dataclass(eq=False, slots=True)
class _Frame:
    """One frame of it."""

    rows: LookedUp
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
    def new(cls, spec: BucketSpec, slice_bytes: int, placer: Placer, view: View) -> TableBucket:
        everybody = frozenset(range(view.workers))
        return cls(spec, Cutting([], list(view.pservers)), everybody, table=TableSpec.parse(spec.table))

    def lookup(self, request: Lookup, failures: FailureState) -> tuple[LookedUp, Frames]:
        """Begins a lookup that nobody waits for yet; no frames: there are no rows. Caller holds the lock, and sends."""
        dim, ids, step, attempt = self.table.dim, request.ids, request.step, request.attempt % 2**16
        rows = aligned_empty(4 * dim * len(ids)).view(np.float32).reshape(len(ids), dim)
        found, frames = LookedUp(self, step, failures, rows), Frames()
        flags = LOOKUP | (0 if request.trains else EMPTY)
        for pserver, _, own, last in self._pieces(ids):
            if not len(own) and not request.complete:
                continue  # only all owners together must know that it is complete
            index = FIRST_LOOKUP + next(self._indices) % _MOST_LOOKUPS
            self._frames[index] = _Frame(found, pserver, own)
            found.left += 1
            own_flags, payload = flags | (last if request.complete else 0), memoryview(encode_ids(ids[own]))
            header = Header(Kind.PUSH, own_flags, request.table, index, self.spec.priority, step, generation=attempt)
            frames.append((pserver, Outgoing(header, len(payload), payload)))
        return found, frames

    def apply(self, request: RowUpdate, on_reply: OnReply) -> Frames:
        """Begins an update, as `lookup`."""
        step, ids, frames = request.step, request.ids, Frames()
        if step in self._added:
            raise ProtocolError(f"step {step} of table '{self.spec.name}' must be added to once")
        push = Push(None, on_reply)
        self._added[step] = push, set(self.cutting.owners)
        self.steps = max(self.steps, step + 1)
        for pserver, index, own, last in self._pieces(ids):
            payload = memoryview(encode_push(request.scalars, ids[own], request.gradients[own], self.spec.codec))
            header = Header(Kind.PUSH, last, request.table, index, self.spec.priority, step)
            frames.append((pserver, Outgoing(header, len(payload), payload)))
        self.begin(push, step)
        return frames

    def _pieces(self, ids: Ids) -> Iterator[tuple[int, int, NDArray[np.intp], int]]:
        """For each frame its pserver, its number among those of that, the places of its ids, and LAST for the last."""
        most = rows_of_frame(self.table.dim)
        for pserver, places in self.by_owner(ids):
            count = max(-(-len(places) // most), 1)
            for number in range(count):
                yield pserver, number, places[number * most : (number + 1) * most], LAST * (number == count - 1)

    def by_owner(self, ids: Ids) -> Iterator[tuple[int, NDArray[np.intp]]]:
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

    def memory(self, incoming: Incoming, header: Header, nbytes: int) -> memoryview | None:
        return None

    def receive(self, incoming: Incoming, header: Header, payload: memoryview, place: Place | None) -> None:
        ranks = incoming.ranks(header)
        if (answered := self._answered(incoming.pserver, header, payload, ranks)) is not None:
            on_reply, reply = answered
            on_reply(reply)

    def _answered(
        self, pserver: int, header: Header, payload: memoryview, ranks: Collection[int]
    ) -> tuple[OnReply, Reply] | None:
        """Takes a frame; returns who gets a reply now, and which."""
        with self.lock:
            if header.index < FIRST_LOOKUP:
                return self._applied(pserver, header, ranks)
            frame = self._frames.get(header.index)
            if frame is None or frame.pserver != pserver or frame.rows.step != header.step:
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
            rows = frame.rows
            rows.left -= 1
            if rows.left or rows.push is None or not self._end(rows.push):
                return None
            return rows.push.on_reply, rows.reply

    def _put(self, frame: _Frame, flags: int, payload: memoryview) -> None:
        dim, rows = self.table.dim, frame.rows.rows
        if flags & COMPLETE:
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
        return push.on_reply, Reply(sum=_NO_ROWS, ranks=push.ranks, step=header.step)
