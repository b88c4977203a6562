"""Every order of messages in which one of three workers may be lost: the others agree, and nobody waits for ever.

The search goes over the classes that decide, on both sides, without their I/O: slices with their rounds and sets of
ranks, `Roster`, and a worker's buckets with what takes their replies. All objects of one process are one part of a
state. What a part does with a message is computed once, on a copy, so that most states cost a few look-ups only.
"""

from __future__ import annotations

import copy
import copyreg
import enum
import functools
import itertools
import threading
import types
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import numpy as np
import pytest

from tfps.collectives import from_source
from tfps.config import Config
from tfps.exchange.interface import BucketSpec, FailureState, Reply, as_bytes
from tfps.exchange.layout import Placer
from tfps.membership.members import Applicant, State
from tfps.membership.roster import Roster
from tfps.membership.view import RankSets, View
from tfps.pserver.shard import Shard
from tfps.pserver.slices import Answer, RoundSlice
from tfps.pserver.slices import Push as Pushed
from tfps.runtime.runtime import Runtime
from tfps.trace.recorder import Recorder
from tfps.types import Argument
from tfps.wire.frames import Header, Kind, encode_ranks
from tfps.wire.shared_memory import Sharing
from tfps.worker.bucket import Incoming, Push, PushedBucket

WORKERS, PSERVERS = 3, 2
PIECES = 1500  # bytes of what is gathered: two pieces
GONE = -1  # the part of a worker that has died or left
CONFIG, RECORDER, ALL = Config(slice_bytes=1024), Recorder(), View.first(WORKERS, PSERVERS)
_T = TypeVar("_T")

# So that parts can be copied.
copyreg.pickle(type(threading.Lock()), lambda _: (threading.Lock, ()))
copyreg.pickle(memoryview, lambda view: (memoryview, (bytes(view),)))


def sum_of_two_slices(name: str, occasional: bool) -> BucketSpec:
    return BucketSpec((name,), "sum", 2 * 1024, "float32", 0, occasional=occasional)


# Number of a bucket -> what it is. The slices of a sum are on different pservers.
GRADIENT, TOTAL, SAID = range(3)
SPECS = [
    sum_of_two_slices("gradient", occasional=False),
    sum_of_two_slices("total", occasional=True),
    BucketSpec(("said",), "gather", 0, "uint8", 0, occasional=True),
]


class Frame(NamedTuple):
    """A message."""

    header: Header
    payload: bytes


def frozen(value: Argument) -> Argument:
    """All of a value that can make a difference, as something that can be hashed."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, dict):
        return tuple(sorted(((frozen(key), frozen(each)) for key, each in value.items()), key=repr))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(frozen, value)))
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return tuple(map(frozen, value))
    if isinstance(value, functools.partial):
        return frozen(value.args[1:])
    if value is None or isinstance(value, (int, float, str, bool, enum.Enum, np.dtype)):
        return value
    if isinstance(value, (type(RECORDER), Config, BucketSpec, types.MethodType, types.FunctionType, type, View)):
        return value.ranks if isinstance(value, View) else None
    if type(value).__module__ == "_thread" or isinstance(value, (FailureState, Applicant, Placer, Sharing)):
        return None
    slots = itertools.chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = sorted({*getattr(value, "__dict__", ()), *slots})
    return tuple(  # times make no difference
        (name, frozen(getattr(value, name))) for name in names if not name.endswith(("_s", "_ns")) and name != "lock"
    )


class Part:
    """What changes as one: the objects of a process. Its methods return the frames that it sends, with their goals."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Frame]] = []

    def take_sent(self) -> tuple[tuple[int, Frame], ...]:
        sent, self.sent = tuple(self.sent), []
        return sent


class Pserver(Part):
    """One of two; see Job for how it uses these classes."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.members = Roster(ALL)
        self.members.least, self.members.begun = 1, True
        for rank in range(WORKERS):
            one = Applicant("", rank, WORKERS, str(rank), "", 0, index, PSERVERS, "i")
            self.members.join(one, 0.0).state = State.STREAMING
        self.shard = Shard(CONFIG, ALL, index, RECORDER, notify=self._notify)
        self.shard.add(SPECS)
        self.completed: dict[tuple[int, int, int], tuple[bytes, int]] = {}  # by bucket, index and step

    def receive(self, rank: int, frame: Frame) -> None:
        bucket = self.shard.buckets[frame.header.bucket]
        item = bucket.slices[0 if bucket.spec.kind == "gather" else frame.header.index]
        answers, _ = item.take(Pushed(rank, frame.header, memoryview(bytearray(frame.payload))))
        self._send(answers)

    def lose(self, rank: int) -> None:
        self.members.lose(rank, "was lost")
        self.shard.set_view(self.members.view)
        for _, item in self.shard.slices():
            self._send(item.change_view(self.members.view))

    def _notify(self, number: int, ranks: Collection[int]) -> None:
        message = encode_ranks(number, ranks)
        frame = Frame(Header(Kind.RANKS, generation=number), message[-4 * len(ranks) :])
        self.sent += [(rank, frame) for rank in range(WORKERS)]

    def _send(self, answers: Sequence[Answer]) -> None:
        for ranks, header, payload, _ in answers:
            where, what = (header.bucket, header.index, header.step), bytes(cast("memoryview", payload))
            assert where not in self.completed, "a round is completed once"
            self.completed[where] = what, header.generation
            self.sent += [(rank, Frame(header, what)) for rank in ranks]


class Pending(Exception):
    """A call waits for the reply to what it pushes."""

    def __init__(self, is_source: bool) -> None:
        self.is_source = is_source


Group = Sequence[int]  # buckets that are pushed together, and all waited for


class Worker(Part):
    """It goes through a program: groups of buckets. TOTAL is a broadcast by rank 0, or by who is there instead."""

    def __init__(self, rank: int, program: Sequence[Group]) -> None:
        super().__init__()
        self.rank, self.program = rank, program
        placer = Placer(ALL.pservers, "round_robin")
        self.buckets = [PushedBucket.new(spec, 1024, placer, ALL) for spec in SPECS]
        ends = FailureState()
        self.incoming = [
            Incoming(index, self.buckets, ends, RECORDER, self._start_next, print, self._missing, range(WORKERS))
            for index in range(PSERVERS)
        ]
        self.group, self.awaited = -1, 0
        self.source = 0
        self.asked: list[tuple[bytes, tuple[int, ...]]] = []  # the replies of the broadcast under way
        self.results: list[tuple[Argument, ...]] = []  # of all that came, in the order of each bucket's steps
        self._push_next()

    def __deepcopy__(self, memo: dict[int, Argument]) -> Worker:
        made = Worker.__new__(Worker)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            setattr(made, name, value if name in ("program", "rank") else copy.deepcopy(value, memo))
        return made

    def _missing(self, bucket: PushedBucket, push: Push) -> None:
        lacking = {rank: sorted(slices) for rank, slices in push.without.items()}
        self.results.append(("lacking", push.step, frozen(lacking)))

    @property
    def has_ended(self) -> bool:
        return self.group == len(self.program)

    def _push_next(self) -> None:
        """Goes on to the next group, at once: what it sends may come much later, or never."""
        self.group += 1
        if self.has_ended:
            return
        self.awaited = len(self.program[self.group])
        for bucket in self.program[self.group]:
            if bucket == TOTAL:
                self.asked = []
                self._ask()
            else:
                words = np.full(512, 2**self.rank, np.float32) if bucket == GRADIENT else b"%d" % self.rank * PIECES
                self._push(bucket, words)

    def receive(self, pserver: int, frame: Frame) -> None:
        header, payload = frame
        if header.kind == Kind.RANKS:
            self.incoming[pserver].control(header, memoryview(payload))
        else:
            self.incoming[pserver].data(header, memoryview(payload), None)
        if not self.awaited and not self.has_ended:
            self._push_next()

    def _push(self, number: int, payload: Argument) -> None:
        bucket = self.buckets[number]
        bucket.waiting.append(Push(as_bytes(payload), functools.partial(self._replied, number)))
        self._start_next(number, bucket)

    def _start_next(self, number: int, bucket: PushedBucket) -> None:
        if (push := bucket.start_next()) is None:
            return
        for owner, item in bucket.frames(number, push, 1024, Sharing(False), lambda error: error):
            self.sent.append((owner, Frame(item.header, bytes(item.payload or b""))))

    def _replied(self, number: int, reply: Reply) -> None:
        assert reply.error is None
        ranks = tuple(sorted(reply.ranks))
        step = self.buckets[number].steps
        if reply.sum is not None:
            what = bytes(memoryview(reply.sum).cast("B"))
        else:
            what = repr({rank: bytes(part) for rank, part in (reply.parts or {}).items()}).encode()
        self.results.append((number, step, what, ranks))
        if number == TOTAL:
            assert len(set(np.frombuffer(what, np.float32))) == 1, "a total has a rank in all of it or in nothing"
            self.asked.append((what, ranks))
            self._ask()
        else:
            self.awaited -= 1

    def _ask(self) -> None:
        """Runs `from_source` up to the reply that has not come."""
        replies = iter(self.asked)

        def ask(is_source: bool) -> tuple[bytes, Collection[int]]:
            try:
                return next(replies)
            except StopIteration:
                raise Pending(is_source) from None

        exchange = types.SimpleNamespace(view=ALL, rank=self.rank)
        runtime = types.SimpleNamespace(exchange=exchange, source=self.source, sources=range(3))
        try:
            found = from_source(cast("Runtime", runtime), ask)
        except Pending as pending:
            self._push(TOTAL, np.full(512, 2**self.rank, np.float32) if pending.is_source else None)
            return
        self.source = runtime.source
        expected = np.full(512, 2**self.source, np.float32).tobytes()
        assert found == expected, "a broadcast is the source's, whole"
        self.results.append(("broadcast", self.source, found))
        self.awaited -= 1


class Parts:
    """All parts that were seen, by number, and what they have done with what."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._numbers: dict[Argument, int] = {}
        self._done: dict[Argument, tuple[int, tuple[tuple[int, Frame], ...]]] = {}

    def number(self, part: Part) -> int:
        key = type(part), frozen(part)
        if key not in self._numbers:
            self._numbers[key] = len(self.all)
            self.all.append(part)
        return self._numbers[key]

    def after(self, part: int, method: str, *arguments: Argument) -> tuple[int, tuple[tuple[int, Frame], ...]]:
        """The part after a call of `method`, and what that has sent."""
        key = part, method, *arguments
        if key not in self._done:
            made = copy.deepcopy(self.all[part], {id(RECORDER): RECORDER, id(CONFIG): CONFIG, id(ALL): ALL})
            getattr(made, method)(*arguments)
            sent = made.take_sent()
            self._done[key] = self.number(made), sent
        return self._done[key]


Channel = tuple[Frame, ...]


class World(NamedTuple):
    """A state."""

    pservers: tuple[int, ...]
    workers: tuple[int, ...]
    up: tuple[Channel, ...]  # from worker w to pserver p: at PSERVERS * w + p
    down: tuple[Channel, ...]  # and back
    gone: frozenset[int] = frozenset()  # workers that have died or left
    lost: frozenset[tuple[int, int]] = frozenset()  # (w, p): p goes on without w
    cut: tuple[int, int] | None = None  # (w, p): nothing comes through any more, and neither knows
    faults: int = 1  # that may still happen


def replaced(items: tuple[_T, ...], index: int, item: _T) -> tuple[_T, ...]:
    return (*items[:index], item, *items[index + 1 :])


@dataclass
class Search:
    """Goes through all states that can be reached."""

    program: Sequence[Group]
    faults: int = 1  # a death, or a link that is cut

    def __post_init__(self) -> None:
        self.parts = Parts()
        self.ends: set[Argument] = set()  # what those that were left have seen
        self._agreed: dict[tuple[int, int], bool] = {}
        self.repeated = 0  # ends in which a total was pushed again

    def first(self) -> World:
        pservers = tuple(self.parts.number(Pserver(index)) for index in range(PSERVERS))
        empty: tuple[Channel, ...] = ((),) * (WORKERS * PSERVERS)
        world = World(pservers, (), empty, empty, faults=self.faults)
        for rank in range(WORKERS):
            worker = Worker(rank, self.program)
            sent = worker.take_sent()
            world = world._replace(workers=(*world.workers, self.parts.number(worker)))
            world = self._worker_after(world, rank, world.workers[rank], sent)
        return world

    def run(self) -> int:
        """Returns how many states there are."""
        first = self.first()
        seen, stack = {first}, [first]
        while stack:
            world = stack.pop()
            self._check(world)
            goes_on = False
            for following, is_fault in self._next(world):
                goes_on |= not is_fault
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
            if not goes_on:
                self._check_end(world)
        return len(seen)

    def _worker(self, world: World, rank: int) -> Worker:
        return cast("Worker", self.parts.all[world.workers[rank]])

    def _next(self, world: World) -> Iterator[tuple[World, bool]]:
        """The states that may follow, and whether by a fault."""
        for w in range(WORKERS):
            if w not in world.gone:
                yield from self._of_worker(world, w)
            for p in range(PSERVERS):
                at = PSERVERS * w + p
                if (w, p) in world.lost:
                    continue
                if world.up[at]:
                    frame, *rest = world.up[at]
                    after, sent = self.parts.after(world.pservers[p], "receive", w, frame)
                    taken = world._replace(up=replaced(world.up, at, tuple(rest)))
                    yield self._pserver_after(taken, p, after, sent), False
                if w in world.gone or world.cut == (w, p):  # what has not come by now never comes
                    after, sent = self.parts.after(world.pservers[p], "lose", w)
                    ended = world._replace(up=replaced(world.up, at, ()), lost=world.lost | {(w, p)})
                    yield self._pserver_after(ended, p, after, sent), False

    def _of_worker(self, world: World, w: int) -> Iterator[tuple[World, bool]]:
        for p in range(PSERVERS):
            at = PSERVERS * w + p
            if world.down[at]:
                taken, more = world, True
                while taken.down[at] and more:  # what a number means makes a difference only once a reply has it
                    frame, *rest = taken.down[at]
                    more = frame.header.kind == Kind.RANKS
                    after, sent = self.parts.after(taken.workers[w], "receive", p, frame)
                    taken = taken._replace(down=replaced(taken.down, at, tuple(rest)))
                    taken = self._worker_after(taken, w, after, sent)
                yield taken, False
        if (world.cut is not None and world.cut[0] == w) or any(lost == w for lost, _ in world.lost):
            yield self._without(world, w), False  # it learns that a pserver is lost to it, and leaves
        if world.faults and len(world.gone) < WORKERS - 1:
            yield self._without(world, w)._replace(faults=world.faults - 1), True
            for p in range(PSERVERS):
                yield world._replace(cut=(w, p), faults=world.faults - 1), True

    def _without(self, world: World, w: int) -> World:
        down = tuple(() if at // PSERVERS == w else channel for at, channel in enumerate(world.down))
        return world._replace(gone=world.gone | {w}, down=down, workers=replaced(world.workers, w, GONE), cut=None)

    def _pserver_after(self, world: World, p: int, after: int, sent: Sequence[tuple[int, Frame]]) -> World:
        down = list(world.down)
        for w, frame in sent:
            if w not in world.gone and (w, p) not in world.lost and world.cut != (w, p):
                down[PSERVERS * w + p] += (frame,)
        return world._replace(pservers=replaced(world.pservers, p, after), down=tuple(down))

    def _worker_after(self, world: World, w: int, after: int, sent: Sequence[tuple[int, Frame]]) -> World:
        up = list(world.up)
        for p, frame in sent:
            if (w, p) not in world.lost and world.cut != (w, p):
                up[PSERVERS * w + p] += (frame,)
        return world._replace(workers=replaced(world.workers, w, after), up=tuple(up))

    def _check(self, world: World) -> None:
        for one, other in itertools.combinations(sorted({*world.workers} - {GONE}), 2):
            if (one, other) not in self._agreed:
                seen = [self._by_bucket(part) for part in (one, other)]
                self._agreed[one, other] = all(
                    first == second
                    for bucket in {*seen[0], *seen[1]}
                    for first, second in zip(seen[0].get(bucket, ()), seen[1].get(bucket, ()), strict=False)
                )
            assert self._agreed[one, other], f"workers have seen what differs: {world}"

    def _by_bucket(self, part: int) -> dict[Argument, list[Argument]]:
        seen: dict[Argument, list[Argument]] = {}
        for bucket, *what in cast("Worker", self.parts.all[part]).results:
            seen.setdefault(bucket, []).append(what)
        return seen

    def _check_end(self, world: World) -> None:
        """Nothing can happen any more, but for a fault: all that are left have what they wait for."""
        left = [self._worker(world, rank) for rank in range(WORKERS) if rank not in world.gone]
        assert all(worker.has_ended for worker in left), f"somebody waits for ever: {world}"
        ends = {frozen(self._by_bucket(world.workers[worker.rank])) for worker in left}
        assert len(ends) == 1, "all have seen the same"
        steps = {tuple(bucket.steps for bucket in worker.buckets) for worker in left}
        assert len(steps) == 1, "all push again what has a partial reply, or none"
        self.repeated += next(iter(steps))[TOTAL] > sum(TOTAL in group for group in self.program)
        self.ends |= ends


PROGRAMS: dict[str, list[Group]] = {
    "two gradients": [(GRADIENT,), (GRADIENT,)],
    "two broadcasts": [(TOTAL,), (TOTAL,)],
    "an announcement and a gradient": [(SAID,), (GRADIENT,)],
}


LONG = dict.fromkeys(("two gradients", "an announcement and a gradient"), pytest.mark.long)


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in PROGRAMS])
def test_in_every_order_of_messages_and_one_fault_the_others_agree(name: str) -> None:
    search = Search(PROGRAMS[name])
    states = search.run()
    print(f"{name}: {states} states of {len(search.parts.all)} parts, with {len(search.ends)} ends")
    assert len(search.ends) > 5
    assert bool(search.repeated) == ("broadcasts" in name)


@pytest.mark.parametrize(
    ("owner", "name", "instead", "why"),
    [
        (PushedBucket, "is_atomic", property(lambda self: False), "in all of it or in nothing"),
        (RoundSlice, "change_view", lambda self, view, upcoming=(): [], "somebody waits for ever"),
        (RankSets, "number", lambda self, ranks: 1, "a broadcast is the source's"),
    ],
)
def test_the_search_finds_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: object, why: str
) -> None:
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(AssertionError, match=why):
        Search(PROGRAMS["two broadcasts"]).run()
