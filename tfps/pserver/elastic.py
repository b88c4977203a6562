"""What becomes of a job on one pserver whose workers are lost or leave, and who joins it (Config.min_workers).

Tested in tests/worker/test_lost_workers.py, tests/worker/test_newcomers.py and tests/worker/test_joining_again.py.
"""

from __future__ import annotations

import abc
import hmac
import threading
import time
from collections.abc import Callable, Collection, Sequence
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
from tfps.membership.members import Applicant, Members, Resumed, State
from tfps.membership.view import View, run_of
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
    _membership: Members
    _shard: Shard
    _queues: dict[int, SendQueue]
    _memory: dict[int, Attached]
    _ends: dict[int, Callable[[], object]]
    _declarations: list[Declaration]
    _failure: TfpsError | None

    def __init__(self) -> None:
        self._layouts: list[Layout] = []  # as tuned
        self._admission: Admission | None = None  # under way
        self._few_since_s: float | None = None  # since when fewer than min_workers have been left
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

    @property
    def _is_resumed(self) -> bool:
        """Whether all workers of a job that goes on with other pservers have written what they had kept."""
        return sum(each.agreed for each in self._declarations) > _RESUMING

    # Other pservers

    @property
    def _goes_on_now(self) -> bool:
        """Whether all workers have just written what they had kept: the last declaration says so."""
        return self._membership.resumed is not None and len(self._declarations) == _RESUMING + 1

    @property
    def first_incarnation(self) -> str:
        """Of the job when it began, maybe with other pservers."""
        resumed = self._membership.resumed
        return self._membership.incarnation if resumed is None else resumed.incarnation

    @property
    def moving(self) -> int | None:
        """The generation of a job that has begun and goes on with other pservers; None: it does not."""
        with self._changed:
            begun = self.begun or self._membership.resumed is not None
            moves = begun and self._shard.config.outlives_pservers
            lost = moves and isinstance(self._failure, PserverLostError)
            return self._membership.view.generation if lost else None

    def is_of(self, incarnation: str) -> bool:
        """Whether `incarnation` is that of this job when it began, maybe with other pservers."""
        own = self.first_incarnation
        return bool(own) and hmac.compare_digest(own.encode(), incarnation.encode())

    def end_before(self, resumed: Resumed) -> None:
        """Ends, if this is the job that goes on as `resumed` with other pservers: not all its workers may know yet."""
        own = self._membership.resumed
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
            resumed = self._membership.resumed
            return () if resumed is None or self.over else resumed.pservers

    # Who is lost, and who joins

    def check_present(self, rank: int, uid: str) -> None:
        """Raises WorkerLostError if the others went on without worker `uid` of `rank`, which may not know that."""
        with self._changed:
            members = self._membership
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
        return rank == 0 or (self._shard.config.min_workers is not None and rank in self._membership.view.ranks)

    def wait_for_place(self, applicant: Applicant, timeout_s: float) -> None:
        """Waits while another worker has its rank in a job that goes on without lost ones: it may just be silent."""
        rank, members = applicant.rank, self._membership.members
        with self._changed:
            if applicant.resumed is None and self._membership.resumed is not None:  # its own workers come first
                self._changed.wait_for(lambda: self._is_resumed or self._failure is not None, timeout_s)
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
            members = self._membership
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
                names = ", ".join(map(self._membership.describe, set(self._membership.view.ranks) - admission.called))
                raise WaitTimeoutError(f"not come to the boundary at which others may join: {names}")
            return {"before": admission.before, "present": admission.present}

    def _admitted(self, admission: Admission) -> bool:
        if admission.over or not admission.called >= set(self._membership.view.ranks):
            return admission.over
        members, admission.before = self._membership.members, self._membership.view.ranks
        here = [r for r in admission.candidates if r in members and members[r].state is State.STREAMING]
        if here:
            self._membership.admit(here)
            view = self._membership.view
            self._shard.set_view(view)
            for _, item in self._shard.slices():
                item.change_view(view)  # nothing is under way
            for rank in here:
                self._log(f"goes on with {len(view.ranks)} workers: {members[rank]} takes part")
        admission.present = self._membership.view.ranks
        # In the same stream as what tells of losses before and after, so that all come in their order.
        frame = frames.encode_admitted(admission.before, admission.present)
        for rank in admission.present:
            if rank in self._queues:
                self._queues[rank].put_urgent(frame)
        admission.over, self._admission = True, None
        self._changed.notify_all()
        return True

    def _goes_on(self, fewer: int = 0) -> bool:
        """Whether the job goes on with so many workers `fewer`, at least for a while; see `_wait_for_others`."""
        return self._shard.config.min_workers is not None and len(self._membership.view.ranks) > fewer

    def _wait_for_others(self) -> None:
        """Ends the job if fewer than `min_workers` are left and others have not joined in time."""
        config, lost = self._shard.config, self._membership.lost
        workers, least = self._membership.view.workers, config.min_workers or 0
        if workers - len(lost) >= least:
            self._few_since_s = None
            return
        now_s = time.monotonic()
        self._few_since_s = since_s = now_s if self._few_since_s is None else self._few_since_s
        if now_s - since_s >= config.rejoin_timeout_s:
            self.fail(
                WorkerLostError(
                    f"{workers - len(lost)} of {workers} workers are left, fewer than min_workers={least}, and no "
                    f"other has joined within {config.rejoin_timeout_s:.3g} s (rejoin_timeout_s): "
                    f"{'; '.join(lost.values())}"
                )
            )

    def _lose(self, rank: int, why: str, silent: bool = False) -> bool:
        """Takes `rank` out, which may be alive if it is `silent`, and lets the others go on, if the job can; else
        returns False.
        """
        with self._changed:
            member = self._membership.members.get(rank)
            if member is None or member.state is State.GONE or self._failure is not None:
                return False
            if self._membership.resumed is not None and not self._is_resumed:
                self.fail(PserverLostError(f"the job did not go on with these pservers: {member} {why}"))
                return True  # its workers meet again
            if rank not in self._membership.view.ranks:
                self._drop_candidate(rank, why)
                return True
            if not self._goes_on(1):
                return False
            self._membership.lose(rank, why)
            self._memory.pop(rank, None)
            queue, end = self._queues.pop(rank), self._ends.pop(rank, None)
            if not self._begun_elsewhere and not self.begun:
                self._membership.view = View.first(self._membership.view.workers, len(self._membership.view.pservers))
                self._log(f"has not begun: {member} {why}; another worker may join in its place")
            else:
                self._log(f"goes on with {len(self._membership.view.ranks)} workers: {member} {why}")
                how = frames.SILENT if silent else 0
                self._announce(Header(Kind.LOST, index=rank, step=how), f"{member} {why}".encode())
            if ended := self.recording.gone(rank):
                self._announce(Header(Kind.TRACE, step=ended))
        queue.fail(WorkerLostError(f"the other workers went on without this one: {member} {why}"))
        if end is not None:
            end()
        self._shard.bound.quiesce(rank, gone=True)
        self._change_view()
        return True

    @property
    def _begun_elsewhere(self) -> bool:
        """Whether the first pserver has seen all ranks join: only then do they declare anything on the others."""
        return bool(self._shard.index and self._declarations)

    def _begin_without_missing(self) -> None:
        """The first pserver has seen all ranks join; those that are not here have been lost since, and do not come."""
        for rank in set(self._membership.view.ranks).difference(self._membership.members):
            if self._goes_on(1):
                self._membership.part(rank)
                self._membership.lost[rank] = f"rank {rank} was lost as the job began"
                self._log(f"begins with {len(self._membership.view.ranks)} workers: {self._membership.lost[rank]}")
        self._shard.set_view(self._membership.view)

    def _drop_candidate(self, rank: int, why: str) -> None:
        self._log(f"has a candidate less: {self._membership.members.pop(rank)} {why}")
        self._memory.pop(rank, None)
        self._ends.pop(rank, lambda: None)()
        self._queues.pop(rank).fail(WorkerLostError(f"this candidate {why}"))
        self._changed.notify_all()

    def _change_view(self) -> None:
        """Lets what waits go on with the ranks of the view."""
        with self._changed:
            view = self._membership.view
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
            queues = {rank: queue for rank, queue in self._queues.items() if rank in self._membership.members}
        silent = []
        for rank, queue in queues.items():
            queue.put_urgent(frames.BEAT)
            silent_s = queue.silent_s(renew=late)
            if silent_s > SILENT_S and self._membership.members[rank].state is State.STREAMING:
                silent.append((rank, f"has been silent for {silent_s:.1f} s"))
        for rank, why in silent:
            if not self._lose(rank, why, silent=True) and self._failure is None and rank in self._membership.members:
                self.fail(WorkerLostError(f"{self._membership.describe(rank)} {why}"))
        self._wait_for_others()
        return not self.over
