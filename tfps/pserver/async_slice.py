"""Slices of mode "async": each push is applied as it comes, and its rank alone gets the latest parameters.

A rank's first push, and each after its program has assigned values, waits until all ranks have pushed such a one.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from typing import NamedTuple

import numpy as np

from tfps.errors import MismatchError, ProtocolError, TfpsError
from tfps.exchange.aggregate import SliceFormat
from tfps.exchange.codecs import Floats
from tfps.exchange.parameter_shard import ParameterShard
from tfps.exchange.staleness import StalenessBound
from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.membership.view import RankSets, View
from tfps.pserver.slices import Answer, Late, OwnedSlice, Push, not_written
from tfps.trace.recorder import Recorder
from tfps.wire.frames import UNCODED


class RankScalars:
    """The scalars of each rank's latest step of a bucket; ranks step for themselves. Any thread."""

    def __init__(self, name: str, spec: UpdateSpec, view: View) -> None:
        self.name, self.spec = name, spec
        self.view = view
        self._lock = threading.Lock()  # guards it and the next two
        self._latest: dict[int, tuple[int, StepScalars]] = {}
        self._marks: dict[int, int] = {}  # of ranks that have assigned values and wait for others to do so

    def take(self, rank: int, step: int, data: memoryview, members: Container[int]) -> TfpsError | None:
        """Takes packed scalars; returns why the job must fail: `rank` has assigned other values than another rank."""
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
            self._end_assigning()
        return None

    def _end_assigning(self) -> None:
        """Nobody waits once all ranks have assigned values. Caller holds the lock."""
        if self._marks.keys() >= set(self.view.ranks):
            self._marks = {}

    def set_view(self, view: View) -> None:
        """Lost ranks assign no more; who is left may have done so already."""
        with self._lock:
            self.view = view
            self._marks = {rank: mark for rank, mark in self._marks.items() if rank in view.ranks}
            self._end_assigning()

    def at(self, rank: int, step: int) -> StepScalars | None:
        """Those of `rank` for `step`; None if none have come."""
        with self._lock:
            latest = self._latest.get(rank)
            return latest[1] if latest is not None and latest[0] == step else None


class _Pushed(NamedTuple):
    """A push that has not been applied."""

    push: Push
    gradient: Floats | None
    scalars: StepScalars | None
    arrived_ns: int


class AsyncSlice(OwnedSlice):
    """Applies each rank's gradient to `parameters` as it comes. Answers are never encoded, as ranks get different ones.

    `delay_compensation` is lambda of DC-ASGD (https://arxiv.org/abs/1609.08326): a gradient g of parameters that have
    become w meanwhile, and were v when the rank got them, counts as g + lambda g g (w - v).
    """

    parameters: ParameterShard

    def __init__(
        self,
        recorder: Recorder,
        format_: SliceFormat,
        sets: RankSets,
        parameters: ParameterShard,
        scalars: RankScalars,
        bound: StalenessBound,
        delay_compensation: float,
        first: int = 0,
    ) -> None:
        super().__init__(recorder, format_.nbytes, sets, parameters)
        self.bound, self._format, self._scalars, self._delay_compensation = bound, format_, scalars, delay_compensation
        self._steps = dict.fromkeys(bound.view.ranks, first)  # pushes of each rank, if the first one is of step `first`
        self._done = dict.fromkeys(bound.view.ranks, 0)  # steps of each rank in this phase
        self._phase = bound.phase.number
        self._marked: dict[int, _Pushed] = {}  # wait for all ranks' assignments
        self._held: dict[int, Push] = {}  # applied, but their ranks are too far ahead
        self._residuals: dict[int, _Pushed] = {}  # ranks' residuals, until all have pushed theirs
        self._seen: dict[int, Floats] = {}  # the parameters that each rank has, if delay is compensated

    def take(self, push: Push, upcoming: Container[int] = ()) -> tuple[list[Answer], int]:
        now_ns = self._recorder.clock()
        with self.lock:
            if push.rank not in self.bound.view.ranks:
                return [], 0  # it has just been lost
            return self._take(push, now_ns), 0

    def change_view(self, view: View, upcoming: Container[int] = ()) -> list[Answer]:
        with self.lock:
            for waiting in (self._marked, self._residuals, self._held):
                for rank in waiting.keys() - set(view.ranks):
                    del waiting[rank]
            self._align()
            self._assigned()
            return [*self._collected(), *self._ready()]

    def _take(self, push: Push, now_ns: int) -> list[Answer]:
        rank, step, label = push.rank, push.header.step, self._format.label
        self._align()
        if step != self._steps[rank]:
            raise ProtocolError(f"step of {label} must be {self._steps[rank]} for rank {rank}, got {step}")
        part, scalars = push.part(self._format), self._scalars.at(rank, step)
        pushed = _Pushed(push, None if part is None else self._format.decoded(part)[0], scalars, now_ns)
        self._steps[rank] += 1
        if push.header.flags & UNCODED:
            self._residuals[rank] = pushed
            return self._collected()
        self._arrived(push, now_ns)
        if scalars is None:
            if part is not None:
                raise ProtocolError(f"step scalars of {label} must come before a gradient of step {step}")
            return [self._answer(push)]  # it only reads
        if not scalars.mark:
            self._apply(pushed)
        else:
            self._marked[rank] = pushed
            self._assigned()
        return self._ready()

    def _assigned(self) -> None:
        """Once all ranks have assigned values, rank 0's count, and then all gradients, in rank order."""
        if self._marked and self._marked.keys() >= set(self.bound.view.ranks):
            if not any(each.scalars is not None and each.scalars.wrote for each in self._marked.values()):
                raise not_written(self._format.label)
            self.parameters.take_put()
            marked, self._marked = self._marked, {}
            if self._delay_compensation:
                self._seen = dict.fromkeys(marked, self.parameters.parameters.copy())
            for each in sorted(marked):
                self._apply(marked[each])

    def released(self) -> list[Answer]:
        with self.lock:
            self._align()
            return self._ready()

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            everyone = self.bound.view.ranks
            late = {rank for each in (self._marked, self._residuals) if each for rank in everyone if rank not in each}
            for rank in self._held:
                if asking in (None, rank):
                    late.update(self.bound.slower(self._done, rank))
            return sorted(late)

    def late(self, ranks: Iterable[int]) -> Late | None:
        """Those who are too far ahead do without a rank that leaves or quiesces; those who assign or collect do not."""
        with self.lock:
            for rank in ranks:
                for waiting in (self._marked, self._residuals):
                    if waiting and rank not in waiting:
                        return Late(rank, next(iter(waiting.values())).push.header.step)
            return None

    def _collected(self) -> list[Answer]:
        """Once all ranks have pushed their residuals, the sum for all of them, added in rank order."""
        if not self._residuals or not self._residuals.keys() >= set(self.bound.view.ranks):
            return []
        collected, self._residuals = self._residuals, {}
        total = np.zeros(self.nbytes // 4, np.float32)
        for rank in sorted(collected):
            if (part := collected[rank].gradient) is not None:
                with np.errstate(all="ignore"):
                    total += part
        payload = total.view(np.uint8).data
        return [Answer((rank,), pushed.push.reply(UNCODED), payload) for rank, pushed in collected.items()]

    def _apply(self, pushed: _Pushed) -> None:
        push, gradient, scalars, arrived_ns = pushed
        if gradient is not None and scalars is not None:
            if push.rank in self._seen:
                with np.errstate(all="ignore"):
                    change = self.parameters.parameters - self._seen[push.rank]
                    for factor in (gradient, gradient, np.float32(self._delay_compensation)):
                        change *= factor
                    gradient = np.add(change, gradient, out=change)
            self.parameters.update(gradient.data, scalars)
            self._record(push, arrived_ns, self.nbytes, push.header.index)
        self._done[push.rank] += 1
        self._held[push.rank] = push._replace(payload=memoryview(b""))  # frees the memory

    def _align(self) -> None:
        """In a new phase nobody is ahead."""
        number = self.bound.phase.number
        if self._phase != number:
            self._phase, self._done = number, dict.fromkeys(self.bound.view.ranks, 0)

    def _ready(self) -> list[Answer]:
        """Answers for all ranks whose pushes have been applied and who may go on."""
        ready = [rank for rank in self._held if not self.bound.slower(self._done, rank)]
        return [self._answer(self._held.pop(rank)) for rank in ready]

    def _answer(self, push: Push) -> Answer:
        """A copy of the parameters: other ranks' pushes change them while it is on its way."""
        rank, target, parameters = push.rank, push.target, self.parameters.parameters
        header = push.reply(0 if self._format.codec is None else UNCODED)
        if self._delay_compensation:
            parameters = self._seen[rank] = parameters.copy()
        if target is not None:
            np.copyto(target.memory, parameters.view(np.uint8))
            return Answer((rank,), header, None, target)
        copied = parameters if self._delay_compensation else parameters.copy()
        return Answer((rank,), header, copied.view(np.uint8).data)
