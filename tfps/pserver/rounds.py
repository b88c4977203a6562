"""The rounds of a job's slices on one pserver: what workers push, and calls about what slices keep.

Tested in tests/pserver/test_job.py, tests/worker/test_worker.py and tests/worker/test_tables.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from tfps.config import MAX_SLICE_BYTES
from tfps.errors import MismatchError, ProtocolError, WaitTimeoutError
from tfps.exchange.interface import declared
from tfps.pserver.async_slice import AsyncSlice
from tfps.pserver.shard import OwnedBucket
from tfps.pserver.slices import OwnedSlice, Push, SumSlice
from tfps.pserver.state import JobState
from tfps.pserver.table_slice import TableSlice
from tfps.wire import frames
from tfps.wire.frames import EMPTY, LOOKUP, Header, Kind
from tfps.wire.shared_memory import Place, Target

_BUSY = {1: "compiles"}  # by number on the wire


class Rounds:
    """Any thread. Calls raise the job's failure."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def push(self, rank: int, header: Header, payload: memoryview, place: Place | None = None) -> None:
        """Takes a PUSH and sends answers; keeps `payload`, unless the slice is in shared memory at `place`.

        MismatchError: the rank does not do the same as others.
        """
        buckets = self._state.shard.buckets
        member = self._state.roster.members.get(rank)
        if self._state.failure is not None or member is None:
            return  # its stream is about to end
        bucket = declared(buckets, header.bucket)
        if header.priority != bucket.spec.priority:
            name, rule = bucket.spec.name, bucket.spec.priority
            raise ProtocolError(f"priority of bucket '{name}' must be {rule}, got {header.priority}")
        gather = bucket.spec.kind != "sum"  # or a table
        if bucket.next:
            with self._state.changed:
                bucket.advance(header.step)
        item = bucket.slices.get(0 if gather else header.index)
        if item is None:
            raise ProtocolError(f"bucket '{bucket.spec.name}' has no slice {header.index} on this pserver")
        target = None
        if place is not None:
            if gather or (memory := self._state.memory.get(rank)) is None:
                raise ProtocolError(f"bucket '{bucket.spec.name}' must come in frames, got {place} in shared memory")
            target = Target(place, memory.view(place))
            payload = payload[:0] if header.flags & EMPTY else target.memory.data
        answers, wait_ns = item.take(Push(rank, header, payload, target), bucket.next)
        if not header.flags & LOOKUP:  # lookups may be prefetches
            member.step = max(member.step, header.step)
            if answers and not bucket.spec.occasional:  # a step of all: nobody differs
                self._state.roster.end_trials()
        member.wait_s += wait_ns / 1e9 if header.step else 0  # not in the first step, before which graphs are built
        if answers:
            self._state.send(answers)
        self.hurry(header.bucket, item, header.index)
        if self._state.some_departed and (late := item.late(self._state.roster.departed())) is not None:
            self._state.fail_left(late, bucket.spec.name)
        elif isinstance(item, AsyncSlice):
            self._check_assigned(item, self._state.shard.bound.quiesced(), bucket.spec.name)

    def hurry(self, bucket: int, item: OwnedSlice, index: int) -> None:
        """Tells ranks for which a quorum waits; the owner of a bucket's first slice does."""
        if (quorum := self._state.shard.config.quorum) < 1 and index == 0 and isinstance(item, SumSlice):
            step, late = item.awaited(quorum)
            frame = frames.encode(Header(Kind.AWAITED, bucket=bucket, step=step))
            for queue in [self._state.queues[rank] for rank in late if rank in self._state.queues]:
                queue.put_urgent(frame)

    def take_scalars(self, rank: int, header: Header, payload: memoryview) -> None:
        """Takes the SCALARS that come before the slices of a push. MismatchError: another rank has sent others."""
        if self._state.failure is not None or rank not in self._state.roster.members:
            return
        bucket = self.bucket(header.bucket)
        if bucket.scalars is None:
            raise ProtocolError(f"bucket '{bucket.spec.name}' has no update, got step scalars for one")
        if (error := bucket.scalars.take(rank, header.step, payload, self._state.roster.members)) is not None:
            raise error

    @property
    def most_under_way(self) -> int:
        """More than the bytes of all frames of which a rank that keeps to the protocol can have sent a part."""
        slice_bytes = self._state.shard.config.first_slice_bytes  # of a gather
        return 2 * (MAX_SLICE_BYTES + sum(bucket.spec.nbytes + slice_bytes for bucket in self._state.shard.buckets))

    def bucket(self, number: int) -> OwnedBucket:
        with self._state.changed:
            self._state.raise_failure()
            return declared(self._state.shard.buckets, number)

    def _table(self, number: int) -> TableSlice:
        bucket = self.bucket(number)
        item = bucket.slices.get(0)
        if not isinstance(item, TableSlice):
            raise ProtocolError(f"bucket '{bucket.spec.name}' is no table")
        return item

    def meet_at_table(self, number: int, rank: int, what: str, timeout_s: float) -> None:
        """Returns when all ranks have come to replace the same rows of a table. WaitTimeoutError: not in time."""
        item = self._table(number)
        missing = item.meet(rank, what, timeout_s, lambda: self._state.failure is not None)
        with self._state.changed:
            self._state.raise_failure()
            if missing:
                names = ", ".join(map(self._state.roster.describe, missing))
                raise WaitTimeoutError(
                    f"rows of {item.label} are replaced when all ranks do so, within {timeout_s:.3g} s: missing {names}"
                )

    @contextlib.contextmanager
    def saved_table(self, number: int, rank: int, step: int, timeout_s: float) -> Iterator[TableSlice]:
        """In the block a table is as so many steps have left it; gradients that come are applied after it.

        Raises:
            WaitTimeoutError: these steps have not been applied in time.
        """
        item = self._table(number)
        if not item.hold(rank, step, timeout_s, lambda: self._state.failure is not None):
            self._state.raise_failure()
            names = ", ".join(map(self._state.roster.describe, item.missing(rank)))
            raise WaitTimeoutError(
                f"step {step} of {item.label} was not applied within {timeout_s:.3g} s: it lacks gradients of {names}"
            )
        try:
            yield item
        finally:
            self._state.send(item.release())

    def missing(self, bucket: int, asking: int) -> list[str]:
        """The ranks whose push of a slice of `bucket` others wait for, as rank `asking` does."""
        with self._state.changed:
            ranks = {rank for item in self.bucket(bucket).slices.values() for rank in item.missing(asking)}
            roster = self._state.roster
            busy = {rank: f", which {member.busy}" for rank, member in roster.members.items() if member.busy}
            return [f"{roster.describe(rank)}{busy.get(rank, '')}" for rank in sorted(ranks)]

    def note_busy(self, rank: int, what: int) -> None:
        """Notes what `rank` does that others may wait for; see BusyRequest."""
        with self._state.changed:
            if (member := self._state.roster.members.get(rank)) is not None:
                member.busy = _BUSY.get(what, "")

    def quiesce(self, rank: int) -> None:
        """`rank` pushes nothing more before all are quiesced; see RestRequest."""
        for bucket, item in self._state.shard.async_slices():
            self._check_assigned(item, [rank], bucket)
        with self._state.changed:
            self._state.raise_failure()
        self._state.shard.bound.quiesce(rank)
        self.release()

    def _check_assigned(self, item: AsyncSlice, quiesced: Collection[int], bucket: str) -> None:
        """Fails the job if others wait for a rank that is quiesced."""
        if quiesced and (late := item.late(quiesced)) is not None:
            text = (
                f"{self._state.roster.describe(late.rank)} has ended its epoch, or exchanges something else, while "
                "others wait for its first step, or for it to assign values to variables of bucket "
                f"'{bucket}' as they have, or to collect their residuals: give every rank a batch, assign on every "
                "rank, and save a tf.train.Checkpoint on every rank between epochs"
            )
            self._state.fail(MismatchError(text))

    def release(self) -> None:
        for _, item in self._state.shard.slices():
            self._state.send(item.released())
