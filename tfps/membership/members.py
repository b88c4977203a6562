"""The members of a job, as one pserver sees them, and who may join. Decisions only: no I/O, no locks."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.errors import ConnectError, MismatchError
from tfps.membership.view import View

_MAX_TEXT = 256  # characters of a name that a worker sends
_MAX_PSERVERS = 4096
_MAX_CHANGES = 64  # that are kept
STREAM_GRACE_S = 30.0  # a member without a stream by then died between the calls


class State(enum.Enum):
    """Life cycle of a member."""

    JOINED = "joined"
    STREAMING = "streaming"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a job is that goes on with other pservers; see Resumed in tfps.proto."""

    incarnation: str  # of the job when it began
    generation: int
    ranks: tuple[int, ...]
    pservers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Applicant:
    """A worker that asks to join; see JoinRequest in tfps.proto. ConnectError: a name or the pservers cannot be."""

    job: str
    rank: int | None
    workers: int  # 0: unknown
    uid: str
    host: str
    pid: int
    pserver_index: int
    pservers: int
    incarnation: str  # empty for the first pserver of the list
    settings: Mapping[str, object] = field(default_factory=dict)
    resumed: Resumed | None = None  # a job that its workers begin anew

    def __post_init__(self) -> None:
        for name in ("job", "uid", "host", "incarnation"):
            text = getattr(self, name)
            if len(text) > _MAX_TEXT or not all(map(str.isprintable, text)):
                raise ConnectError(
                    f"{name} of a worker must be at most {_MAX_TEXT} printable characters, got {len(text)}: "
                    f"{text[:40]!a}"
                )
        if not 1 <= self.pservers <= _MAX_PSERVERS or not 0 <= self.pserver_index < self.pservers:
            raise ConnectError(
                f"a job must have 1 to {_MAX_PSERVERS} pservers and this one be one of them, got {self.pservers} "
                f"pservers and number {self.pserver_index + 1}"
            )

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@dataclass(slots=True)
class Member:
    """A worker that has joined."""

    rank: int
    applicant: Applicant
    joined_s: float
    state: State = State.JOINED
    streams: set[str] = field(default_factory=set)  # those opened: "Push", "Pull"
    ended: int = 0  # how many of them have ended
    step: int = 0  # the highest pushed
    ready: int = 0  # of a candidate: the training that it may be admitted to
    wait_s: float = 0.0  # sum over slices of its delay after the first rank's push
    reason: str = ""  # why it has left, if it said so

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.applicant})"


class Members:
    """The members of one job. The first to join sets what the others must match."""

    def __init__(self, view: View, job: str = "") -> None:
        self.view = view  # who is to take part; its pservers are known once the first worker has joined
        self.incarnation = ""
        self.members: dict[int, Member] = {}
        self.lost: dict[int, str] = {}  # what became of those that the others went on without, by rank
        self.changes: deque[str] = deque(maxlen=_MAX_CHANGES)  # of the view, with their reasons
        self.left, self.joined = 0, 0  # how many the others went on without, and how many came to a job under way
        self._job = job
        self.resumed: Resumed | None = None  # what the job is if it goes on with other pservers

    def join(self, applicant: Applicant, now_s: float) -> Member:
        """Adds `applicant` as a member; a repeated call returns the same member.

        ConnectError: it does not belong here. MismatchError: its settings differ from those of the other members.
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
        rank = self._rank_for(applicant)
        if not self.members:
            self.incarnation = applicant.incarnation or secrets.token_hex(16)
            self.view = dataclasses.replace(self.view, pservers=tuple(range(applicant.pservers)))
            if (resumed := applicant.resumed) is not None:
                self._resume(resumed)
        self.members[rank] = Member(rank, applicant, now_s)
        return self.members[rank]

    def _resume(self, resumed: Resumed) -> None:
        """Has the view of a job that goes on with other pservers."""
        self.resumed = resumed
        self.view = dataclasses.replace(self.view, generation=resumed.generation, ranks=resumed.ranks)
        self.changes.append(f"view {resumed.generation}: {resumed.reason}; goes on with {', '.join(resumed.pservers)}")
        for rank in set(range(self.view.workers)).difference(resumed.ranks):
            self.lost[rank] = f"rank {rank} was lost before the pservers changed"

    def candidates(self, training: int) -> list[int]:
        """Ranks of those that have joined a job under way and may be admitted to this training."""
        return [
            rank
            for rank, member in sorted(self.members.items())
            if rank not in self.view.ranks and member.ready == training and member.state is State.STREAMING
        ]

    def admit(self, ranks: Collection[int]) -> None:
        """Lets candidates take part."""
        self.view = self.view.next(joined=ranks)
        for rank in ranks:
            self.lost.pop(rank, None)
            self.joined += 1
            self.changes.append(f"view {self.view.generation}: {self.members[rank]} has joined")

    def describe(self, rank: int) -> str:
        """`rank 1 (host:pid)`, for messages."""
        return str(self.members.get(rank, f"rank {rank} (not joined)"))

    def not_streaming(self) -> list[int]:
        """Ranks that have not fully joined, or are gone."""
        streaming = {rank for rank, member in self.members.items() if member.state is State.STREAMING}
        return [rank for rank in self.view.ranks if rank not in streaming]

    def gone(self) -> list[int]:
        """Ranks that have left or died, and without which the others cannot go on."""
        return [rank for rank in self.view.ranks if rank in self.members and self.members[rank].state is State.GONE]

    def lose(self, rank: int, why: str) -> None:
        """Takes `rank` out, which is a member and not the last one: the others go on without it."""
        self.view = self.view.next(left=[rank])
        self.lost[rank] = f"{self.members.pop(rank)} {why}"
        self.left += 1
        self.changes.append(f"view {self.view.generation}: {self.lost[rank]}")

    def part(self, rank: int) -> None:
        """Lets `rank` leave, which takes part no more but is still known, as its streams have not ended."""
        if len(self.view.ranks) > 1:
            self.view = self.view.next(left=[rank])

    @property
    def ending(self) -> bool:
        """Whether some members are gone and others not."""
        return 0 < self._left < len(self.members)

    @property
    def _left(self) -> int:
        return sum(member.state is State.GONE for member in self.members.values())

    @property
    def over(self) -> bool:
        """Whether there were members and all are gone."""
        return bool(self.members) and self._left == len(self.members)

    def _check_job(self, new: Applicant) -> None:
        if new.workers and new.workers != self.view.workers:
            raise ConnectError(
                f"the pserver was started with --workers {self.view.workers}, this worker expects {new.workers}; "
                "start both with the same number"
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

    def _rank_for(self, new: Applicant) -> int:
        if new.rank is None:
            for rank in range(self.view.workers):
                if rank not in self.members:
                    return rank
            raise ConnectError(
                f"all {self.view.workers} ranks of the job are taken ({', '.join(map(str, self.members.values()))}); "
                "start the pserver with a larger --workers, or give another job pservers of its own"
            )
        if not 0 <= new.rank < (workers := self.view.workers):
            raise ConnectError(f"rank must be from 0 to {workers - 1} (--workers {workers}), got {new.rank}")
        if new.rank in self.members:
            raise ConnectError(
                f"two workers have rank {new.rank}: {self.members[new.rank].applicant} and {new} (this one); "
                "give every worker a rank of its own, and every job pservers of its own"
            )
        return new.rank


def first_difference(lines: Mapping[int, Sequence[str]], describe: Callable[[int], str]) -> str | None:
    """Describes the first difference between the ranks' declarations; None if they are equal."""
    ranks = sorted(lines)
    for number, texts in enumerate(itertools.zip_longest(*map(lines.__getitem__, ranks), fillvalue="nothing"), 1):
        if len(set(texts)) > 1:
            each = "; ".join(f"{describe(rank)} has {text}" for rank, text in zip(ranks, texts, strict=True))
            return (
                f"the workers do not train the same, line {number} of what they declare differs: {each}; every rank "
                "must run the same program: the same calls of fit, evaluate and the like in the same order"
            )
    return None
