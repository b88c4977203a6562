"""What a worker does when a pserver is lost or joins: a state machine without threads, sockets, clocks or locks.

`Recovery.step` takes an event and returns effects: what is to be done, in this order. Who executes them
(`Reconfiguration`) tells how they ended by further events. So every order of events is a text that a test can run.

A worker has one **session** (a `Worker` with one set of pservers) after the other, which have numbers from 0 on. What
pservers lose with a session is made good in this order, and each step may fail and begin again:

    RUNNING -- Failed --> RENDEZVOUS -- Decided --> RESTORING -- Restored --> REPLAYING -- CaughtUp --> RUNNING

Anything ends at ENDED. A worker that has asked to join, and takes no part yet, asks again instead of meeting others.

Tested in tests/recovery/test_machine.py, by the texts in tests/recovery/scenarios.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from tfps.errors import ClosedError, ConnectError, PserverLostError, TfpsError, WaitTimeoutError, WorkerLostError
from tfps.protos import tfps_pb2 as pb

# The job may go on in another attempt.
LATER = (ClosedError, ConnectError, PserverLostError, WaitTimeoutError)
_SAID_S = 10.0  # between log lines of a wait


class Phase(enum.Enum):
    """Where a worker is; docs/design.md has the picture."""

    RUNNING = "running"
    RENDEZVOUS = "rendezvous"  # it looks for the other workers, which agree with what the job goes on
    RESTORING = "restoring"  # it joins the pservers on which all have agreed, and writes what these have to keep
    REPLAYING = "replaying"  # its program may go on; pservers do not have all pushes that were answered, yet
    ENDED = "ended"  # it has failed or was closed

    @property
    def reconfigures(self) -> bool:
        """Whether there is no session that counts."""
        return self in (Phase.RENDEZVOUS, Phase.RESTORING)

    @property
    def pauses(self) -> bool:
        """Whether what pservers keep cannot be asked for."""
        return self.reconfigures or self is Phase.REPLAYING


@dataclass(frozen=True, slots=True)
class Failed:
    """A session has failed at `now_s`; `recoverable`: the job can go on with other pservers."""

    session: int
    error: TfpsError
    recoverable: bool
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decided:
    """The workers have met, and this is what they agree on."""

    decision: pb.Decision


@dataclass(frozen=True, slots=True)
class Connected:
    """A session has joined its pservers."""

    session: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A session has all that pservers keep, but pushes of the buckets `to_replay`."""

    session: int
    to_replay: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Missed:
    """An attempt to go on has ended with `error`."""

    error: TfpsError
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A push of a bucket that needs replay has been answered; pushes of `ranks` are in it."""

    session: int
    bucket: int
    ranks: tuple[int, ...]
    again: bool  # whether the program has had a reply to it before
    name: str = ""  # of the bucket


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All pushes of a bucket have been given, and those answered again that had been."""

    session: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Offered:
    """A pserver wants to take part."""

    address: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Workers have all that pservers keep, so that others may take part. `known`: that one does already."""

    session: int
    address: str
    known: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """This worker, which had asked to join, takes part from now on."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The program, or what executes effects, has failed."""

    error: TfpsError


@dataclass(frozen=True, slots=True)
class Closed:
    """The program has ended: others may still need what this worker keeps."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Others have had their time."""


Event = (
    Failed
    | Decided
    | Connected
    | Restored
    | Missed
    | Answered
    | CaughtUp
    | Offered
    | Settled
    | Joined
    | Broken
    | Closed
    | TimedOut
)


@dataclass(frozen=True, slots=True)
class Leave:
    """Nothing that comes from this session counts any more."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the others what this worker has, and wait for what all agree on: `Decided` or `Missed` follows."""

    generation: int | None  # of the view on which all agreed last; None: that of the session that has failed
    reason: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Begin a session: `Connected` or `Missed` follows. Without a `decision` this worker asks to join."""

    session: int
    decision: pb.Decision | None


@dataclass(frozen=True, slots=True)
class Write:
    """Give a session this worker's part of what pservers keep: `Restored` or `Missed` follows."""

    session: int
    decision: pb.Decision | None


@dataclass(frozen=True, slots=True)
class Use:
    """All that is pushed or asked for goes to this session, but for buckets that need replay."""

    session: int


@dataclass(frozen=True, slots=True)
class Give:
    """Give the next push of a bucket that needs replay, if none is under way: `Answered` or `CaughtUp` follows."""

    session: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer pushes whose replies another worker had."""

    session: int


@dataclass(frozen=True, slots=True)
class Drop:
    """End a session that is not used; `tells`: its pservers are to tell the other workers, which meet again."""

    session: int
    error: TfpsError
    tells: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Pause before another attempt, after `waited_s`; `says`: in the log."""

    error: TfpsError
    waited_s: float
    says: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """Wait until workers have all that pservers keep: `Settled` follows, unless it takes too long."""

    address: str


@dataclass(frozen=True, slots=True)
class Quit:
    """Fail a session: all go on with other pservers."""

    session: int
    error: TfpsError


@dataclass(frozen=True, slots=True)
class End:
    """Fail: nothing goes on; what waits is answered with `error`."""

    error: TfpsError


Effect = Leave | Report | Connect | Write | Use | Give | Reply | Drop | Wait | Settle | Quit | End


def lacks(name: str) -> str:
    """What is said of a bucket that cannot be restored."""
    return (
        f"nobody has all that a lost pserver kept of '{name}' any more; begin the job again, from its last checkpoint"
    )


class Recovery:
    """The machine of one worker; `limit_s`: how long a reconfiguration may take. Not for several threads at once.

    Invariants: `session` is what counts, and changes at `Restored` only; `next` is a session that is tried, of which
    there is never more than one; `to_replay` is empty but in REPLAYING; ENDED is never left.
    """

    def __init__(self, limit_s: float, *, joining: bool = False) -> None:
        self._limit_s = limit_s
        self.joining = joining  # whether it has asked to join, and takes no part yet
        self.phase = Phase.RUNNING
        self.session = 0
        self.next: int | None = None  # that is tried, from its Connected on
        self.to_replay: frozenset[int] = frozenset()
        self.closing = False  # it ends as soon as others do not need it
        self._latest = 0  # session
        self._decision: pb.Decision | None = None  # of the last rendezvous
        self._reason, self._began_s, self._said_s = "", 0.0, 0.0  # of this reconfiguration

    def step(self, event: Event) -> Sequence[Effect]:
        """Takes `event`; returns what is to be done."""
        match event:
            case Joined():
                self.joining = False
            case Connected(session) | Restored(session) if self.phase is Phase.ENDED:
                self.next = None
                return [Drop(session, ClosedError("the exchange has ended"), tells=False)]
            case _ if self.phase is Phase.ENDED:
                pass
            case Failed(session) if session == self.session and not self.phase.reconfigures:
                return self._reconfigure(event)
            case Decided(decision) if self.phase is Phase.RENDEZVOUS:
                return self._connect(decision)
            case Connected(session) if self.phase is Phase.RESTORING:
                self.next = session
                return [Write(session, self._decision)]
            case Restored(session, to_replay) if session == self.next:
                return self._go_on(session, to_replay)
            case Missed(error, now_s) if self.phase.reconfigures:
                return self._again(error, now_s)
            case Answered(session, bucket) if session == self.session and bucket in self.to_replay:
                return self._answered(event)
            case CaughtUp(session, bucket) if session == self.session:
                self.to_replay -= {bucket}
                self._run_if_all_caught_up()
            case Offered(address):
                return [Settle(address)]
            case Settled(session, address, known):
                if session == self.session and self.phase is Phase.RUNNING and not (known or self.joining):
                    return [Quit(session, PserverLostError(f"pserver {address} takes part from now on"))]
            case Broken(error):
                return self._end(error)
            case Closed():
                self.closing = True
                if self.next is None and self.phase is not Phase.REPLAYING:
                    self.phase = Phase.ENDED
            case TimedOut():
                self.phase = Phase.ENDED
            case _:
                pass
        return []

    def _reconfigure(self, event: Failed) -> Sequence[Effect]:
        if not event.recoverable:
            return self._end(event.error)
        self.to_replay, self._decision = frozenset(), None
        self._reason, self._began_s, self._said_s = str(event.error), event.now_s, event.now_s
        return [Leave(event.session, self._reason), *self._attempt()]

    def _attempt(self) -> Sequence[Effect]:
        self.phase = Phase.RENDEZVOUS
        if self.joining:
            return self._connect(None)
        return [Report(None if self._decision is None else self._decision.generation, self._reason)]

    def _connect(self, decision: pb.Decision | None) -> Sequence[Effect]:
        self.phase, self._decision = Phase.RESTORING, decision
        self._latest += 1
        return [Connect(self._latest, decision)]

    def _again(self, error: TfpsError, now_s: float) -> Sequence[Effect]:
        """Ends the session that was tried; makes another attempt, or ends."""
        effects: list[Effect] = []
        if self.next is not None:
            effects, self.next = [Drop(self.next, error, tells=not self.joining)], None
        waited_s = now_s - self._began_s
        if not isinstance(error, LATER):
            return [*effects, *self._end(error)]
        if waited_s > self._limit_s:
            late = PserverLostError(
                f"{self._reason}; the job could not go on with other pservers within {self._limit_s:.3g} s "
                f"(rejoin_timeout_s): {error}"
            )
            late.__cause__ = error
            return [*effects, *self._end(late)]
        if says := now_s - self._said_s > _SAID_S:
            self._said_s = now_s
        return [*effects, Wait(error, waited_s, says), *self._attempt()]

    def _go_on(self, session: int, to_replay: frozenset[int]) -> Sequence[Effect]:
        self.session, self.next, self.to_replay, self.phase = session, None, to_replay, Phase.REPLAYING
        self._run_if_all_caught_up()
        return [Use(session), *(Give(session, bucket) for bucket in sorted(to_replay)), Reply(session)]

    def _run_if_all_caught_up(self) -> None:
        if self.phase is Phase.REPLAYING and not self.to_replay:
            self.phase = Phase.ENDED if self.closing else Phase.RUNNING

    def _answered(self, event: Answered) -> Sequence[Effect]:
        """A round that programs have had must not be computed again without a worker that has just gone."""
        if event.again and self._decision is not None and event.ranks != tuple(self._decision.ranks):
            text = f"a worker has gone while pservers computed again what they had: {lacks(event.name)}"
            return self._end(WorkerLostError(text))
        return [Give(event.session, event.bucket)]

    def _end(self, error: TfpsError) -> Sequence[Effect]:
        self.phase = Phase.ENDED
        return [End(error)]
