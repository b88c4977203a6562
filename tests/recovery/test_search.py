"""Every order of events in which pservers are lost, cut off or join, and workers die: no round has two results.

The search goes over what decides: `Recovery` of each worker, its journal (`Replay`), `decide` where they meet, and a
`Roster` for each session of the job. What carries it out is modelled here, as small as it can be: replies and tidings
come in order, or are lost with their session; a session is broken for each worker at its own time; waits end early if
that is a fault of this run, or when nothing else can happen.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from tfps.errors import PserverLostError, TfpsError, WorkerLostError
from tfps.exchange.interface import Reply
from tfps.membership import roster
from tfps.membership.decision import check_present, decide
from tfps.membership.members import Applicant, Resumed, State
from tfps.membership.roster import Roster
from tfps.membership.view import View
from tfps.protos import tfps_pb2 as pb
from tfps.recovery import machine
from tfps.recovery.journal import Push, Replay, Snapshot
from tfps.recovery.machine import Effect, Event, Phase, Recovery
from tfps.types import Argument

ITEMS = 3
LOST = PserverLostError("a pserver was lost")
Move = tuple[str | int, ...]  # a method of `World`, and its arguments
Result = tuple[str, tuple[int, ...]]  # a digest of what was summed, and whose pushes are in it


def parsed(name: str, data: bytes) -> pb.Report | pb.Decision:
    made: pb.Report | pb.Decision = getattr(pb, name).FromString(data)
    return made


# So that states can be copied.
for kind in (pb.Report, pb.Decision):
    copyreg.pickle(kind, lambda each: (parsed, (type(each).__name__, each.SerializeToString(deterministic=True))))


def ignored(_: Reply) -> None:
    """Replies are noted by the model."""


def digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8]


@dataclass
class Session:
    """The job with one set of pservers, on all of these together."""

    roster: Roster
    pservers: list[str]
    step: int  # of the bucket
    expects: list[int]  # who has to write its part before it begins
    state: list[str] = field(default_factory=lambda: [""] * ITEMS)  # what pservers keep, by item
    came: list[int] = field(default_factory=list)  # who has written its part
    pushes: dict[int, str] = field(default_factory=dict)
    down: dict[int, list[tuple[str, Argument]]] = field(default_factory=dict)  # on its way to each rank
    result: Result | None = None  # of the round before, which some lack
    broken: bool = False

    def push(self, rank: int, what: str) -> None:
        self.pushes[rank] = what
        self.complete()

    def complete(self) -> None:
        """Ends the round if all have pushed who take part."""
        ranks = self.roster.view.ranks
        if not self.broken and self.pushes and set(ranks) <= set(self.pushes):
            summed = sorted(self.pushes.items())
            self.state = [digest(item, summed) for item in self.state]
            found = digest(self.state), tuple(rank for rank, _ in summed)
            for rank in ranks:
                self.down.setdefault(rank, []).append(("reply", (self.step, found)))
            self.step, self.pushes = self.step + 1, {}

    def lose(self, rank: int) -> None:
        if (change := self.roster.lose(rank, "died")) is None:
            return
        for effect in change[1]:
            if isinstance(effect, roster.Fail):
                self.broken = True
            elif isinstance(effect, roster.Notify):
                for other in change[0].ranks:
                    self.down.setdefault(other, []).append(("lost", rank))
        self.complete()


@dataclass
class Worker:
    """A rank with its program of `rounds` pushes."""

    rank: int
    journal: Replay | None
    sessions: dict[int, int] = field(default_factory=lambda: {0: 0})  # numbers of the machine's, to the world's
    recovery: Recovery = field(default_factory=lambda: Recovery(1e9))
    to_do: list[Effect] = field(default_factory=list)
    settles: bool = False  # it waits until pservers may change
    view: list[int] = field(default_factory=list)  # as it has been told
    used: int | None = 0  # the session that takes its pushes
    push: Push | None = None  # under way
    needs_replay: bool = False
    unrecoverable: bool = False  # nobody has what pservers kept
    results: list[Result] = field(default_factory=list)
    waits: tuple[str, Argument] | None = None  # "meet" with its report, or "write" with its decision
    dead: bool = False
    end: str = ""

    @property
    def here(self) -> bool:
        return not (self.dead or self.end)


@dataclass
class World:
    """A state of all."""

    workers: list[Worker]
    sessions: list[Session]
    pservers: dict[str, int]  # that answer, and on which side of a cut they are
    gone: list[str] = field(default_factory=list)  # that refuse connections
    sides: list[int] = field(default_factory=list)  # of each worker
    decisions: list[tuple[int, pb.Decision]] = field(default_factory=list)  # by side, of the last rendezvous
    faults: tuple[str, ...] = ()  # that are to come, in this order: methods
    rounds: int = 2  # that each program has

    # What a worker does

    def tell(self, worker: Worker, event: Event) -> None:
        worker.to_do += worker.recovery.step(event)

    def session_of(self, worker: Worker, number: int) -> Session:
        return self.sessions[worker.sessions[number]]

    def begin_push(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.unrecoverable:
            self.tell(worker, machine.Broken(WorkerLostError(machine.lacks("it"))))
            return
        worker.push = Push(b"%d %d" % (rank, len(worker.results)), ignored)
        if worker.journal is not None:
            worker.journal.add(worker.push)
        if worker.used is not None and not worker.needs_replay:
            self.give(worker, worker.push)

    def give(self, worker: Worker, push: Push) -> None:
        assert worker.used is not None
        session = self.sessions[worker.used]
        if session.broken or worker.rank not in session.roster.view.ranks:
            return  # it will know
        if (journal := worker.journal) is not None:
            ranks = session.roster.view.ranks
            if (wanted := journal.due(ranks, 0)) is not None:
                begin, end = wanted.begin // 4, (wanted.begin + wanted.nbytes) // 4
                journal.took(Snapshot(wanted.ranks, wanted.begin, [np.array(session.state[begin:end], "U8")]))
            journal.give(ranks)
        session.push(worker.rank, str(push.payload))

    def receive(self, rank: int) -> None:
        worker = self.workers[rank]
        assert worker.used is not None
        kind, what = self.sessions[worker.used].down[worker.rank].pop(0)
        if kind == "lost":
            worker.view.remove(what)
            return
        step, (summed, ranks) = what
        again = step < len(worker.results)
        if worker.journal is not None:
            worker.journal.answered(Push(None, ignored), Reply(step=step, ranks=ranks))
        if again:
            if ranks == worker.results[step][1]:
                assert worker.results[step][0] == summed, "a round that was computed again has the same result"
        else:
            assert worker.push is not None
            assert step == len(worker.results), "rounds come in order"
            worker.results.append((summed, ranks))
            worker.push = None
        if worker.needs_replay:
            self.tell(worker, machine.Answered(worker.recovery.session, 0, ranks, again))

    def do(self, rank: int) -> None:
        """Executes the next effect."""
        worker = self.workers[rank]
        match worker.to_do.pop(0):
            case machine.Leave():
                worker.used = None
            case machine.Report(generation):
                session = self.session_of(worker, worker.recovery.session)
                worker.waits = "meet", self.report(worker, generation or session.roster.view.generation)
            case machine.Connect(number, decision):
                assert decision is not None
                self.connect(worker, number, decision)
            case machine.Write(number, decision):
                assert decision is not None
                session = self.session_of(worker, number)
                (bucket,) = decision.buckets
                worker.unrecoverable = worker.unrecoverable or bucket.unrecoverable
                if worker.journal is not None:
                    for write in worker.journal.resume(bucket, tuple(decision.ranks), ()):
                        values = list(map(str, np.asarray(write.values)))
                        session.state[write.begin // 4 : write.begin // 4 + len(values)] = values
                elif bucket.HasField("giver") and bucket.giver == worker.rank:
                    session.result = worker.results[-1]
                session.came.append(worker.rank)
                worker.waits = "write", decision
            case machine.Use(number):
                worker.used = worker.sessions[number]
                worker.view = list(self.sessions[worker.used].expects)
                if worker.push is not None and not worker.needs_replay:
                    self.give(worker, worker.push)
            case machine.Give(number):
                self.give_again(worker, number)
            case machine.Drop(number, _, tells):
                session = self.session_of(worker, number)
                session.broken = session.broken or tells
            case machine.Settle():
                worker.settles = True
            case machine.Quit(number):
                self.session_of(worker, number).broken = True
            case machine.End(error):
                worker.end = f"{type(error).__name__}: {error}"

    def may_change(self, worker: Worker) -> bool:
        """Whether workers have all that pservers keep, as this one knows."""
        kept = worker.journal is None or worker.journal.oldest in (None, tuple(worker.view))
        return worker.settles and worker.recovery.phase is Phase.RUNNING and kept

    def settled(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.settles, known = False, "new" in self.session_of(worker, worker.recovery.session).pservers
        self.tell(worker, machine.Settled(worker.recovery.session, "new", known))

    def give_again(self, worker: Worker, number: int) -> None:
        if (log := worker.journal) is None or worker.used != worker.sessions[number]:
            return
        if worker.unrecoverable and worker.push is not None:
            self.tell(worker, machine.Broken(WorkerLostError(machine.lacks("it"))))
            return
        if log.idle:
            self.give(worker, log.next)
        if log.all_given and log.replies >= len(worker.results):
            worker.needs_replay = False
            self.tell(worker, machine.CaughtUp(number, 0))

    def report(self, worker: Worker, generation: int) -> pb.Report:
        side, bucket = self.sides[worker.rank], pb.BucketReport(step=len(worker.results))
        if worker.results and list(worker.results[-1][1]) != worker.view:
            bucket.last[:] = worker.results[-1][1]
        if worker.journal is not None:
            worker.journal.report(bucket)
        return pb.Report(
            generation=generation,
            ranks=worker.view,
            lost=set(range(len(self.workers))).difference(worker.view),
            reached=[address for address, place in self.pservers.items() if place == side],
            refused=self.gone,
            unreached=[address for address, place in self.pservers.items() if place != side],
            buckets=[bucket],
        )

    def connect(self, worker: Worker, number: int, decision: pb.Decision) -> None:
        side = self.sides[worker.rank]
        if not all(self.pservers.get(address) == side for address in decision.pservers):
            self.tell(worker, machine.Missed(LOST))
            return
        found = (
            index
            for index, each in enumerate(self.sessions)
            if each.roster.resumed is not None and each.pservers == list(decision.pservers)
            if each.roster.resumed.generation == decision.generation
        )
        if (at := next(found, None)) is None:
            at = len(self.sessions)
            step = decision.buckets[0].step
            self.sessions.append(opened(len(self.workers), list(decision.pservers), decision, step))
        worker.sessions[number] = at
        self.tell(worker, machine.Connected(number))

    # What happens to workers

    def end_wait(self, rank: int) -> None:
        """All have written their parts, or the session has broken before."""
        worker = self.workers[rank]
        assert worker.waits is not None
        decision, worker.waits = worker.waits[1], None
        number = worker.recovery.next
        if number is None:
            return
        session = self.session_of(worker, number)
        if session.broken:
            self.tell(worker, machine.Missed(LOST))
            return
        session.roster.restored = True
        (bucket,) = decision.buckets
        if bucket.HasField("giver") and len(worker.results) < bucket.step:
            assert session.result is not None
            worker.results.append(session.result)
            worker.push = None
        worker.needs_replay = worker.journal is not None
        self.tell(worker, machine.Restored(number, frozenset({0} if worker.needs_replay else ())))

    def meet(self, side: int, waited: bool) -> bool:
        """Whether those who wait on this side can go on."""
        here = {each.rank: each.waits[1] for each in self.at_rendezvous(side) if each.waits is not None}
        late = [each for each in self.decisions if each[0] == side]
        for rank, report in here.items():  # others may have decided without it, or before it came
            if late and report.generation < late[-1][1].generation:
                self.decided(rank, late[-1][1])
                return True
        try:
            decision = decide(here, waited)
        except TfpsError as error:
            if not waited:
                return False
            for rank in here:
                self.workers[rank].waits = None
                self.tell(self.workers[rank], machine.Missed(error))
            return True
        if decision is None:
            return False
        self.decisions.append((side, decision))
        for rank in here:
            self.decided(rank, decision)
        return True

    def decided(self, rank: int, decision: pb.Decision) -> None:
        self.workers[rank].waits = None
        try:
            check_present(rank, decision)
        except WorkerLostError as error:
            self.tell(self.workers[rank], machine.Missed(error))
        else:
            self.tell(self.workers[rank], machine.Decided(decision))

    def at_rendezvous(self, side: int) -> list[Worker]:
        if side not in self.pservers.values():
            return []
        found = [each for each in self.workers if each.here and each.waits is not None and each.waits[0] == "meet"]
        return [each for each in found if self.sides[each.rank] == side]

    # What may follow

    def moves(self) -> Iterator[Move]:
        for rank, worker in enumerate(self.workers):
            if not worker.here:
                continue
            if worker.push is None and len(worker.results) < self.rounds and worker.recovery.phase is not Phase.ENDED:
                yield "begin_push", rank
            if worker.used is not None and self.sessions[worker.used].down.get(rank):
                yield "receive", rank
            if worker.to_do and worker.waits is None:
                yield "do", rank
            if self.may_change(worker):
                yield "settled", rank
            reconfigures = worker.recovery.phase.reconfigures or worker.waits is not None
            if self.session_of(worker, worker.recovery.session).broken and not reconfigures:
                yield "fail", rank
            if worker.waits is not None and worker.waits[0] == "write":
                tried = self.session_of(worker, worker.recovery.next or 0)
                if tried.broken or set(tried.came) >= set(tried.expects):
                    yield "end_wait", rank
        for index, each in enumerate(self.sessions):
            for rank in each.roster.view.ranks:
                if not self.workers[rank].here and not each.broken and len(each.roster.view.ranks) > 1:
                    yield "notice", index, rank
        for side in (0, 1):
            if self.at_rendezvous(side) and copied(self).meet(side, waited=False):
                yield "meet", side, False

    def late_moves(self) -> Iterator[Move]:
        """Those who do not come are waited for no more."""
        for side in (0, 1):
            if self.at_rendezvous(side):
                yield "meet", side, True

    def next_faults(self) -> Iterator[Move]:
        here = [each.rank for each in self.workers if each.here]
        match self.faults[:1]:
            case ("lose_pserver",) if len(self.pservers) > 1:
                yield "lose_pserver", next(iter(self.pservers))  # they are alike
            case ("die",) if len(here) > 1:
                yield from (("die", rank) for rank in here)
            case ("cut",) if len(self.pservers) > 1:
                yield from (("cut", rank) for rank in here)
            case ("join_pserver",):
                yield ("join_pserver",)
            case ("be_late",):
                yield from self.late_moves()

    def fail(self, rank: int) -> None:
        worker = self.workers[rank]
        self.tell(worker, machine.Failed(worker.recovery.session, LOST, recoverable=True))

    def notice(self, index: int, rank: int) -> None:
        self.sessions[index].lose(rank)

    def die(self, rank: int) -> None:
        self.workers[rank].dead = True

    def lose_pserver(self, address: str) -> None:
        del self.pservers[address]
        self.gone.append(address)
        for each in self.sessions:
            each.broken = each.broken or address in each.pservers

    def cut(self, number: int) -> None:
        """A worker is with the last pserver on the other side."""
        self.sides[number] = self.pservers[list(self.pservers)[-1]] = 1
        for each in self.sessions:
            each.broken = True

    def join_pserver(self) -> None:
        self.pservers["new"] = 0
        for worker in self.workers:
            if worker.here:
                self.tell(worker, machine.Offered("new"))


def opened(workers: int, pservers: list[str], decision: pb.Decision | None, step: int) -> Session:
    made, ranks = Roster(View.first(workers, len(pservers))), list(range(workers))
    made.least, made.begun = 1, True
    resumed = None
    if decision is not None:
        ranks = list(decision.ranks)
        resumed = Resumed("i", decision.generation, tuple(ranks), tuple(pservers), decision.reason)
    for rank in ranks:
        one = Applicant("", rank, workers, str(rank), "", 0, 0, len(pservers), "i", resumed=resumed)
        made.join(one, 0.0).state = State.STREAMING
    return Session(made, pservers, step, ranks)


def first(faults: tuple[str, ...], *, update: bool, workers: int = 2, rounds: int = 2) -> World:
    made = [Worker(rank, Replay(0, rank, 1, 4 * ITEMS, 1) if update else None) for rank in range(workers)]
    for each in made:
        each.view = list(range(workers))
    session = opened(workers, ["a", "b", "c"], None, 0)
    return World(made, [session], {"a": 0, "b": 0, "c": 0}, sides=[0] * workers, faults=faults, rounds=rounds)


def packed(world: World) -> bytes:
    """Alike for states that are alike."""
    for worker in world.workers:  # what nobody else sees is done at once
        while worker.to_do and isinstance(worker.to_do[0], (machine.Reply, machine.Wait, machine.Settle, machine.End)):
            world.do(worker.rank)
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True  # else it matters which equal objects are one
    pickler.dump(world)
    return file.getvalue()


def unpacked(state: bytes) -> World:
    made: World = pickle.loads(state)
    return made


def copied(world: World) -> World:
    return unpacked(packed(world))


def search(world: World) -> tuple[int, set[tuple[str, ...]]]:
    """Goes through all that may follow; returns how many states there are, and how workers end."""
    ends = set[tuple[str, ...]]()
    seen, stack = set[bytes](), [packed(world)]
    while stack:
        state = stack.pop()
        now = unpacked(state)
        check(now)
        moves = list(now.moves()) or list(now.late_moves())
        if not moves:
            ends.add(check_end(now))
        for move, faults in [*((each, 0) for each in moves), *((each, 1) for each in now.next_faults())]:
            after = unpacked(state)
            after.faults = after.faults[faults:]
            name, *arguments = move
            getattr(after, str(name))(*arguments)
            following = packed(after)
            if (key := hashlib.blake2b(following, digest_size=16).digest()) not in seen:
                seen.add(key)
                stack.append(following)
    return len(seen), ends


def check(world: World) -> None:
    """Those that go on together have had the same; who was left out may have had a result that they have not."""
    for one, other in itertools.combinations([each for each in world.workers if each.here], 2):
        if one.used is not None and one.used == other.used and {one.rank, other.rank} <= set(one.view):
            for mine, its in zip(one.results, other.results, strict=False):
                assert mine == its, f"a round has two results: {mine} and {its}"


def check_end(world: World) -> tuple[str, ...]:
    """Nothing can happen any more: all have all results, or have ended by name."""
    for each in world.workers:
        assert not each.here or len(each.results) == world.rounds, f"rank {each.rank} waits for ever: {each}"
    assert len({tuple(each.results) for each in world.workers if each.here}) <= 1, "all have had the same"
    return tuple("dead" if each.dead else each.end.partition(":")[0] or "done" for each in world.workers)


@dataclass(frozen=True)
class Job:
    """What happens to it, and how its workers may end, as a set of ends each."""

    faults: tuple[str, ...]
    ends: tuple[str, ...]
    update: bool = False
    rounds: int = 1
    long: bool = False


DONE, LEFT, GONE = "done done", "dead done", "WorkerLostError dead"
JOBS = [
    Job(("lose_pserver", "lose_pserver"), (DONE,), long=True),
    Job(("lose_pserver", "lose_pserver"), (DONE,), update=True, long=True),
    Job(("lose_pserver", "die"), (DONE, LEFT, GONE), update=True),
    Job(("lose_pserver", "die"), (DONE, LEFT, GONE), update=True, rounds=2, long=True),
    Job(("die", "lose_pserver"), (DONE, LEFT, GONE), update=True, rounds=2),
    Job(("join_pserver",), (DONE,), update=True, long=True, rounds=2),
    Job(("join_pserver", "die"), (DONE, LEFT), long=True),
    Job(("cut",), (DONE, "WorkerLostError done"), rounds=2),
    # One side goes on: who needs what the other side had kept ends by name.
    Job(("cut",), (DONE, "WorkerLostError done", "WorkerLostError WorkerLostError"), update=True, rounds=2),
    Job(("lose_pserver", "be_late"), (DONE, "WorkerLostError done"), update=True),
]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(
            each,
            id=f"{' '.join(each.faults)}{' update' * each.update} {each.rounds}",
            marks=[pytest.mark.long] * each.long,
        )
        for each in JOBS
    ],
)
def test_in_every_order_of_events_all_go_on_alike_or_end_by_name(job: Job) -> None:
    states, ends = search(first(job.faults, update=job.update, rounds=job.rounds))
    print(f"{states} states")
    assert {" ".join(sorted(each)) for each in ends} == set(job.ends)
