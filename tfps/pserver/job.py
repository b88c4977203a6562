"""One job on one pserver: its members, what they declared, and the rounds of its slices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfps.config import MAX_SLICE_BYTES, Config
from tfps.errors import (
    OF_JOB,
    ClosedError,
    ConnectError,
    JoinError,
    MismatchError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    WorkerLostError,
)
from tfps.membership.members import STREAM_GRACE_S, Applicant, Member, State
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.pserver.counters import Counters, ErrorCounts
from tfps.pserver.declarations import Declarations
from tfps.pserver.elastic import Elastic
from tfps.pserver.moving import Moving
from tfps.pserver.rounds import Rounds
from tfps.pserver.shard import Shard
from tfps.pserver.state import JobState
from tfps.pserver.statuses import member_status, table_statuses
from tfps.threads import Heartbeat
from tfps.trace.recorder import Recorder
from tfps.wire import frames
from tfps.wire.connection import BrokenConnectionError, Receiver, not_expected
from tfps.wire.control import PULL, PUSH
from tfps.wire.frames import Header, Kind, unpack_counts
from tfps.wire.send_queue import SendQueue
from tfps.wire.shared_memory import Attached, Place

logger = logging.getLogger("tfps")


class Joined(NamedTuple):
    """What a worker is told that has joined."""

    rank: int
    shared_memory: bool
    pending: bool
    present: Sequence[int]
    generation: int


class Job:
    """All a pserver knows of one job; any thread. A failure ends it for all members: calls raise it from then on.

    `tell`: see `on_job` of `ParameterServer`.
    """

    def __init__(
        self,
        view: View,
        name: str,
        recorder: Recorder,
        errors: ErrorCounts,
        max_memory: int = 2**63,
        tell: Callable[[str], object] = lambda what: None,
    ) -> None:
        self._state = state = JobState(view, name, recorder, errors, max_memory, tell)
        self.recording = state.recording
        self.counters = Counters(lambda: state.roster.view)
        self.rounds = Rounds(state)
        self.elastic = Elastic(state, self.rounds)
        self.declarations = Declarations(state, self.elastic)
        self.moving = Moving(state)
        self._beats = False  # whether it has a heartbeat

    @property
    def over(self) -> bool:
        """Whether it has failed or all its members have left."""
        return self._state.over

    def fail(self, error: TfpsError) -> None:
        """Fails the job: every member's streams end with `error`. Only the first error counts."""
        self._state.fail(error)

    @property
    def incarnation(self) -> str:
        """Tells this run of a job from others; known to its members only. Empty before the first has joined."""
        return self._state.roster.incarnation

    @property
    def under_way(self) -> bool:
        """Whether it has begun and is not over."""
        return bool(self._state.roster.members) and not self._state.over

    @property
    def abandoned(self) -> bool:
        """Whether all who have joined died before they opened a stream: nothing of them may reach the next job."""
        with self._state.changed:
            members, now_s = self._state.roster.members.values(), time.monotonic()
            return bool(members) and all(
                member.state is State.JOINED and not member.streams and now_s - member.joined_s > STREAM_GRACE_S
                for member in members
            )

    def wait_over(self, timeout_s: float) -> None:
        """Waits while some have left and others not: a script may train again while slower workers finish a job."""
        with self._state.changed:
            self._state.changed.wait_for(
                lambda: self._state.failure is not None or not self._state.roster.ending, timeout_s
            )

    def join(self, applicant: Applicant, config: Config, memory: Attached | None = None) -> Joined:
        """Adds a worker, which shares `memory`: as a member, or as one that joins in the place of one that was lost."""
        state, roster = self._state, self._state.roster
        with state.changed:
            joins = roster.takes_joiners and config.elastic and applicant.rank in (None, *roster.lost)
            if joins and not config.steps_together:
                raise JoinError(
                    f"a worker can join a job under way with mode='sync' only, got mode={config.mode!r}; the others go "
                    "on without it"
                )
            first = not roster.members
            member = roster.join(applicant, time.monotonic())
            if first:
                view, index, roster.least = roster.view, applicant.pserver_index, config.min_workers
                state.shard = Shard(config, view, index, state.recorder, state.max_memory, state.tell_set)
                if config.elastic and not self._beats:
                    self._beats = True
                    Heartbeat("tfps-heartbeat", self._beat)
                state.log(f"begins: {member} is the first of {roster.started} workers")
            if member.state is State.JOINED and not member.streams:  # else a repeated call: streams use its queue
                state.memory.pop(member.rank, None)
                if memory is not None:
                    state.memory[member.rank] = memory
                state.queues[member.rank] = SendQueue(
                    config.first_window_bytes,
                    config.policy,
                    piggyback=False,
                    recorder=state.recorder,
                    rank=member.rank,
                )
                for number, ranks in state.shard.sets.notified():
                    state.queues[member.rank].put_urgent(frames.encode_ranks(number, ranks))
            pending = roster.takes_joiners and member.rank not in roster.view.ranks
            if pending:
                state.log(f"has a joining worker: {member} may take part at the next step boundary")
            view = roster.view
            return Joined(member.rank, member.rank in state.memory, pending, view.ranks, view.generation)

    def _beat(self, late: bool) -> bool:
        self.elastic.lose_overdue(self.declarations.late())
        return self.elastic.beat(late)

    def open_stream(self, rank: int, stream: str, end: Callable[[], object] | None = None) -> SendQueue:
        """Registers a stream, which `end` ends once the other has ended; returns the rank's queue."""
        with self._state.changed:
            self._state.raise_failure()
            member = self._state.roster.members.get(rank)
            if member is None or member.state is State.DEPARTED or stream in member.streams:
                raise ConnectError(f"rank {rank} has not joined this pserver, has left it, or has a stream already")
            member.streams.add(stream)
            self._state.queues[rank].heard()
            if end is not None:
                self._state.ends[rank] = end
            if member.streams == {PUSH, PULL}:  # it takes part
                member.state = State.STREAMING
                self._state.changed.notify_all()
            return self._state.queues[rank]

    def stream_ended(self, rank: int, queue: SendQueue) -> None:
        """A stream of `rank` has ended, as expected (after `leave` or a failure) or not; ends the other one."""
        queue.close()
        with self._state.changed:
            member = self._state.roster.members.get(rank)
            if member is None or self._state.queues[rank] is not queue:
                return  # it has been lost, and maybe another one has its number
            lost = member.state is not State.DEPARTED
        why = f"died at step {member.step}: its connection ended without a leave"
        if lost and self.elastic.lose(rank, why):
            return
        if lost:  # before `go`: else a push in between would report that it left
            self._state.fail(WorkerLostError(f"{member} {why}"))
        with self._state.changed:
            self._go(member, ended=1, lost=lost)
            end = self._state.ends.pop(rank, None)
            self._state.changed.notify_all()
        if end is not None:
            end()

    def leave(self, rank: int, failure: TfpsError | None, reason: str = "") -> None:
        """Removes `rank`; the job fails if it left because of a failure, or if others wait for it. See LeaveRequest."""
        state, roster = self._state, self._state.roster
        with state.changed:
            member = roster.members.get(rank)
            if member is None or member.state is State.DEPARTED:
                return
            if isinstance(failure, JoinError):
                state.errors.add("Join", failure)  # as if it had been refused at once
            if rank not in roster.view.ranks:
                self.elastic.lose(rank, f"has left: {reason or failure or 'it did not say why'}")
                return
        if failure is not None:
            if isinstance(failure, PserverLostError) and state.shard.config.outlives_pservers:
                state.fail(failure)  # all workers go on with other pservers
                return
            text = str(failure)
            why = text.removeprefix(f"{member} ") if text.startswith(f"{member} failed") else f"failed: {text}"
            if self.elastic.lose_on_trial(rank, why):
                return
            if not isinstance(failure, OF_JOB) and self.elastic.lose(rank, why):
                return
            state.fail(failure)  # first, as above
        elif reason and self.elastic.lose(rank, f"left at step {member.step}: it ended with {reason}"):
            return
        with state.changed:
            member.reason = reason
            self._go(member)
            come_too_late = roster.too_late()
        for each in come_too_late:
            self.elastic.lose(each, f"came too late: {member}, the last of the job, has left")
        with state.changed:
            if state.failure is None and roster.over:
                state.log("has ended: all its workers have left")
                state.tell("job fails" if reason else "job ends")
                self.moving.remove_snapshots()
            state.changed.notify_all()
            if ended := state.recording.departed(rank):
                state.announce(Header(Kind.TRACE, step=ended))
        state.queues[rank].close()
        state.end_lone_streams()
        state.shard.bound.quiesce(rank, departed=True)
        if roster.goes_on(1):
            self.elastic.leave_view(rank)
        for bucket, item in state.shard.slices():
            if (late := item.late([rank])) is not None:
                state.fail_left(late, bucket)
                return
        self.rounds.release()

    def _go(self, member: Member, *, ended: int = 0, lost: bool = False) -> None:
        member.state, self._state.some_departed = State.DEPARTED, True
        member.ended += ended
        if lost or member.ended >= len(member.streams):  # none of its frames can come any more, or count
            self._state.memory.pop(member.rank, None)

    def trace(self, number: int, on: bool) -> None:
        """Starts or stops recording a capture, and tells all workers."""
        with self._state.changed:
            self._state.raise_failure()
            if self._state.roster.over:  # the recorder is the next job's
                raise ClosedError("all workers have left the job, so nothing of it can be recorded")
            if on:
                others = set(self._state.roster.view.ranks[1:]) - set(self._state.roster.departed())
                self._state.recording.start(number, () if self._state.shard.index else others)
            else:
                self._state.recording.stop(number, self._state.shard.index)
            self._state.announce(Header(Kind.TRACE, index=int(on), step=number))

    def status(self) -> pb.StatusReply:
        """The job's part of a status. Streams keep running, so their numbers may be a slice apart."""
        job, members, state, reason = self._state, self._state.roster, "running", str(self._state.failure or "")
        with job.changed:
            if job.failure is not None:
                state = "failed"
            elif not members.members or members.over:
                state = "idle"
            elif members.ending:
                state = "ending"
            elif members.resumed is not None and not members.restored:
                late = self.declarations.undeclared()
                state, reason = "restoring", f"waits for {', '.join(late)}" if late else "workers write what they keep"
            elif members.not_streaming():
                state = "joining"
            slices = dict.fromkeys(item for _, item in job.shard.slices())  # a table may be that of two buckets
            awaited = [ranks for item in slices if (ranks := item.missing())]
            present = sorted(members.members.items())
            return pb.StatusReply(
                job=present[0][1].applicant.job if present else "",
                workers=members.view.workers,
                state=state,
                reason=reason,
                generation=members.view.generation,
                present=members.view.ranks,
                changes=members.changes,
                lost_workers=members.left,
                joined_workers=members.joined,
                buckets=len(job.shard.buckets),
                slices=len(slices),
                shard_bytes=sum(item.nbytes for item in slices),
                open_slices=len(awaited),
                members=[
                    member_status(member, job.queues[rank].load, awaited, shared_memory=rank in job.memory)
                    for rank, member in present
                ],
                tables=table_statuses(job.shard.buckets),
            )


class Session:
    """A member's streams or data connection; a `Receiver`. `failed` returns what to tell of an unexpected error."""

    def __init__(self, job: Job, rank: int, queue: SendQueue, failed: Callable[..., TfpsError]) -> None:
        self._job, self.rank, self.queue, self._failed = job, rank, queue, failed
        self._under_way = 0  # bytes of frames that have begun to come over a data connection

    def memory(self, header: Header, nbytes: int) -> memoryview | None:
        self._under_way += nbytes
        if self._under_way > 2 * MAX_SLICE_BYTES and self._under_way > (most := self._job.rounds.most_under_way):
            raise ProtocolError(f"frames under way must have at most {most} bytes together, got {self._under_way}")
        return None

    def _arrived(self, payload: memoryview) -> None:
        if self.queue.on_connection:  # else `memory` is not asked
            self._under_way -= len(payload)

    def data(self, header: Header, payload: memoryview, place: Place | None) -> None:
        self._arrived(payload)
        if self._job.elastic.is_current(self.rank, self.queue):
            self._take(self._job.rounds.push, header, payload, place)

    def control(self, header: Header, payload: memoryview) -> None:
        self._arrived(payload)
        if header.kind == Kind.RECEIVED:
            self._job.elastic.received(self.rank, self.queue, unpack_counts(payload))
            return
        if header.kind != Kind.SCALARS:
            raise not_expected(header, Kind.PUSH)
        if self._job.elastic.is_current(self.rank, self.queue):
            self._take(self._job.rounds.take_scalars, header, payload)

    def _take(self, take: Callable[..., object], *frame: object) -> None:
        elastic = self._job.elastic
        losses = elastic.losses
        try:
            take(self.rank, *frame)
        except MismatchError as error:
            elastic.lose_differing(self.rank, f"differs from the others: {error}")
            if elastic.losses == losses:
                self._job.fail(error)
            elif elastic.is_current(self.rank, self.queue):  # who is lost had come first
                self._take(take, *frame)

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
        if not self._job.elastic.lose_on_trial(self.rank, f"failed: {failure}"):
            self._job.fail(failure)
        return failure

    def ended(self) -> None:
        """A direction has ended, for whatever reason."""
        self._job.stream_ended(self.rank, self.queue)
