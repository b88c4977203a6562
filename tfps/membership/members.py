"""A worker as one pserver sees it, before and after it has joined. Values only: no I/O, no locks."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfps.errors import ConnectError

_MAX_TEXT = 256  # characters of a name that a worker sends
_MAX_PSERVERS = 4096
STREAM_GRACE_S = 30.0  # a member without a stream by then died between the calls
_HELD = 0.1  # of the time for a step, which a worker on trial may hold the others


class State(enum.Enum):
    """Life cycle of a member."""

    JOINED = "joined"
    STREAMING = "streaming"
    DEPARTED = "departed"


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

    @property
    def most(self) -> int | None:
        """How many workers its job may have; None: no more than at the start."""
        most = self.settings.get("max_workers")
        return most if isinstance(most, int) and most else None

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}"


@dataclass(slots=True)
class Trial:
    """Of a worker that others have let in: until its first step they wait for it for a while only.

    Args:
        limit_s: for a step of all. A pserver without its gradients sees none: there the trial is over by then.
        since_s: when it had pushed something, or nobody waited for it.
        step: the highest pushed then.
    """

    limit_s: float
    begun_s: float
    since_s: float
    step: int = 0

    def is_overdue(self, step: int, awaited: bool, now_s: float) -> bool:
        """Whether others have waited for too long while it pushes nothing; to be asked every now and then."""
        if not awaited or step != self.step:
            self.since_s, self.step = now_s, step
        return now_s - self.since_s > _HELD * self.limit_s

    def is_over(self, now_s: float) -> bool:
        return now_s - self.begun_s > self.limit_s


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
    ready: int = 0  # of a joining worker: the training that it may be admitted to
    wait_s: float = 0.0  # sum over slices of its delay after the first rank's push
    reason: str = ""  # why it has left, if it said so
    busy: str = ""  # what it does that others may wait for, if it said so
    received: tuple[int, ...] = ()  # how many results of each bucket it has, as far as it has said
    trial: Trial | None = None  # it was let in to a job under way, and has not taken a step yet

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.applicant})"


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
