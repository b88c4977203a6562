"""Who takes part in a job, as one pserver sees it, and what follows when that changes. Decisions: no I/O, no locks.

Each change returns the next view and its effects, which the pserver's `Job` executes, in this order. The reason of a
loss is a value (`Loss`): logs, statuses, frames and errors say it alike.

Tested in tests/membership/test_members.py, tests/membership/test_machine_of_roster.py and
tests/worker/test_lost_workers.py.
"""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tfps.errors import (
    ConnectError,
    JoinError,
    MismatchError,
    PserverLostError,
    TfpsError,
    WaitTimeoutError,
    WorkerLostError,
)
from tfps.membership.members import STREAM_GRACE_S, Applicant, Member, Resumed, State, Trial
from tfps.membership.view import View

_MAX_CHANGES = 64  # that are kept


class How(enum.Enum):
    """What is known of a worker that takes part no more."""

    LOST = "lost"  # it has died, or given up
    SUSPECTED = "suspected"  # it has been silent, and may be alive
    ENDED = "ended"  # its program has ended


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker takes part no more, and why."""

    rank: int
    how: How
    why: str  # "rank 1 (host1:4711) died at step 346: ..."


@dataclass(frozen=True, slots=True)
class Log:
    """Say so in the log of the pserver."""

    what: str


@dataclass(frozen=True, slots=True)
class Notify:
    """Notify all members of a loss."""

    loss: Loss


@dataclass(frozen=True, slots=True)
class NotifyAdmitted:
    """Notify all who are `present` from now on; `before`: who took part until now."""

    before: tuple[int, ...]
    present: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """A rank is no member any more: its streams end with `error`."""

    rank: int
    error: TfpsError


@dataclass(frozen=True, slots=True)
class Fail:
    """The job fails."""

    error: TfpsError


Effect = Log | Notify | NotifyAdmitted | Forget | Fail
Change = tuple[View, Sequence[Effect]]


class Roster:
    """The members of one job, and who of them takes part. The first to join sets what the others must match.

    `least`: how many workers the job needs; None: it ends with the first that is lost.
    """

    def __init__(self, view: View, job: str = "") -> None:
        self.view = view  # who is to take part; its pservers and bound are known once the first worker has joined
        self.started = len(view.ranks)  # the number of workers with which the job begins
        self.incarnation = ""
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}  # why nobody has a rank: what became of those that the others went on without
        self.ends: dict[int, TfpsError] = {}  # by rank: with what the last one ends that the others went on without
        self.changes: deque[str] = deque(maxlen=_MAX_CHANGES)  # of the view, with their reasons
        self.left, self.joined = 0, 0  # how many the others went on without, and how many came to a job under way
        self._job = job
        self.resumed: Resumed | None = None  # what the job is if it goes on with other pservers
        self.least: int | None = None
        self.begun = False  # all have joined, here or at the first pserver: who is lost from now on is missed
        self.takes_joiners = False  # all have joined here: others are joiners
        self.restored = False  # of a job that was resumed: all have written what they had kept
        self._few_since_s: float | None = None  # since when fewer than `least` have been left

    def join(self, applicant: Applicant, now_s: float) -> Member:
        """Adds `applicant` as a member; a repeated call returns the same member.

        ConnectError: it does not belong here. MismatchError: its settings differ from those of the other members.
        ConfigError: they allow fewer workers than the job begins with. WaitTimeoutError: it may join once the job has
        begun.
        """
        for rank, member in list(self.members.items()):
            if member.state is State.JOINED and not member.streams and now_s - member.joined_s > STREAM_GRACE_S:
                del self.members[rank]
        self._check_job(applicant)
        for member in self.members.values():
            if member.applicant.uid == applicant.uid:
                return member
        for member in list(self.members.values())[:1]:  # the others match the first
            for name, theirs in member.applicant.settings.items():
                if (ours := applicant.settings.get(name)) != theirs:
                    raise MismatchError(
                        f"{name} must be the same on all workers: {member} has {theirs!r}, this worker {ours!r}"
                    )
        first = not self.members
        if first:
            self.view = View.first(self.started, applicant.pservers, applicant.most)
            self.lost = {rank: f"rank {rank} has not come yet" for rank in sorted(self.view.free)}
            if (resumed := applicant.resumed) is not None:
                self._resume(resumed)
        rank = self._rank_for(applicant)
        if first:
            self.incarnation = applicant.incarnation or secrets.token_hex(16)
        if rank in self.view.ranks:
            self.lost.pop(rank, None)  # another one had it before the job began
        self.members[rank] = Member(rank, applicant, now_s)
        self.ends.pop(rank, None)
        return self.members[rank]

    def _resume(self, resumed: Resumed) -> None:
        """Has the view of a job that goes on with other pservers."""
        self.resumed = resumed
        self.view = dataclasses.replace(self.view, generation=resumed.generation, ranks=resumed.ranks)
        self.changes.append(f"view {resumed.generation}: {resumed.reason}; goes on with {', '.join(resumed.pservers)}")
        self.lost = {rank: f"rank {rank} took no part when the pservers changed" for rank in sorted(self.view.free)}

    def joiners(self, training: int) -> list[int]:
        """Ranks of those that have joined a job under way and may be admitted to this training."""
        return [
            rank
            for rank, member in sorted(self.members.items())
            if rank not in self.view.ranks and member.ready == training and self._streams(rank)
        ]

    def describe(self, rank: int) -> str:
        """`rank 1 (host:pid)`, for messages."""
        return str(self.members.get(rank, f"rank {rank} (not joined)"))

    def not_streaming(self) -> list[int]:
        """Ranks that have not fully joined, or have departed."""
        streaming = {rank for rank, member in self.members.items() if member.state is State.STREAMING}
        return [rank for rank in self.view.ranks if rank not in streaming]

    def departed(self) -> list[int]:
        """Ranks that have left or died, and without which the others cannot go on."""
        return [rank for rank in self.view.ranks if rank in self.members and self.members[rank].state is State.DEPARTED]

    def too_late(self) -> list[int]:
        """Ranks of joining workers that nobody can let in: all who took part are gone."""
        here = [rank for rank, member in self.members.items() if member.state is not State.DEPARTED]
        return [] if not self.takes_joiners or set(here) & set(self.view.ranks) else here

    def on_trial(self) -> set[int]:
        """Ranks that the others have let in and that have not taken a step yet: what they do wrong ends them alone."""
        return {rank for rank in self.view.ranks if rank in self.members and self.members[rank].trial is not None}

    def end_trials(self) -> None:
        """A step of all is done. Called for each slice, without a lock."""
        for member in list(self.members.values()):
            member.trial = None

    def overdue(self, awaited: Collection[int], now_s: float) -> list[int]:
        """Ranks on trial that have held those who wait for the `awaited` for too long; to be asked every now and then.

        Also ends trials that are over.
        """
        found = []
        for rank in sorted(self.on_trial()):
            member = self.members[rank]
            if (trial := member.trial) is None:  # its first step has come just now
                continue
            if trial.is_overdue(member.step, rank in awaited, now_s):
                found.append(rank)
            if trial.is_over(now_s):
                member.trial = None
        return found

    # Changes

    def goes_on(self, fewer: int = 0) -> bool:
        """Whether the job goes on with so many workers `fewer`, at least for a while; see `too_few`."""
        return self.least is not None and len(self.view.ranks) > fewer

    def lose(self, rank: int, why: str, how: How = How.LOST) -> Change | None:
        """`rank` is lost: the others go on without it. None: there is no such member any more, or they cannot."""
        if (member := self.members.get(rank)) is None or member.state is State.DEPARTED:
            return None
        if rank not in self.view.ranks:
            del self.members[rank]
            self.changes.append(f"view {self.view.generation}: {member}, which has not taken part yet, {why}")
            return self.view, [
                Log(f"has lost a joining worker: {member} {why}"),
                Forget(rank, WorkerLostError(f"this joining worker {why}")),
            ]
        if self.resumed is not None and not self.restored:  # its workers meet again
            return self.view, [Fail(PserverLostError(f"the job did not go on with these pservers: {member} {why}"))]
        if not self.goes_on(1):
            return None
        loss = self._remove(rank, how, why)
        error: TfpsError = WorkerLostError(f"the other workers went on without this one: {loss.why}")
        if member.trial is not None and how is not How.SUSPECTED:
            error = JoinError.because(loss.why)
        self.ends[rank] = error
        forget = Forget(rank, error)
        if not self.begun:
            self.view = View.first(self.started, len(self.view.pservers), self.view.workers)
            return self.view, [forget, Log(f"has not begun: {loss.why}; another worker may join in its place")]
        return self.view, [forget, Log(f"goes on with {len(self.view.ranks)} workers: {loss.why}"), Notify(loss)]

    def _remove(self, rank: int, how: How, why: str) -> Loss:
        self.view = self.view.next(left=[rank])
        loss = Loss(rank, how, f"{self.members.pop(rank)} {why}")
        self.lost[rank] = loss.why
        self.left += 1
        self.changes.append(f"view {self.view.generation}: {loss.why}")
        return loss

    def leave(self, rank: int) -> Change:
        """`rank` takes part no more, as its program has ended; it is still known, as its streams have not ended."""
        if not self.goes_on(1):
            return self.view, []
        self.view = self.view.next(left=[rank])
        return self.view, [Notify(Loss(rank, How.ENDED, f"{self.members[rank]} has left"))]

    def admit(self, joiners: Collection[int], now_s: float, limit_s: float) -> Change:
        """Those of `joiners` that are there take part from now on, on trial until they take a step."""
        before, here = self.view.ranks, [r for r in sorted(joiners) if self._streams(r)]
        if here:
            self.view = self.view.next(joined=here)
        effects: list[Effect] = []
        for rank in here:
            self.lost.pop(rank, None)
            self.joined += 1
            self.members[rank].trial = Trial(limit_s, now_s, now_s)
            self.changes.append(f"view {self.view.generation}: {self.members[rank]} has joined")
            effects.append(Log(f"goes on with {len(self.view.ranks)} workers: {self.members[rank]} takes part"))
        return self.view, [*effects, NotifyAdmitted(before, self.view.ranks)]

    def begin_without_missing(self) -> Change:
        """All ranks had joined the first pserver: those that are not here have been lost since, and do not come."""
        self.begun, effects = True, list[Effect]()
        for rank in sorted(set(self.view.ranks).difference(self.members)):
            if self.goes_on(1):
                self.view = self.view.next(left=[rank])
                self.lost[rank] = f"rank {rank} was lost as the job began"
                effects.append(Log(f"begins with {len(self.view.ranks)} workers: {self.lost[rank]}"))
        return self.view, effects

    def too_few(self, now_s: float, limit_s: float) -> WorkerLostError | None:
        """Why the job ends, if fewer than `least` are left and others have not joined within `limit_s`."""
        left, least = self.view.workers - len(self.lost), self.least or 0
        if left >= least:
            self._few_since_s = None
            return None
        self._few_since_s = since_s = now_s if self._few_since_s is None else self._few_since_s
        if now_s - since_s < limit_s:
            return None
        return WorkerLostError(
            f"{left} of {self.view.workers} workers are left, fewer than min_workers={least}, and no other has joined "
            f"within {limit_s:.3g} s (rejoin_timeout_s): {'; '.join(self.lost.values())}"
        )

    def _streams(self, rank: int) -> bool:
        return rank in self.members and self.members[rank].state is State.STREAMING

    @property
    def ending(self) -> bool:
        """Whether some members have departed and others not."""
        return 0 < self._left < len(self.members)

    @property
    def _left(self) -> int:
        return sum(member.state is State.DEPARTED for member in self.members.values())

    @property
    def over(self) -> bool:
        """Whether there were members and all have departed."""
        return bool(self.members) and self._left == len(self.members)

    def _check_job(self, new: Applicant) -> None:
        if new.workers and new.workers != self.started:
            more = "" if new.workers < self.started else "; max_workers (TFPS_MAX_WORKERS) lets others join later"
            raise ConnectError(
                f"the pserver was started with --workers {self.started}, this worker expects {new.workers}; "
                f"start both with the same number{more}"
            )
        if self._job and new.job != self._job:
            raise ConnectError(f"the pserver serves only job {self._job!r} (--job), this worker belongs to {new.job!r}")
        if not self.members:
            if new.pserver_index and not new.incarnation:
                raise ConnectError(
                    "a worker must join the first pserver of its list first, this one came without an incarnation"
                )
            return
        first = next(iter(self.members.values()))
        theirs, ours = first.applicant, (new.pserver_index, new.pservers)
        if ours != (theirs.pserver_index, theirs.pservers):
            raise ConnectError(
                f"the lists of pservers differ: this pserver is number {theirs.pserver_index + 1} of {theirs.pservers} "
                f"for {first} and number {ours[0] + 1} of {ours[1]} for this worker; give all workers of a job the "
                "same list, and every job pservers of its own"
            )
        if new.resumed is not None and new.resumed != self.resumed:
            raise ConnectError(
                f"the pserver has a job already, and cannot go on with another one ({new.resumed.reason})"
            )
        if new.job != theirs.job or (new.pserver_index and new.incarnation != self.incarnation):
            raise ConnectError(
                f"the pserver is used by another job {theirs.job!r} (its workers: "
                f"{', '.join(map(str, self.members.values()))}); wait for its end or give this job pservers of its own"
            )

    def _too_early(self, rank: int) -> WaitTimeoutError:
        missing = [f"{each}" for each in self.view.ranks if each not in self.members]
        why = f"start those that are missing: {', '.join(missing)}" if missing else "they are about to"
        return WaitTimeoutError(
            f"rank {rank} joins the job once the {self.started} workers of its start have begun it (--workers); {why}"
        )

    def _rank_for(self, new: Applicant) -> int:
        workers, grows = self.view.workers, self.view.workers > self.started
        bound = f"max_workers={workers}" if grows else f"--workers {workers}"
        rank = new.rank
        if rank is None:
            rank = next((each for each in range(workers) if each not in self.members), None)
        if rank is None:
            raise ConnectError(
                f"all {workers} ranks of the job are taken ({', '.join(map(str, self.members.values()))}); "
                f"start {'the job with a larger max_workers' if grows else 'the pserver with a larger --workers'}, or "
                "give another job pservers of its own"
            )
        if not 0 <= rank < workers:
            raise ConnectError(
                f"rank must be from 0 to {workers - 1} ({bound}), got {rank}; for more workers than at the start, "
                f"start the job with {'a larger max_workers' if grows else 'max_workers'} (TFPS_MAX_WORKERS)"
            )
        if grows and rank not in self.view.ranks and not self.takes_joiners and self.resumed is None:
            raise self._too_early(rank)
        if rank in self.members:
            raise ConnectError(
                f"two workers have rank {rank}: {self.members[rank].applicant} and {new} (this one); "
                "give every worker a rank of its own, and every job pservers of its own"
            )
        return rank
