"""What becomes of a job on one pserver whose workers are lost or leave, and who joins it (Config.min_workers).

Tested in tests/worker/test_lost_workers.py, tests/worker/test_newcomers.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import abc
import functools
import hmac
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tfps.errors import (
    ConnectError,
    ProtocolError,
    PserverLostError,
    TfpsError,
    UnsupportedError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.exchange.interface import BucketSpec
from tfps.exchange.layout import Layout
from tfps.membership import roster
from tfps.membership.members import Applicant, Resumed, State
from tfps.membership.roster import How, Roster
from tfps.membership.view import run_of
from tfps.pserver.recording import Recording
from tfps.pserver.shard import Shard
from tfps.pserver.slices import Answer, OwnedSlice
from tfps.tables.files import remove_all_saves
from tfps.wire import frames
from tfps.wire.control import bucket_message, layout_message
from tfps.wire.frames import Header, Kind
from tfps.wire.send_queue import SILENT_S, SendQueue
from tfps.wire.shared_memory import Attached

_NOTICED_S = 10.0  # by then it is noticed that a worker has been silent for too long, also on a busy machine
_STEPS = {How.LOST: 0, How.SILENT: frames.SILENT, How.ENDED: frames.ENDED}  # of frames
# Declarations of workers that go on with other pservers, before the one with which all have written what they kept: one
# by which they join, and one of all buckets.
_RESUMING = 2


@dataclass(slots=True)
class Declaration:
    lines: dict[int, list[str]] = field(default_factory=dict)
    specs: Sequence[BucketSpec] = ()
    steps: Sequence[int] = ()  # the first of each bucket; empty: 0
    agreed: bool = False
    for_newcomers: Sequence[str] = ()  # the details of one without buckets


@dataclass(slots=True)
class Admission:
    """Candidates that are about to take part, and the ranks that have agreed."""

    candidates: frozenset[int]
    called: set[int] = field(default_factory=set)
    before: Sequence[int] = ()  # who took part until it was over
    present: Sequence[int] = ()  # and from then on
    over: bool = False


class Joined(NamedTuple):
    """What a worker is told that has joined."""

    rank: int
    shared_memory: bool
    candidate: bool
    present: Sequence[int]
    generation: int


class Elastic(abc.ABC):
    """The part of a `Job` that changes its view."""

    recording: Recording
    _changed: threading.Condition  # guards all below
    _roster: Roster
    _shard: Shard
    _queues: dict[int, SendQueue]
    _memory: dict[int, Attached]
    _ends: dict[int, Callable[[], object]]
    _declarations: list[Declaration]
    _failure: TfpsError | None

    def __init__(self) -> None:
        self._layouts: list[Layout] = []  # as tuned
        self._admission: Admission | None = None  # under way
        self._beats = False  # whether it has a heartbeat
        self._training = 0  # that members have said they are in

    @property
    @abc.abstractmethod
    def over(self) -> bool: ...
    @abc.abstractmethod
    def fail(self, error: TfpsError) -> None: ...
    @abc.abstractmethod
    def _log(self, what: str) -> None: ...
    @abc.abstractmethod
    def _raise_failure(self) -> None: ...
    @abc.abstractmethod
    def _announce(self, header: Header, payload: bytes = b"") -> None: ...
    @abc.abstractmethod
    def _send(self, answers: Collection[Answer]) -> None: ...
    @abc.abstractmethod
    def _release(self) -> None: ...
    @abc.abstractmethod
    def _hurry(self, bucket: int, item: OwnedSlice, index: int) -> None: ...

    @property
    def begun(self) -> bool:
        """Whether all workers have joined: others are candidates."""
        return bool(self._declarations) and self._declarations[0].agreed

    # Other pservers

    @property
    def _is_restored(self) -> bool:
        """Whether all workers of a job that goes on with other pservers have written what they had kept."""
        return sum(each.agreed for each in self._declarations) > _RESUMING

    @property
    def _goes_on_now(self) -> bool:
        """Whether all workers have just written what they had kept: the last declaration says so."""
        return self._roster.resumed is not None and len(self._declarations) == _RESUMING + 1

    @property
    def first_incarnation(self) -> str:
        """Of the job when it began, maybe with other pservers."""
        resumed = self._roster.resumed
        return self._roster.incarnation if resumed is None else resumed.incarnation

    @property
    def moving(self) -> int | None:
        """The generation of a job that has begun and goes on with other pservers; None: it does not."""
        with self._changed:
            begun = self.begun or self._roster.resumed is not None
            moves = begun and self._shard.config.outlives_pservers
            lost = moves and isinstance(self._failure, PserverLostError)
            return self._roster.view.generation if lost else None

    def is_of(self, incarnation: str) -> bool:
        """Whether `incarnation` is that of this job when it began, maybe with other pservers."""
        own = self.first_incarnation
        return bool(own) and hmac.compare_digest(own.encode(), incarnation.encode())

    def end_before(self, resumed: Resumed) -> None:
        """Ends, if this is the job that goes on as `resumed` with other pservers: not all its workers may know yet."""
        own = self._roster.resumed
        if self.is_of(resumed.incarnation) and (own is None or own.generation < resumed.generation):
            self.fail(PserverLostError(resumed.reason))

    def _remove_snapshots(self) -> None:
        """Removes those of tables: nobody needs them any more."""
        if folder := self._shard.config.snapshot_folder:
            try:
                remove_all_saves(Path(folder) / run_of(self.first_incarnation))
            except OSError as error:
                self._log(f"could not remove its snapshots in {folder}: {error}")

    def offer(self, address: str) -> None:
        """Tells the workers of a pserver that is to take part. UnsupportedError: they cannot go on with others."""
        with self._changed:
            self._raise_failure()
            if not self.begun or self.over:
                raise ConnectError("no job is under way there: give its workers the address when you start them")
            if not self._shard.config.outlives_pservers:
                raise UnsupportedError(
                    "a pserver can join a job with min_workers that updates on workers in mode='sync', or has "
                    f"snapshot_steps; its workers have min_workers={self._shard.config.min_workers}, "
                    f"mode={self._shard.config.mode!r}, update={self._shard.config.update!r} and "
                    f"snapshot_steps={self._shard.config.snapshot_steps}"
                )
            if not self._shard.config.snapshot_folder and (table := next(self._shard.tables(), None)):
                raise UnsupportedError(
                    f"a pserver can join a job with tables if it has snapshots of these (snapshot_folder); nothing but "
                    f"this pserver and those beside it has the rows of {table[0]!r}"
                )
            self._log(f"is offered pserver {address}")
            self._announce(Header(Kind.OFFER), address.encode())

    @property
    def addresses(self) -> Sequence[str]:
        """Of the pservers of a job under way that goes on with others than it began with; else none."""
        with self._changed:
            resumed = self._roster.resumed
            return () if resumed is None or self.over else resumed.pservers

    # Who is lost, and who joins

    def check_present(self, rank: int, uid: str) -> None:
        """Raises WorkerLostError if the others went on without worker `uid` of `rank`, which may not know that."""
        with self._changed:
            members = self._roster
            member = members.members.get(rank)
            if member is not None and uid not in ("", member.applicant.uid):
                raise WorkerLostError(f"the other workers went on without this one: {member} has its place")
            if rank in members.lost and member is None:
                raise WorkerLostError(f"the other workers went on without this one: {members.lost[rank]}")

    def is_current(self, rank: int, queue: SendQueue) -> bool:
        """Whether `queue` is that of `rank`: not of a worker that has been lost, whose last frames may come later."""
        return self._queues.get(rank) is queue

    def may_put(self, rank: int) -> bool:
        """Whether `rank` may be the first of those that are left, as far as it and this pserver know."""
        return rank == 0 or (self._shard.config.min_workers is not None and rank in self._roster.view.ranks)

    def wait_for_place(self, applicant: Applicant, timeout_s: float) -> None:
        """Waits while another worker has its rank in a job that goes on without lost ones: it may just be silent."""
        rank, members = applicant.rank, self._roster.members
        with self._changed:
            if applicant.resumed is None and self._roster.resumed is not None:  # its own workers come first
                self._changed.wait_for(lambda: self._roster.restored or self._failure is not None, timeout_s)
            if rank is None or not self.begun or self._shard.config.min_workers is None:
                return

            def is_free() -> bool:
                member = members.get(rank)
                return member is None or member.applicant.uid == applicant.uid or self._failure is not None

            self._changed.wait_for(is_free, min(timeout_s, SILENT_S + _NOTICED_S))

    def declared(self) -> dict[str, object]:
        """See DeclaredReply."""
        with self._changed:
            self._raise_failure()
            agreed = [each for each in self._declarations if each.agreed]
            return {
                "declarations": len(agreed),
                "buckets": [bucket_message(bucket.spec) for bucket in self._shard.buckets],
                "lines": [line for each in agreed for line in each.for_newcomers],
                "layouts": [layout_message(layout) for layout in self._layouts],
                "steps": [bucket.steps for bucket in self._shard.buckets],
            }

    def ready(self, rank: int, training: int) -> dict[str, object]:
        """The candidates that are ready, as `rank` is from now on if it is one; see ReadyRequest."""
        with self._changed:
            self._raise_failure()
            members = self._roster
            if rank in members.view.ranks:
                self._training = training
            elif rank in members.members and members.members[rank].ready != training:
                members.members[rank].ready = training
                self._announce(Header(Kind.READY))
            return {"candidates": members.candidates(training), "training": self._training}

    def admit(self, rank: int, candidates: Collection[int], timeout_s: float) -> dict[str, object]:
        """Returns who takes part once all ranks of the view have called it; see AdmitRequest."""
        with self._changed:
            self._raise_failure()
            admission = self._admission = self._admission or Admission(frozenset(candidates))
            if admission.candidates != frozenset(candidates):
                raise ProtocolError(
                    f"all ranks must admit the same candidates, got {sorted(candidates)} from rank {rank}, others "
                    f"{sorted(admission.candidates)}"
                )
            admission.called.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._admitted(admission) or self._failure is not None, timeout_s)
            self._raise_failure()
            if not admission.over:
                admission.called.discard(rank)
                names = ", ".join(map(self._roster.describe, set(self._roster.view.ranks) - admission.called))
                raise WaitTimeoutError(f"not come to the boundary at which others may join: {names}")
            return {"before": admission.before, "present": admission.present}

    def _admitted(self, admission: Admission) -> bool:
        if admission.over or not admission.called >= set(self._roster.view.ranks):
            return admission.over
        admission.before = self._roster.view.ranks
        view, effects = self._roster.admit(admission.candidates)
        if view.ranks != admission.before:
            self._shard.set_view(view)
            for _, item in self._shard.slices():
                item.change_view(view)  # nothing is under way
        admission.present = view.ranks
        self._execute(effects)
        admission.over, self._admission = True, None
        self._changed.notify_all()
        return True

    def _execute(self, effects: Iterable[roster.Effect]) -> list[Callable[[], object]]:
        """Executes effects of a change, with the lock; returns what comes after it, without the lock."""
        after: list[Callable[[], object]] = []
        for effect in effects:
            match effect:
                case roster.Log(what):
                    self._log(what)
                case roster.Tell(loss):
                    self._announce(Header(Kind.LOST, index=loss.rank, step=_STEPS[loss.how]), loss.why.encode())
                case roster.TellAdmitted(before, present):
                    # In the same stream as what tells of losses before and after, so that all come in their order.
                    frame = frames.encode_admitted(before, present)
                    for rank in present:
                        if rank in self._queues:
                            self._queues[rank].put_urgent(frame)
                case roster.Forget(rank, error):
                    self._memory.pop(rank, None)
                    after.append(functools.partial(self._queues.pop(rank).fail, error))
                    if (end := self._ends.pop(rank, None)) is not None:
                        after.append(end)
                case roster.Fail(error):
                    self.fail(error)
        self._changed.notify_all()
        return after

    def _lose(self, rank: int, why: str, how: How = How.LOST) -> bool:
        """Takes `rank` out, and lets the others go on, if the job can; else returns False."""
        with self._changed:
            before = self._roster.view
            if self._failure is not None or (change := self._roster.lose(rank, why, how)) is None:
                return False
            after = self._execute(change[1])
            if (changed := change[0] is not before) and (ended := self.recording.gone(rank)):
                self._announce(Header(Kind.TRACE, step=ended))
        for each in after:
            each()
        if changed:
            self._shard.bound.quiesce(rank, gone=True)
            self._change_view()
        return True

    def _leave_view(self, rank: int) -> None:
        with self._changed:
            self._execute(self._roster.leave(rank)[1])
        self._change_view()

    def _begin_without_missing(self) -> None:
        view, effects = self._roster.begin_without_missing()
        self._execute(effects)
        self._shard.set_view(view)

    def _change_view(self) -> None:
        """Lets what waits go on with the ranks of the view."""
        with self._changed:
            view = self._roster.view
            self._shard.set_view(view)
            buckets = list(enumerate(self._shard.buckets))
            self._changed.notify_all()
        try:
            for number, bucket in buckets:
                for index, item in list(bucket.slices.items()):
                    self._send(item.change_view(view, bucket.next))
                    self._hurry(number, item, index)
        except TfpsError as error:
            self.fail(error)
        self._release()

    def _tell_set(self, number: int, ranks: Collection[int]) -> None:
        """Tells all workers what a number in replies means: called within a slice's lock, so it takes no other."""
        frame = frames.encode_ranks(number, ranks)
        for queue in list(self._queues.values()):
            queue.put_urgent(frame)

    def _beat(self, late: bool) -> bool:
        """Sends a heartbeat to every worker, and loses those that are silent, unless this process was `late`."""
        if self._shard.config.min_workers is None:  # other workers have come, before anybody began
            return not self.over
        with self._changed:
            queues = {rank: queue for rank, queue in self._queues.items() if rank in self._roster.members}
        silent = []
        for rank, queue in queues.items():
            queue.put_urgent(frames.BEAT)
            silent_s = queue.silent_s(renew=late)
            if silent_s > SILENT_S and self._roster.members[rank].state is State.STREAMING:
                silent.append((rank, f"has been silent for {silent_s:.1f} s"))
        for rank, why in silent:
            if not self._lose(rank, why, How.SILENT) and self._failure is None and rank in self._roster.members:
                self.fail(WorkerLostError(f"{self._roster.describe(rank)} {why}"))
        config = self._shard.config
        if (error := self._roster.too_few(time.monotonic(), config.rejoin_timeout_s)) is not None:
            self.fail(error)
        return not self.over
