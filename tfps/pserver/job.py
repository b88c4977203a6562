"""The state of one job on one pserver: its members, what they declared, and the rounds of its slices."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from tfps.config import MAX_SLICE_BYTES, Config
from tfps.errors import (
    ClosedError,
    ConnectError,
    MismatchError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    UnsupportedError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.exchange.interface import BucketSpec, declared
from tfps.exchange.layout import Layout
from tfps.membership.members import STREAM_GRACE_S, Applicant, Member, State, first_difference
from tfps.membership.roster import Roster
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.async_slice import AsyncSlice
from tfps.pserver.counters import Counters, ErrorCounts
from tfps.pserver.elastic import Declaration, Elastic, Joined
from tfps.pserver.recording import Recording
from tfps.pserver.shard import OwnedBucket, Shard
from tfps.pserver.slices import Answer, Late, OwnedSlice, Push, SumSlice
from tfps.pserver.statuses import member_status, table_statuses
from tfps.pserver.table_slice import AppliesEach, TableSlice
from tfps.threads import Heartbeat
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.connection import BrokenConnectionError, Receiver, not_expected
from tfps.wire.control import PULL, PUSH, layout_message
from tfps.wire.frames import ASK, EMPTY, Header, Kind
from tfps.wire.send_queue import Encoding, Outgoing, SendQueue, put_in_all
from tfps.wire.shared_memory import Attached, Place, Target

logger = logging.getLogger("tfps")
_MOST_STEPS = 2**62
_EVERY_RANK = "every rank must call fit, evaluate and the like; `rank == 0` is for printing and saving"
_SHOWN = 1000  # characters of an error in the log


class Job(Elastic):
    """All a pserver knows of one job; any thread. A failure ends it for all members: calls raise it from then on."""

    def __init__(self, view: View, name: str, recorder: Recorder, errors: ErrorCounts, max_memory: int = 2**63) -> None:
        super().__init__()
        self._recorder, self._errors, self._max_memory = recorder, errors, max_memory
        self.recording = Recording(recorder)
        self.counters = Counters(lambda: self._roster.view)
        self._changed = threading.Condition()  # guards all below; notified when a waiting declare may go on
        self._roster = Roster(view, name)
        self._shard = Shard(Config(), view, 0, recorder, max_memory)  # replaced when the first worker joins
        self._queues: dict[int, SendQueue] = {}
        self._memory: dict[int, Attached] = {}  # of the members that share theirs
        self._ends: dict[int, Callable[[], object]] = {}  # end the push streams
        self._declarations: list[Declaration] = []
        self._failure: TfpsError | None = None
        self._some_left = False  # whether any member is gone

    # Membership

    @property
    def incarnation(self) -> str:
        """Tells this run of a job from others; known to its members only. Empty before the first has joined."""
        return self._roster.incarnation

    @property
    def over(self) -> bool:
        """Whether it has failed or all its members have left."""
        with self._changed:
            return self._failure is not None or self._roster.over

    @property
    def under_way(self) -> bool:
        """Whether it has begun and is not over."""
        return bool(self._roster.members) and not self.over

    @property
    def abandoned(self) -> bool:
        """Whether all who have joined died before they opened a stream: nothing of them may reach the next job."""
        with self._changed:
            members, now_s = self._roster.members.values(), time.monotonic()
            return bool(members) and all(
                member.state is State.JOINED and not member.streams and now_s - member.joined_s > STREAM_GRACE_S
                for member in members
            )

    def wait_over(self, timeout_s: float) -> None:
        """Waits while some have left and others not: a script may train again while slower workers finish a job."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or not self._roster.ending, timeout_s)

    def join(self, applicant: Applicant, config: Config, memory: Attached | None = None) -> Joined:
        """Adds a worker, which shares `memory`, as a member, or as a candidate for the place of one that was lost."""
        with self._changed:
            joins = self.begun and config.min_workers is not None and applicant.rank in (None, *self._roster.lost)
            if joins and not config.takes_newcomers:
                raise UnsupportedError(
                    f"a worker can join a job under way with mode='sync' only, got mode={config.mode!r}; the others go "
                    "on without it"
                )
            first = not self._roster.members
            member = self._roster.join(applicant, time.monotonic())
            if first:
                view, index, self._roster.least = self._roster.view, applicant.pserver_index, config.min_workers
                self._shard = Shard(config, view, index, self._recorder, self._max_memory, self._tell_set)
                if config.min_workers is not None and not self._beats:
                    self._beats = True
                    Heartbeat("tfps-heartbeat", self._beat)
                self._log(f"begins: {member} is the first of {view.workers} workers")
            if member.state is State.JOINED and not member.streams:  # else a repeated call: streams use its queue
                self._memory.pop(member.rank, None)
                if memory is not None:
                    self._memory[member.rank] = memory
                self._queues[member.rank] = SendQueue(
                    config.first_window_bytes, config.policy, piggyback=False, recorder=self._recorder, rank=member.rank
                )
                for number, ranks in self._shard.sets.told():
                    self._queues[member.rank].put_urgent(frames.encode_ranks(number, ranks))
            candidate = self.begun and member.rank not in self._roster.view.ranks
            if candidate:
                self._log(f"has a candidate: {member} may take part at the next step boundary")
            view = self._roster.view
            return Joined(member.rank, member.rank in self._memory, candidate, view.ranks, view.generation)

    def open_stream(self, rank: int, stream: str, end: Callable[[], object] | None = None) -> SendQueue:
        """Registers a stream, which `end` ends once the other has ended; returns the rank's queue."""
        with self._changed:
            self._raise_failure()
            member = self._roster.members.get(rank)
            if member is None or member.state is State.GONE or stream in member.streams:
                raise ConnectError(f"rank {rank} has not joined this pserver, has left it, or has a stream already")
            member.streams.add(stream)
            self._queues[rank].heard()
            if end is not None:
                self._ends[rank] = end
            if member.streams == {PUSH, PULL}:  # it takes part
                member.state = State.STREAMING
                self._changed.notify_all()
            return self._queues[rank]

    def stream_ended(self, rank: int, queue: SendQueue) -> None:
        """A stream of `rank` has ended, as expected (after `leave` or a failure) or not; ends the other one."""
        queue.close()
        with self._changed:
            member = self._roster.members.get(rank)
            if member is None or self._queues[rank] is not queue:
                return  # it has been lost, and maybe another one has its number
            lost = member.state is not State.GONE
        why = f"died at step {member.step}: its connection ended without a leave"
        if lost and self._lose(rank, why):
            return
        if lost:  # before `go`: else a push in between would report that it left
            self.fail(WorkerLostError(f"{member} {why}"))
        with self._changed:
            self._go(member, ended=1, lost=lost)
            end = self._ends.pop(rank, None)
            self._changed.notify_all()
        if end is not None:
            end()

    def leave(self, rank: int, failure: TfpsError | None, reason: str = "") -> None:
        """Removes `rank`; the job fails if it left because of a failure, or if others wait for it. See LeaveRequest."""
        with self._changed:
            member = self._roster.members.get(rank)
            if member is None or member.state is State.GONE:
                return
            if rank not in self._roster.view.ranks:
                self._lose(rank, f"has left: {reason or failure or 'it did not say why'}")
                return
        if failure is not None:
            if isinstance(failure, PserverLostError) and self._shard.config.outlives_pservers:
                self.fail(failure)  # all workers go on with other pservers
                return
            if not isinstance(failure, (MismatchError, ProtocolError)) and self._lose(rank, f"failed: {failure}"):
                return
            self.fail(failure)  # first, as above
        elif reason and self._lose(rank, f"left at step {member.step}: it ended with {reason}"):
            return
        with self._changed:
            member.reason = reason
            self._go(member)
            if self._failure is None and self._roster.over:
                self._log("has ended: all its workers have left")
                self._remove_snapshots()
            self._changed.notify_all()
            if ended := self.recording.gone(rank):
                self._announce(Header(Kind.TRACE, step=ended))
        self._queues[rank].close()
        self._end_lone_streams()
        self._shard.bound.quiesce(rank, gone=True)
        if self._roster.goes_on(1):
            self._leave_view(rank)
        for bucket, item in self._shard.slices():
            if (late := item.late([rank])) is not None:
                self._fail_left(late, bucket)
                return
        self._release()

    def _go(self, member: Member, *, ended: int = 0, lost: bool = False) -> None:
        member.state, self._some_left = State.GONE, True
        member.ended += ended
        if lost or member.ended >= len(member.streams):  # none of its frames can come any more, or count
            self._memory.pop(member.rank, None)

    def fail(self, error: TfpsError) -> None:
        """Fails the job: every member's streams end with `error`. Only the first error counts."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            self._errors.add("job", error)
            if self._roster.members and not self._roster.over:
                moves = self._shard.config.outlives_pservers and isinstance(error, PserverLostError)
                what = "ends here, to go on with other pservers" if moves else f"has failed: {type(error).__name__}"
                self._log(f"{what}: {error}")
            self._shard.buckets = []
            self._changed.notify_all()
        self.recording.fail(error)
        for queue in list(self._queues.values()):
            queue.fail(error)
        self._end_lone_streams()

    def _end_lone_streams(self) -> None:
        """Ends push streams of members that are gone, or whose job has failed, and that have no pull stream for it."""
        with self._changed:
            over = [
                rank
                for rank in self._ends
                if PULL not in (member := self._roster.members[rank]).streams
                and (self._failure is not None or member.state is State.GONE)
            ]
            ends = [self._ends.pop(rank) for rank in over]
        for end in ends:
            end()

    def _log(self, what: str) -> None:
        names = (member.applicant.job for member in self._roster.members.values())
        name = next((f"job {name!r}" for name in names if name), "job")
        line = f"{name} {what}"
        logger.info("%s", "".join(each if each.isprintable() else " " for each in line[:_SHOWN]))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail_left(self, late: Late, bucket: str) -> None:
        member = self._roster.members[late.rank]
        why = f"its data ended earlier or its script ended; give every worker the same number of batches: {_EVERY_RANK}"
        if member.reason:
            why = f"it ended with {member.reason}"
        which = f"step {late.step} of bucket '{bucket}', for which others wait"
        self.fail(WorkerLostError(f"{member} left before {which}: {why}"))

    # Declarations

    def declare(
        self,
        rank: int,
        number: int,
        details: Sequence[str],
        specs: Sequence[BucketSpec],
        timeout_s: float,
        steps: Sequence[int] = (),
    ) -> None:
        """Blocks until all ranks have declared the same (number 0: have joined); if it times out it may be repeated."""
        members = self._roster
        lines = [*details, *map(str, specs)]  # without the lock: there may be thousands
        if steps and (len(steps) != len(specs) or max(steps) >= _MOST_STEPS):
            raise ProtocolError(f"steps of a declaration must be one for each bucket, below 2**62, got {len(steps)}")
        lines += [f"{spec} from step {step} on" for spec, step in zip(specs, steps, strict=False)]
        with self._changed:
            self._raise_failure()
            if rank not in members.members:
                raise ConnectError(f"rank {rank} has not joined this pserver, or was lost: it cannot declare anything")
            self._shard.check(specs)
            count = len(self._declarations)
            if number > count or (number == count and number and not self._declarations[-1].agreed):
                raise ProtocolError(f"number of a declaration must be at most {count}, got {number}")
            if number == count:
                self._declarations.append(Declaration())
                if number == 0 and self._shard.index:
                    self._begin_without_missing()
            declaration = self._declarations[number]
            if rank in declaration.lines:
                raise ProtocolError(f"declaration {number} must come once from rank {rank}, got it twice")
            declaration.lines[rank], declaration.specs, declaration.steps = lines, specs, steps
            declaration.for_newcomers = () if specs else tuple(details)
            if declaration.lines.keys() >= set(members.view.ranks):
                if (difference := first_difference(declaration.lines, members.describe)) is not None:
                    self.fail(MismatchError(difference))
                self._changed.notify_all()
            # Whichever thread sees the last rank's declaration decides for all.
            self._changed.wait_for(lambda: self._decided(rank, declaration), timeout_s)
            self._raise_failure()
            if declaration.agreed:
                return
            if rank in (gone := members.gone()) or rank not in members.members:
                raise ClosedError("the worker has left the job, or was lost")
            late = [r for r in members.view.ranks if r not in declaration.lines]
            what = "declared its variables" if number else "joined"
            if lost := [members.members[r] for r in late if r in gone]:
                why = f"it ended with {lost[0].reason}" if lost[0].reason else f"its script ended; {_EVERY_RANK}"
                self.fail(WorkerLostError(f"{lost[0]} left before it had {what}: {why}"))
            self._raise_failure()
            declaration.lines.pop(rank, None)
            names = ", ".join(map(members.describe, late or members.not_streaming()))
            raise WaitTimeoutError(f"not {what}: {names} ({_EVERY_RANK if number else 'is it started? see its log'})")

    def _decided(self, rank: int, declaration: Declaration) -> bool:
        if self._failure is not None or declaration.agreed:
            return True
        gone = self._roster.gone()
        if rank not in self._roster.members or any(r == rank or r not in declaration.lines for r in gone):
            return True
        if not declaration.lines.keys() >= set(self._roster.view.ranks) or self._roster.not_streaming():
            return False
        self._shard.add(declaration.specs, declaration.steps)
        declaration.agreed = self._roster.begun = True
        self._roster.restored = self._is_restored
        declaration.lines = {r: [] for r in declaration.lines}  # only the ranks still matter
        if self._goes_on_now:
            self._shard.resume()
        self._changed.notify_all()
        return True

    def tune(self, layout: Layout) -> None:
        """Cuts buckets anew, from the steps in `layout` on, and tells all workers."""
        with self._changed:
            self._raise_failure()
            self._shard.cut_anew(layout)
            self._layouts.append(layout)
            self._announce(Header(Kind.LAYOUT), layout_message(layout).SerializeToString())
            for queue in self._queues.values():
                queue.set_window(layout.window_bytes)

    def trace(self, number: int, on: bool) -> None:
        """Starts or stops recording a capture, and tells all workers."""
        with self._changed:
            self._raise_failure()
            if self._roster.over:  # the recorder is the next job's
                raise ClosedError("all workers have left the job, so nothing of it can be recorded")
            if on:
                others = set(self._roster.view.ranks[1:]) - set(self._roster.gone())
                self.recording.start(number, () if self._shard.index else others)
            else:
                self.recording.stop(number, self._shard.index)
            self._announce(Header(Kind.TRACE, index=int(on), step=number))

    def _announce(self, header: Header, payload: bytes = b"") -> None:
        """Sends a frame outside the windows to all workers."""
        frame = frames.encode(header, payload)
        for queue in self._queues.values():
            queue.put_urgent(frame)

    # Rounds

    def push(self, rank: int, header: Header, payload: memoryview, place: Place | None = None) -> None:
        """Takes a PUSH and sends answers; keeps `payload`, unless the slice is in shared memory at `place`."""
        buckets = self._shard.buckets
        member = self._roster.members.get(rank)
        if self._failure is not None or member is None:
            return  # its stream is about to end
        bucket = declared(buckets, header.bucket)
        if header.priority != bucket.spec.priority:
            name, rule = bucket.spec.name, bucket.spec.priority
            raise ProtocolError(f"priority of bucket '{name}' must be {rule}, got {header.priority}")
        gather = bucket.spec.kind != "sum"  # or a table
        if bucket.next:
            with self._changed:
                bucket.advance(header.step)
        item = bucket.slices.get(0 if gather else header.index)
        if item is None:
            raise ProtocolError(f"bucket '{bucket.spec.name}' has no slice {header.index} on this pserver")
        target = None
        if place is not None:
            if gather or (memory := self._memory.get(rank)) is None:
                raise ProtocolError(f"bucket '{bucket.spec.name}' must come in frames, got {place} in shared memory")
            target = Target(place, memory.view(place))
            payload = payload[:0] if header.flags & EMPTY else target.memory.data
        try:
            answers, wait_ns = item.take(Push(rank, header, payload, target), bucket.next)
        except MismatchError as error:
            self.fail(error)
            return
        if not header.flags & ASK:  # rows are asked for ahead
            member.step = max(member.step, header.step)
        member.wait_s += wait_ns / 1e9 if header.step else 0  # not in the first step, before which graphs are built
        if answers:
            self._send(answers)
        self._hurry(header.bucket, item, header.index)
        if self._some_left and (late := item.late(self._roster.gone())) is not None:
            self._fail_left(late, bucket.spec.name)
        elif isinstance(item, AsyncSlice):
            self._check_assigned(item, self._shard.bound.quiesced(), bucket.spec.name)

    def _hurry(self, bucket: int, item: OwnedSlice, index: int) -> None:
        """Tells ranks for which a quorum waits; the owner of a bucket's first slice does."""
        if (quorum := self._shard.config.quorum) < 1 and index == 0 and isinstance(item, SumSlice):
            step, late = item.awaited(quorum)
            frame = frames.encode(Header(Kind.AWAITED, bucket=bucket, step=step))
            for queue in [self._queues[rank] for rank in late if rank in self._queues]:
                queue.put_urgent(frame)

    def take_scalars(self, rank: int, header: Header, payload: memoryview) -> None:
        """Takes the SCALARS that come before the slices of a push."""
        if self._failure is not None or rank not in self._roster.members:
            return
        bucket = self.bucket(header.bucket)
        if bucket.scalars is None:
            raise ProtocolError(f"bucket '{bucket.spec.name}' has no update, got step scalars for one")
        if error := bucket.scalars.take(rank, header.step, payload):
            self.fail(error)

    @property
    def most_under_way(self) -> int:
        """More than the bytes of all frames of which a rank that keeps to the protocol can have sent a part."""
        slice_bytes = self._shard.config.first_slice_bytes  # of a gather
        return 2 * (MAX_SLICE_BYTES + sum(bucket.spec.nbytes + slice_bytes for bucket in self._shard.buckets))

    def bucket(self, number: int) -> OwnedBucket:
        with self._changed:
            self._raise_failure()
            return declared(self._shard.buckets, number)

    def _table(self, number: int) -> TableSlice:
        bucket = self.bucket(number)
        item = bucket.slices.get(0)
        if not isinstance(item, TableSlice):
            raise ProtocolError(f"bucket '{bucket.spec.name}' is no table")
        return item

    def meet_at_table(self, number: int, rank: int, what: str, timeout_s: float) -> None:
        """Returns when all ranks have come to replace the same rows of a table. WaitTimeoutError: not in time."""
        item = self._table(number)
        missing = item.meet(rank, what, timeout_s, lambda: self._failure is not None)
        with self._changed:
            self._raise_failure()
            if missing:
                names = ", ".join(map(self._roster.describe, missing))
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
        if not item.hold(rank, step, timeout_s, lambda: self._failure is not None):
            self._raise_failure()
            names = ", ".join(map(self._roster.describe, item.missing(rank)))
            raise WaitTimeoutError(
                f"step {step} of {item.label} was not applied within {timeout_s:.3g} s: it lacks gradients of {names}"
            )
        try:
            yield item
        finally:
            self._send(item.release())

    def missing(self, bucket: int, asking: int) -> list[str]:
        """The ranks whose push of a slice of `bucket` others wait for, as rank `asking` does."""
        with self._changed:
            ranks = {rank for item in self.bucket(bucket).slices.values() for rank in item.missing(asking)}
            return [self._roster.describe(rank) for rank in sorted(ranks)]

    def undeclared(self) -> list[str]:
        """The ranks that have not joined, or not declared what others have."""
        with self._changed:
            self._raise_failure()
            ranks = set(self._roster.not_streaming())
            if self._declarations and not (last := self._declarations[-1]).agreed:
                ranks.update(rank for rank in self._roster.view.ranks if rank not in last.lines)
            return [self._roster.describe(rank) for rank in sorted(ranks)]

    def status(self) -> pb.StatusReply:
        """The job's part of a status. Streams keep running, so their numbers may be a slice apart."""
        with self._changed:
            members, state = self._roster, "running"
            if self._failure is not None:
                state = "failed"
            elif not members.members or members.over:
                state = "idle"
            elif members.ending:
                state = "ending"
            elif members.not_streaming():
                state = "joining"
            slices = dict.fromkeys(item for _, item in self._shard.slices())  # a table may be that of two buckets
            awaited = [ranks for item in slices if (ranks := item.missing())]
            present = sorted(members.members.items())
            return pb.StatusReply(
                job=present[0][1].applicant.job if present else "",
                workers=members.view.workers,
                state=state,
                reason=str(self._failure or ""),
                generation=members.view.generation,
                present=members.view.ranks,
                changes=members.changes,
                lost_workers=members.left,
                joined_workers=members.joined,
                buckets=len(self._shard.buckets),
                slices=len(slices),
                shard_bytes=sum(item.nbytes for item in slices),
                open_slices=len(awaited),
                members=[
                    member_status(member, self._queues[rank].load, awaited, shared_memory=rank in self._memory)
                    for rank, member in present
                ],
                tables=table_statuses(self._shard.buckets),
            )

    def _send(self, answers: Collection[Answer]) -> None:
        for ranks, header, payload, target in answers:
            queues = [self._queues[rank] for rank in ranks if rank in self._queues]
            if not queues:
                continue  # lost meanwhile
            if isinstance(payload, Encoding):
                for queue in queues:
                    queue.put([Outgoing(header, payload.nbytes, encoding=payload)])
            elif target is not None:
                queues[0].put([Outgoing(header, target.place.nbytes, payload, target=target)])
            elif payload is not None:
                put_in_all(queues, [(header, payload)])

    # Mode "async"

    def quiesce(self, rank: int) -> None:
        """`rank` pushes nothing more before all are quiesced; see RestRequest."""
        for bucket, item in self._shard.async_slices():
            self._check_assigned(item, [rank], bucket)
        with self._changed:
            self._raise_failure()
        self._shard.bound.quiesce(rank)
        self._release()

    def _check_assigned(self, item: AsyncSlice, quiesced: Collection[int], bucket: str) -> None:
        """Fails the job if others wait for a rank that is quiesced."""
        if quiesced and (late := item.late(quiesced)) is not None:
            text = (
                f"{self._roster.describe(late.rank)} has ended its epoch, or exchanges something else, while "
                "others wait for its first step, or for it to assign values to variables of bucket "
                f"'{bucket}' as they have, or to collect their residuals: give every rank a batch, assign on every "
                "rank, and save a tf.train.Checkpoint on every rank between epochs"
            )
            self.fail(MismatchError(text))

    def _release(self) -> None:
        for _, item in self._shard.slices():
            if isinstance(item, (AsyncSlice, AppliesEach)):
                self._send(item.released())


class Session:
    """A member's streams or data connection; a `Receiver`. `failed` returns what to tell of an unexpected error."""

    def __init__(self, job: Job, rank: int, queue: SendQueue, failed: Callable[..., TfpsError]) -> None:
        self._job, self.rank, self.queue, self._failed = job, rank, queue, failed
        self._under_way = 0  # bytes of frames that have begun to come over a data connection

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        self._under_way += nbytes
        if self._under_way > 2 * MAX_SLICE_BYTES and self._under_way > (most := self._job.most_under_way):
            raise ProtocolError(f"frames under way must have at most {most} bytes together, got {self._under_way}")
        return None

    def _arrived(self, payload: memoryview) -> None:
        if self.queue.on_connection:  # else `memory` is not asked
            self._under_way -= len(payload)

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        self._arrived(payload)
        if self._job.is_current(self.rank, self.queue):
            self._job.push(self.rank, header, payload, place)

    def notice(self, header: Header, payload: memoryview) -> None:
        self._arrived(payload)
        if header.kind != Kind.SCALARS:
            raise not_expected(header, Kind.PUSH)
        if self._job.is_current(self.rank, self.queue):
            self._job.take_scalars(self.rank, header, payload)

    def receive(self, receive: Callable[[Kind, SendQueue, Receiver], object]) -> None:
        """Takes the pushes that `receive` brings, to the end."""
        try:
            receive(Kind.PUSH, self.queue, self)
        except BrokenConnectionError:
            pass  # `ended` tells whether a worker was lost
        except Exception as error:
            self.fail(error, f"while it took a push of rank {self.rank}")
        self.ended()

    def fail(self, error: Exception, when: str) -> TfpsError:
        """Fails the job with an error of one of its threads; returns what to tell its workers."""
        if isinstance(error, WorkerLostError):
            failure: TfpsError = error
        elif isinstance(error, ProtocolError):
            failure = ProtocolError(f"rank {self.rank}: {error}")
        elif self._job.over:  # maybe caused by the teardown
            return self._failed(when, error, logged=False)
        else:
            failure = self._failed(when, error)
        self._job.fail(failure)
        return failure

    def ended(self) -> None:
        """A direction has ended, for whatever reason."""
        self._job.stream_ended(self.rank, self.queue)
