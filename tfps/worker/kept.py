"""What a worker keeps of a bucket that pservers update, so that others can go on with it (`Config.snapshot_steps`).

A **snapshot** is what pservers have before a step: parameters and slots, of which each worker takes a part. With it a
worker keeps its pushes since then. When a pserver is lost, the workers write their parts to the next ones and push
again: the same rounds, with the same results, while their programs wait. No worker goes back. (Checkpoints with message
logging: Elnozahy et al., https://doi.org/10.1145/568522.568525.)

Tested in tests/worker/test_kept_by_workers.py and tests/elastic/test_lost_pservers.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfps.exchange.aggregate import join_gathered, split_gathered
from tfps.exchange.codecs import ITEM_BYTES
from tfps.exchange.interface import OnReply, Payload, Reply
from tfps.protos import tfps_pb2 as pb
from tfps.types import Array, Buffer
from tfps.worker.worker import Worker


class Write(NamedTuple):
    """Values that replace a part of an array, from byte `begin` on."""

    array: int
    begin: int
    values: bytes


@dataclass(eq=False, slots=True)
class Push:
    """What has been pushed."""

    payload: Payload | None  # as it was given: a newcomer gets the same object back (Reply.sum)
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

    def give(self, number: int, worker: Worker, take: OnReply) -> None:
        """Gives it to `worker`."""
        self.given = True
        for write in self.writes:
            worker.write(number, *write)
        if self.collects:
            worker.collect_residual(number, take)
        else:
            worker.push(number, self.payload, take, self.step_scalars)


def _nothing(_: Reply) -> None:
    """Has had its reply."""


class Snapshot(NamedTuple):
    """A part of each array, from byte `begin` on; `ranks` have the parts."""

    ranks: tuple[int, ...] = ()
    begin: int = 0
    values: Sequence[Array] = ()
    folder: str = ""  # of a table: of the files; empty: none, or others know
    assigned: int = 0  # of a table: see kept_rows.py


def part_of(nbytes: int, place: int, count: int) -> tuple[int, int]:
    """Of arrays of `nbytes`, the first byte and the end of the part at `place` of `count`."""
    items = nbytes // ITEM_BYTES
    return ITEM_BYTES * (items * place // count), ITEM_BYTES * (items * (place + 1) // count)


class Kept:
    """Snapshots of bucket `number` and the pushes since the oldest one. The caller holds the bucket's lock."""

    def __init__(self, number: int, arrays: int, nbytes: int, every: int) -> None:
        self._number, self._arrays, self._nbytes, self._every = number, arrays, nbytes, every
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begins at `step`, before which this worker has nothing: nobody has, or others."""
        self.snapshots = {step: Snapshot()}
        self.writes: list[Write] = []  # before the next push
        self._log: deque[Push] = deque()
        self._first = self.given = self.replies = step  # the first push here, and the next to give and to be answered
        self.ranks: tuple[int, ...] = ()  # whose pushes are in the last reply

    @property
    def oldest(self) -> tuple[int, ...] | None:
        """Who have the parts of the oldest snapshot, which all have; None: nothing has been pushed."""
        step = min(self.snapshots)
        return (self.ranks if self.replies else None) if step == 0 else self.snapshots[step].ranks

    @property
    def all_given(self) -> bool:
        return self.given == self._first + len(self._log)

    def add(self, push: Push) -> None:
        push.writes, self.writes = self.writes, []
        self._log.append(push)

    def drop_last(self) -> None:
        """Takes back what was added last and could not be given."""
        self._log.pop()

    @property
    def next(self) -> Push:
        """The next to give."""
        return self._log[self.given - self._first]

    def give(self, rank: int, worker: Worker) -> None:
        """Takes a snapshot if it is time, before the next push goes to `worker`."""
        if self.is_due:
            self.take(rank, worker, self.ranks)
        self.given += 1

    @property
    def is_due(self) -> bool:
        """Whether a snapshot is to be taken before the next push."""
        due = (self.given + self._number) % self._every == 0  # not of all buckets at once
        # Where who takes part has changed, what a lost rank had is gone, and a new one has nothing. All ranks see the
        # same replies, so they decide alike.
        return (due or self.ranks != self.snapshots[max(self.snapshots)].ranks) and self._lacks(self.ranks)

    def _lacks(self, ranks: tuple[int, ...]) -> bool:
        """Whether there is no snapshot of `ranks` before the next push. Before the first one pservers have nothing."""
        return bool(ranks) and self.given > 0 and self.snapshots.get(self.given, Snapshot()).ranks != ranks

    def take(self, rank: int, worker: Worker, ranks: tuple[int, ...]) -> None:
        """Takes the part of `rank`, one of `ranks`, of a snapshot before the next push.

        Until then nothing changes on pservers.
        """
        if not self._lacks(ranks):
            return
        begin, end = part_of(self._nbytes, ranks.index(rank), len(ranks))
        values = [worker.read(self._number, array, begin, end - begin) for array in range(self._arrays)]
        self.snapshots[self.given] = Snapshot(ranks, begin, values)

    def admit(self, rank: int, worker: Worker, others: tuple[int, ...]) -> None:
        """Takes a snapshot of `others` before somebody joins, who has nothing of what came before."""
        if self.given:
            self.take(rank, worker, others)
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

    def restore(self, step: int, worker: Worker) -> None:
        """Writes this rank's part of the snapshot before `step`; all pushes since then are to be given again."""
        snapshot = self.snapshots[step]
        self._forget(step)
        self.snapshots, self.ranks = {step: snapshot}, snapshot.ranks
        self.given = self.replies = step
        for array, values in enumerate(snapshot.values):
            if len(values):
                worker.write(self._number, array, snapshot.begin, values)


def packed(reply: Reply) -> Buffer:
    """What a rank gives to those that lack this reply."""
    if reply.parts is None:
        return reply.sum
    return join_gathered([[memoryview(reply.parts[rank]).cast("B")] for rank in sorted(reply.parts)])


def unpacked(reply: Reply, result: pb.Result) -> Reply:
    """The reply that rank `result.rank` has given."""
    ranks = sorted(result.ranks)
    if reply.parts is None:
        return Reply(sum=reply.sum, ranks=ranks)
    return Reply(parts=split_gathered(memoryview(reply.parts[result.rank]), ranks), ranks=ranks)
