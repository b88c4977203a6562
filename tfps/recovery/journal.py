"""The journal of a bucket: what a worker keeps so that other pservers can go on with it (`Config.snapshot_steps`).

`Replay` is that of a bucket whose rounds all ranks step through together; others are in latest.py and rows.py. A
**snapshot** is what pservers have before a step: parameters and slots, of which each worker takes a part. With it a
worker keeps its pushes since then. When a pserver is lost, the workers write their parts to the next ones and push
again: the same rounds, with the same results, while their programs wait. No worker goes back. (Checkpoints with message
logging: Elnozahy et al., https://doi.org/10.1145/568522.568525.)

A journal talks to no pserver: it returns what is to be read, written or saved, and gets what has been found.

Tested in tests/worker/test_replay.py, tests/recovery/test_search.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import join_gathered, split_gathered
from tfps.exchange.codecs import ITEM_BYTES
from tfps.exchange.interface import OnReply, Payload, Reply
from tfps.exchange.requests import Save
from tfps.protos import tfps_pb2 as pb
from tfps.recovery.files import Files, Saved
from tfps.types import Array, Buffer


class Write(NamedTuple):
    """Values that replace a part of an array, from byte `begin` on."""

    array: int
    begin: int
    values: Payload


@dataclass(eq=False, slots=True)
class Push:
    """What has been pushed."""

    payload: Payload | None  # as it was given: a joining worker gets the same object back (Reply.sum)
    on_reply: OnReply
    collects: bool = False  # residuals: see State.collect_residual
    step_scalars: bytes = b""
    writes: Sequence[Write] = ()  # before it
    reads: bool = False  # mode "async": it only reads, as the program wants
    assigns: bool = False  # mode "async": it waits until all ranks have assigned values
    given: bool = False  # to a worker, so that pservers may have it

    def answered(self) -> OnReply:
        """Returns who gets the reply, once: it may keep that as long as this is kept."""
        on_reply, self.on_reply = self.on_reply, _nothing
        return on_reply


def _nothing(_: Reply) -> None:
    """Has had its reply."""


class Snapshot(NamedTuple):
    """A part of each array, from byte `begin` on; `ranks` have the parts."""

    ranks: tuple[int, ...] = ()
    begin: int = 0
    values: Sequence[Array] = ()
    folder: str = ""  # of a table: of the files; empty: none, or others know
    assigned: int = 0  # of a table: see rows.py


class Wanted(NamedTuple):
    """What this rank reads of pservers for a snapshot of `ranks`: a part of each array; or has them `save`."""

    ranks: tuple[int, ...]
    arrays: Sequence[int] = ()
    begin: int = 0
    nbytes: int = 0
    save: Save | None = None


def part_of(nbytes: int, place: int, count: int) -> tuple[int, int]:
    """Of arrays of `nbytes`, the first byte and the end of the part at `place` of `count`."""
    items = nbytes // ITEM_BYTES
    return ITEM_BYTES * (items * place // count), ITEM_BYTES * (items * (place + 1) // count)


class Journal(Protocol):
    """What a worker keeps of one bucket. The caller holds the bucket's lock.

    A journal gets every push before a worker does (`add`, then `give`) and every reply (`answered`); when pservers are
    lost it says what it has (`report`), and does its part so that others have it (`resume`).
    """

    @property
    def replay(self) -> Replay | None:
        """Itself, if rounds are computed again from it: pushes are given again, from `next` on."""
        return None

    @property
    def oldest(self) -> tuple[int, ...] | None:
        """Who have the parts of the oldest snapshot; None: nothing is needed, or it is where all can read it."""

    @property
    def caught_up(self) -> bool:
        """Whether all pushes have been given and answered."""
        return True

    def begin(self, step: int) -> None:
        """Begins at `step`, before which this worker has nothing: nobody has, or others."""

    def write(self, write: Write) -> None:
        """Keeps a write that goes with the next push."""
        raise ProtocolError("rows of a table are not written by position")

    def add(self, push: Push) -> None: ...

    def drop_last(self) -> None:
        """Takes back what was added last and could not be given."""
        return

    def due(self, ranks: tuple[int, ...], step: int) -> Wanted | None:
        """What `took` or `wrote` gets before `step` is pushed, if it is time for a snapshot; `ranks` take part."""

    def took(self, snapshot: Snapshot) -> None:
        """Has read what was wanted."""
        return

    def give(self, ranks: tuple[int, ...]) -> None:
        """The next push is given."""

    def answered(self, push: Push, reply: Reply) -> None: ...

    def admit(self, others: tuple[int, ...]) -> Wanted | None:
        """What is needed of `others` before somebody joins, who has nothing of what came before."""
        return None

    def admitted(self, others: tuple[int, ...]) -> None:
        """All `others` have what is needed."""
        return

    def report(self, report: pb.BucketReport) -> None:
        """Adds what this worker has, for others who are to agree with what they go on."""

    def resume(self, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]) -> Sequence[Write]:
        """What this rank writes to other pservers, as one of `ranks` that all have agreed on.

        `pushes` have not been answered.
        """

    def dropped(self, pushes: Collection[Push]) -> Sequence[Push]:
        """Those that pservers may have had and that are not given again."""
        return ()

    # Of a table

    @property
    def files(self) -> Files | None:
        return None

    def wrote(self, ranks: tuple[int, ...], saved: Saved) -> None:
        """This rank has had a snapshot of `ranks` written before the next push."""
        return

    def replaced(self, ranks: tuple[int, ...], saved: Saved | None) -> None:
        """All ranks have replaced rows, with nothing under way, and a snapshot has been taken of that."""
        return

    def follow(self, other: Journal) -> None:
        """Goes on where `other` has ended, as the table has got another optimizer."""
        return


class Replay(Journal):
    """Snapshots of bucket `number` of `rank`, and the pushes since the oldest one."""

    @property
    def replay(self) -> Replay:
        return self

    def __init__(self, number: int, rank: int, arrays: int, nbytes: int, every: int) -> None:
        self._number, self._rank, self._every = number, rank, every
        self._arrays, self._nbytes = arrays, nbytes
        self.begin(0)

    def begin(self, step: int) -> None:
        self.snapshots = {step: Snapshot()}
        self.writes: list[Write] = []  # before the next push
        self._log: deque[Push] = deque()
        self._first = self.given = self.replies = step  # the first push here, and the next to give and to be answered
        self.ranks: tuple[int, ...] = ()  # whose pushes are in the last reply

    @property
    def oldest(self) -> tuple[int, ...] | None:
        step = min(self.snapshots)
        return (self.ranks if self.replies else None) if step == 0 else self.snapshots[step].ranks

    @property
    def all_given(self) -> bool:
        return self.given == self._first + len(self._log)

    @property
    def caught_up(self) -> bool:
        return self.all_given and self.given == self.replies

    @property
    def idle(self) -> bool:
        """Whether nothing that was given waits for its answer, and there is more to give."""
        return not self.all_given and self.given == self.replies

    def write(self, write: Write) -> None:
        self.writes.append(write)

    def add(self, push: Push) -> None:
        push.writes, self.writes = self.writes, []
        self._log.append(push)

    def drop_last(self) -> None:
        self._log.pop()

    @property
    def next(self) -> Push:
        """The next to give."""
        return self._log[self.given - self._first]

    def give(self, ranks: tuple[int, ...]) -> None:
        self.given += 1

    def due(self, ranks: tuple[int, ...], step: int) -> Wanted | None:
        due = (self.given + self._number) % self._every == 0  # not of all buckets at once
        # Where who takes part has changed, what a lost rank had is gone, and a new one has nothing. All ranks see the
        # same replies, so they decide alike.
        return self.admit(self.ranks) if due or self.ranks != self.snapshots[max(self.snapshots)].ranks else None

    def admit(self, others: tuple[int, ...]) -> Wanted | None:
        # Nothing changes on pservers until the next push. Before the first one they have nothing.
        if not others or not self.given or self.snapshots.get(self.given, Snapshot()).ranks == others:
            return None
        return self._wanted(others)

    def _wanted(self, ranks: tuple[int, ...]) -> Wanted | None:
        """This rank's part of a snapshot of `ranks`, of which there is none."""
        begin, end = part_of(self._nbytes, ranks.index(self._rank), len(ranks))
        return Wanted(ranks, range(self._arrays), begin, end - begin)

    def took(self, snapshot: Snapshot) -> None:
        self.snapshots[self.given] = snapshot

    def admitted(self, others: tuple[int, ...]) -> None:
        if self.given:
            self.ranks = others

    def answered(self, push: Push, reply: Reply) -> None:
        """`push` has been answered. All ranks have what they had to take before it, and need nothing older."""
        self.ranks, self.replies = tuple(sorted(reply.ranks)), reply.step + 1
        if reply.step in self.snapshots:
            self._forget(reply.step)

    def _forget(self, step: int) -> None:
        self.snapshots = {each: snapshot for each, snapshot in self.snapshots.items() if each >= step}
        while self._first < step:
            self._log.popleft()
            self._first += 1

    def report(self, report: pb.BucketReport) -> None:
        for step, snapshot in self.snapshots.items():
            self._say(report.snapshots.add(), step, snapshot)

    def _say(self, message: pb.Snapshot, step: int, snapshot: Snapshot) -> None:
        message.step, message.part = step, bool(snapshot.values)
        message.ranks[:] = snapshot.ranks if step else self.ranks

    def resume(self, decision: pb.BucketDecision, ranks: tuple[int, ...], pushes: Collection[Push]) -> Sequence[Write]:
        """This rank's part of the snapshot before the step; all pushes since then are to be given again."""
        step = decision.step
        if decision.unrecoverable:
            self.begin(step)
            return ()
        snapshot = self.snapshots[step]
        self._forget(step)
        # Before the first snapshot it says whose pushes came since: another pserver may be lost before all begin anew.
        self.snapshots, self.ranks = {step: snapshot}, snapshot.ranks if step else self.ranks
        self.given = self.replies = step
        return [Write(array, snapshot.begin, values) for array, values in enumerate(snapshot.values) if len(values)]


def packed(reply: Reply) -> Buffer:
    """What a rank gives to those that lack this reply. ProtocolError: it has been forgotten, as all must have it."""
    if reply.parts is None:
        if reply.sum is None:
            raise ProtocolError("a rank lacks a result that the others had some steps before")
        return reply.sum
    return join_gathered([[memoryview(reply.parts[rank]).cast("B")] for rank in sorted(reply.parts)])


def unpacked(reply: Reply, decision: pb.BucketDecision) -> Reply:
    """The reply that the donor has given."""
    ranks = sorted(decision.last)
    if reply.parts is None:
        return Reply(sum=reply.sum, ranks=ranks)
    return Reply(parts=split_gathered(memoryview(reply.parts[decision.giver]), ranks), ranks=ranks)
