"""Admission in mode "async": each push is applied as it comes, and its rank alone gets the newest parameters.

A rank's first push, and each after its program has assigned values, waits until all ranks have pushed such a one: then
what rank 0 has put counts, and those pushes are applied in rank order. So no gradient meets parameters that are not
there.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from tfps.errors import MismatchError, ProtocolError, TfpsError
from tfps.exchange.aggregate import SliceFormat
from tfps.exchange.codecs import Floats
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.membership.view import View
from tfps.pserver.slices import Admission, Answer, Late, Push, Taken, record
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import WHOLE

_NOTHING = memoryview(b"")


class Phase(NamedTuple):
    """What holds from one meeting of all ranks to the next: its number, and the ranks that still step."""

    number: int
    active: frozenset[int]


class StalenessBound:
    """The ranks of a job on one pserver, and how far one may be ahead of another. Any thread.

    A quiesced rank holds nobody up. Once all are quiesced they are at one place, and a new phase begins.

    Args:
        staleness: how many steps a rank may be ahead of the slowest active one; None: any number.

    Attributes:
        phase: replaced as a whole, so that it is read without a lock.
    """

    def __init__(self, view: View, staleness: int | None) -> None:
        self.view, self.staleness = view, staleness
        self._lock = threading.Lock()  # guards what follows
        self._gone: set[int] = set()
        self.phase = Phase(0, frozenset(view.ranks))

    def quiesce(self, rank: int) -> None:
        """`rank` steps no further in this phase."""
        with self._lock:
            self._without(rank)

    def leave(self, rank: int) -> None:
        """`rank` has left the job."""
        with self._lock:
            self._gone.add(rank)
            self._without(rank)

    def _without(self, rank: int) -> None:
        number, active = self.phase.number, self.phase.active - {rank}
        if not active:
            number, active = number + 1, frozenset(self.view.ranks) - self._gone
        self.phase = Phase(number, active)

    def quiesced(self) -> list[int]:
        """The ranks that are quiesced while others step."""
        active = self.phase.active
        return [rank for rank in self.view.ranks if rank not in active and rank not in self._gone]

    def slower(self, steps: Mapping[int, int], rank: int) -> list[int]:
        """The ranks for which `rank` has to wait, given the steps of each rank in this phase."""
        limit = self.staleness
        if limit is None:
            return []
        return [other for other in sorted(self.phase.active) if steps[rank] - steps[other] > limit]


class RankScalars:
    """The scalars of each rank's latest step of a bucket; ranks step for themselves. Any thread."""

    def __init__(self, name: str, spec: UpdateSpec, view: View) -> None:
        self.name, self.spec, self._view = name, spec, view
        self._lock = threading.Lock()  # guards the next two
        self._latest: dict[int, tuple[int, StepScalars]] = {}
        self._marks: dict[int, int] = {}  # of ranks that have assigned values and wait for others to do so

    def take(self, rank: int, step: int, data: memoryview) -> TfpsError | None:
        """Takes the scalars of `rank` for `step`, packed; returns why the job must fail: it has assigned other values
        than another rank.
        """
        scalars = StepScalars.unpack(data, self.spec)
        with self._lock:
            if rank in self._latest and step <= self._latest[rank][0]:
                raise ProtocolError(
                    f"step scalars of bucket '{self.name}' must come once per step, for one after step "
                    f"{self._latest[rank][0]} of rank {rank}, got them for step {step}"
                )
            self._latest[rank] = step, scalars
            if not scalars.mark:
                return None
            for other, mark in self._marks.items():
                if mark != scalars.mark:
                    return MismatchError(
                        f"the workers do not train the same: ranks {other} and {rank} have assigned different values "
                        f"to variables of bucket '{self.name}' or their optimizer's; change them on every rank, and "
                        "alike: between epochs, or after strategy.synchronize()"
                    )
            self._marks[rank] = scalars.mark
            if len(self._marks) == self._view.workers:
                self._marks = {}
        return None

    def at(self, rank: int, step: int) -> StepScalars | None:
        """Those of `rank` for `step`; None if none have come."""
        with self._lock:
            latest = self._latest.get(rank)
            return latest[1] if latest is not None and latest[0] == step else None


class _Pushed(NamedTuple):
    """A push that has not been applied."""

    push: Push
    gradient: Floats | None
    scalars: StepScalars
    arrived_ns: int


class AsyncAdmission(Admission):
    """Applies each rank's gradient to `parameters` as it comes.

    What Put has brought counts once all ranks have assigned values. Answers are never encoded, as every rank gets other
    parameters than the rank before.

    Args:
        delay_compensation: lambda of DC-ASGD (https://arxiv.org/abs/1609.08326), 0: off. A gradient g of parameters
            that have become w meanwhile, and were v when the rank got them, counts as g + lambda g g (w - v).
    """

    def __init__(
        self,
        recorder: Recorder,
        format_: SliceFormat,
        parameters: ParameterShard,
        scalars: RankScalars,
        bound: StalenessBound,
        delay_compensation: float,
    ) -> None:
        self._recorder, self._format, self._parameters = recorder, format_, parameters
        self._scalars, self._bound, self._delay_compensation = scalars, bound, delay_compensation
        self.nbytes = format_.nbytes
        self._steps = dict.fromkeys(bound.view.ranks, 0)  # pushes of each rank
        self._done = dict.fromkeys(bound.view.ranks, 0)  # steps of each rank in this phase
        self._phase = bound.phase.number
        self._marked: dict[int, _Pushed] = {}  # wait for all ranks' assignments
        self._held: dict[int, Push] = {}  # applied, but their ranks are too far ahead
        self._whole: dict[int, tuple[Push, Floats | None]] = {}  # ranks' residuals, until all have pushed theirs
        self._seen: dict[int, Floats] = {}  # the parameters that each rank has, if delay is compensated

    def take(self, push: Push, now_ns: int, upcoming: Container[int]) -> Taken:
        rank, header, *_ = push
        label = self._format.label
        self._align()
        if header.step != self._steps[rank]:
            raise ProtocolError(f"step of {label} must be {self._steps[rank]} for rank {rank}, got {header.step}")
        part = push.part(self._format)
        gradient = None if part is None else self._format.decoded(part)[0]
        scalars = self._scalars.at(rank, header.step)
        self._steps[rank] += 1
        if header.flags & WHOLE:
            self._whole[rank] = push, gradient
            return Taken(self._collected())
        if self._recorder.enabled:
            self._recorder.arrived(now_ns, header.step, header.bucket, header.index, rank, NONE)
        if scalars is None:
            if gradient is not None:
                raise ProtocolError(f"step scalars of {label} must come before a gradient of step {header.step}")
            return Taken([self._answer(push)])  # it only reads
        pushed = _Pushed(push, gradient, scalars, now_ns)
        if not scalars.mark:
            self._apply(pushed)
        else:
            self._marked[rank] = pushed
            if len(self._marked) == self._bound.view.workers:
                self._take_assigned()
        return Taken(self._ready())

    def released(self) -> list[Answer]:
        self._align()
        return self._ready()

    def quiesced(self) -> list[int]:
        return self._bound.quiesced()

    def missing(self, asking: int | None) -> list[int]:
        everyone = self._bound.view.ranks
        late = {rank for each in (self._marked, self._whole) if each for rank in everyone if rank not in each}
        for rank in self._held:
            if asking in (None, rank):
                late.update(self._bound.slower(self._done, rank))
        return sorted(late)

    def late(self, ranks: Iterable[int]) -> Late | None:
        """Those who are too far ahead do without a rank that leaves or quiesces; those who assign or collect do not."""
        for rank in ranks:
            if self._marked and rank not in self._marked:
                return Late(rank, next(iter(self._marked.values())).push.header.step)
            if self._whole and rank not in self._whole:
                return Late(rank, next(iter(self._whole.values()))[0].header.step)
        return None

    def _collected(self) -> list[Answer]:
        """Once all ranks have pushed their residuals, the sum for all of them, added in rank order."""
        if len(self._whole) < self._bound.view.workers:
            return []
        total = np.zeros(self.nbytes // 4, np.float32)
        for rank in sorted(self._whole):
            if (part := self._whole[rank][1]) is not None:
                total += part
        collected, self._whole = self._whole, {}
        return [Answer((rank,), push.reply(WHOLE), total.view(np.uint8).data) for rank, (push, _) in collected.items()]

    def _align(self) -> None:
        """In a new phase nobody is ahead."""
        number = self._bound.phase.number
        if self._phase != number:
            self._phase, self._done = number, dict.fromkeys(self._bound.view.ranks, 0)

    def _take_assigned(self) -> None:
        """All ranks have assigned values: rank 0's count, then their gradients, in rank order."""
        self._parameters.take_put()
        marked, self._marked = self._marked, {}
        if self._delay_compensation:
            now = self._parameters.parameters.copy()
            self._seen = dict.fromkeys(marked, now)
        for rank in sorted(marked):
            self._apply(marked[rank])

    def _apply(self, pushed: _Pushed) -> None:
        push = pushed.push
        if pushed.gradient is not None:
            self._parameters.update(self._compensated(push.rank, pushed.gradient).data, pushed.scalars)
            if self._recorder.enabled:
                record(self._recorder, push, pushed.arrived_ns, self.nbytes, push.header.index)
        self._done[push.rank] += 1
        self._held[push.rank] = push._replace(payload=_NOTHING)  # frees the memory

    def _compensated(self, rank: int, gradient: Floats) -> Floats:
        if not self._delay_compensation or rank not in self._seen:
            return gradient
        change = self._parameters.parameters - self._seen[rank]
        change *= gradient
        change *= gradient
        change *= np.float32(self._delay_compensation)
        change += gradient
        return change

    def _ready(self) -> list[Answer]:
        """Answers for all ranks whose pushes have been applied and who may go on."""
        ready = [rank for rank in self._held if not self._bound.slower(self._done, rank)]
        return [self._answer(self._held.pop(rank)) for rank in ready]

    def _answer(self, push: Push) -> Answer:
        """A copy of the parameters: other ranks' pushes change them while it is on its way."""
        rank, target, parameters = push.rank, push.target, self._parameters.parameters
        header = push.reply(0 if self._format.codec is None else WHOLE)
        if self._delay_compensation:
            self._seen[rank] = parameters.copy()
        if target is not None:
            np.copyto(target.memory, parameters.view(np.uint8))
            return Answer((rank,), header, None, target)
        copied = self._seen[rank] if self._delay_compensation else parameters.copy()
        return Answer((rank,), header, copied.view(np.uint8).data)
