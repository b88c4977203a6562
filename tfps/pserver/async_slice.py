"""Slices in mode "async": each push is applied as it comes, and its rank alone gets the newest parameters.

A rank's first push, and each after its program has assigned values, waits until all ranks have pushed such a one: then
what rank 0 has put counts, and those pushes are applied in rank order. So no gradient meets parameters that are not
there.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container
from typing import NamedTuple

import numpy as np

from tfps.errors import MismatchError, ProtocolError, TfpsError
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.kept_slice import KeptSlice
from tfps.exchange.layout import Slice
from tfps.exchange.update_spec import StepNumbers, UpdateSpec
from tfps.pserver.owned_slice import Answer, OwnedSlice, Taken
from tfps.pserver.pace import Pace
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.types import Buffer
from tfps.wire.frames import EMPTY, LAST, WHOLE, Header
from tfps.wire.shared_memory import Target


class RankNumbers:
    """The numbers of each rank's latest step of a bucket; ranks step for themselves. Any thread."""

    def __init__(self, name: str, spec: UpdateSpec, workers: int) -> None:
        self.name, self.spec, self._workers = name, spec, workers
        self._lock = threading.Lock()  # guards the next two
        self._latest: dict[int, tuple[int, StepNumbers]] = {}
        self._marks: dict[int, int] = {}  # of ranks that have assigned values and wait for others to do so

    def take(self, rank: int, step: int, data: memoryview) -> TfpsError | None:
        """Takes the numbers of `rank` for `step`, packed; returns why the job must fail: it has assigned other values
        than another rank.

        Raises:
            ProtocolError: they are malformed, or of a step that the rank has begun already.
        """
        numbers = StepNumbers.unpack(data, self.spec)
        with self._lock:
            if rank in self._latest and step <= self._latest[rank][0]:
                raise ProtocolError(
                    f"numbers of bucket '{self.name}' must come once per step, for one after step "
                    f"{self._latest[rank][0]} of rank {rank}, got them for step {step}"
                )
            self._latest[rank] = step, numbers
            if not numbers.mark:
                return None
            for other, mark in self._marks.items():
                if mark != numbers.mark:
                    return MismatchError(
                        f"the workers do not train the same: ranks {other} and {rank} have assigned different values "
                        f"to variables of bucket '{self.name}' or their optimizer's; change them on every rank, and "
                        "alike: between epochs, or after strategy.synchronize()"
                    )
            self._marks[rank] = numbers.mark
            if len(self._marks) == self._workers:
                self._marks = {}
        return None

    def at(self, rank: int, step: int) -> StepNumbers | None:
        """Those of `rank` for `step`; None if none have come."""
        with self._lock:
            latest = self._latest.get(rank)
            return latest[1] if latest is not None and latest[0] == step else None


class SharedParameters(KeptSlice):
    """What a pserver keeps of a slice that ranks update one by one. What is put counts when `take_put` is called."""

    def __init__(self, label: str, spec: UpdateSpec, piece: Slice) -> None:
        super().__init__(label, spec, piece.offset, piece.nbytes)
        self._pieces: list[tuple[int, int, bytes]] = []  # number of the array, first byte, values

    def put(self, number: int, begin: int, values: Buffer) -> None:
        self._check(number, begin, memoryview(values).nbytes)
        self._pieces.append((number, begin, bytes(values)))

    def take_put(self) -> None:
        """Replaces what has been put since the last call; other bytes stay as updates have left them."""
        for number, begin, values in self._pieces:
            super().put(number, begin, values)
        self._pieces = []
        self.take_new()

    def parameters(self) -> Floats:
        """The parameters, which change with the next update.

        Raises:
            ProtocolError: they have not been put.
        """
        self.check_put()
        return self._arrays[0]


class _Pushed(NamedTuple):
    """A push that has not been answered."""

    header: Header
    gradient: Floats | None
    numbers: StepNumbers
    arrived_ns: int


class AsyncSlice(OwnedSlice):
    """A slice to which each rank's gradient is applied as it comes; see `OwnedSlice`.

    Args:
        delay_compensation: lambda of DC-ASGD (https://arxiv.org/abs/1609.08326), 0: off. A gradient g of parameters
            that have become w meanwhile, and were v when the rank got them, counts as g + lambda g g (w - v).
        codec: of pushes; replies are never encoded, as every rank gets other parameters than the rank before.
    """

    __slots__ = (
        "_codec",
        "_delay_compensation",
        "_done",
        "_held",
        "_marked",
        "_numbers",
        "_pace",
        "_parameters",
        "_seen",
        "_stage",
        "_steps",
        "_whole",
        "label",
    )

    def __init__(
        self,
        recorder: Recorder,
        label: str,
        numbers: RankNumbers,
        piece: Slice,
        pace: Pace,
        delay_compensation: float,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(recorder)
        self._codec = codec
        self.label, self._numbers, self._pace = label, numbers, pace
        self._delay_compensation = delay_compensation
        self.kept = self._parameters = SharedParameters(label, numbers.spec, piece)
        # Guarded by the lock, as all below.
        self._steps = [0] * pace.workers  # pushes of each rank
        self._done = [0] * pace.workers  # steps of each rank in this stage
        self._stage = pace.stage.number
        self._marked: dict[int, _Pushed] = {}  # wait for all ranks' assignments
        self._held: dict[int, Header] = {}  # applied, but their ranks are too far ahead
        self._whole: dict[int, tuple[Header, Floats | None]] = {}  # what ranks hold back, until all have pushed it
        self._seen: dict[int, Floats] = {}  # the parameters that each rank has, if delay is compensated

    @property
    def nbytes(self) -> int:
        return self._parameters.nbytes

    @property
    def _gathers(self) -> bool:
        return False

    def take(
        self,
        rank: int,
        header: Header,
        payload: memoryview,
        target: Target | None,
        upcoming: Container[int] = (),
    ) -> Taken:
        """Applies a push, or keeps it until all ranks have assigned values.

        Raises:
            ProtocolError: the frame does not fit the slice, its rank's step, or what has been put.
        """
        now_ns = self._recorder.clock()
        with self.lock:
            self._align()
            gradient = self._checked(rank, header, payload, target)
            numbers = self._numbers.at(rank, header.step)
            self._steps[rank] += 1
            if header.flags & WHOLE:
                self._whole[rank] = header, gradient
                return self._taken(header, self._collected())
            if target is not None:
                self._targets[rank] = target
            if self._recorder.enabled:
                self._recorder.arrived(now_ns, header.step, header.bucket, header.index, rank, NONE)
            if numbers is None:
                if gradient is not None:
                    raise ProtocolError(f"numbers of {self.label} must come before a gradient of step {header.step}")
                return self._taken(header, [self._answer(rank, header)])  # it only reads
            pushed = _Pushed(header, gradient, numbers, now_ns)
            if not numbers.mark:
                self._apply(rank, pushed)
            else:
                self._marked[rank] = pushed
                if len(self._marked) == self._pace.workers:
                    self._take_assigned()
            return self._taken(header, self._answers())

    def released(self) -> list[Answer]:
        """Answers for the ranks that may go on, after others have rested or left."""
        with self.lock:
            self._align()
            return self._answers()

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            late = self._awaited()
            for rank in self._held:
                if asking in (None, rank):
                    late.update(self._pace.slower(self._done, rank))
            return sorted(late)

    def needs(self, rank: int) -> int | None:
        with self.lock:
            if self._marked and rank not in self._marked:
                return next(iter(self._marked.values())).header.step
            if self._whole and rank not in self._whole:
                return next(iter(self._whole.values()))[0].step
            return None

    def waits_for(self, ranks: Collection[int], step: int) -> list[int]:
        with self.lock:
            return sorted(self._awaited().intersection(ranks))

    def _awaited(self) -> set[int]:
        """The ranks without which assignments, or what all hold back, do not go on."""
        everyone = range(self._pace.workers)
        return {rank for each in (self._marked, self._whole) if each for rank in everyone if rank not in each}

    def _taken(self, header: Header, answers: list[Answer]) -> Taken:
        return Taken(header.step, 0, None, {}, answers=answers)

    def _checked(self, rank: int, header: Header, payload: memoryview, target: Target | None) -> Floats | None:
        """The gradient of a push; None if there is none.

        Raises:
            ProtocolError: the push does not fit.
        """
        nbytes, empty, whole = self.nbytes, bool(header.flags & EMPTY), bool(header.flags & WHOLE)
        codec = None if whole else self._codec
        expected = 0 if empty else nbytes if codec is None else codec.wire_bytes(nbytes // 4)
        if header.step != self._steps[rank]:
            raise ProtocolError(f"step of {self.label} must be {self._steps[rank]} for rank {rank}, got {header.step}")
        if len(payload) != expected or header.flags & LAST or (whole and self._codec is None):
            raise ProtocolError(
                f"payload of {self.label} must have {expected} bytes and no LAST flag, nor WHOLE without a codec, got "
                f"{len(payload)} bytes and flags {header.flags}"
            )
        if target is not None and target.place.nbytes != nbytes:
            raise ProtocolError(f"the place of {self.label} must have {nbytes} bytes, got {target.place}")
        if empty:
            return None
        if codec is None:
            return np.frombuffer(payload, np.uint8).view(np.float32)
        gradient = np.empty(nbytes // 4, np.float32)
        codec.decode(np.frombuffer(payload, np.uint8), gradient)
        return gradient

    def _collected(self) -> list[Answer]:
        """Once all ranks have pushed what they hold back, its sum for each of them, added in rank order."""
        if len(self._whole) < self._pace.workers:
            return []
        total = np.zeros(self.nbytes // 4, np.float32)
        for rank in sorted(self._whole):
            if (part := self._whole[rank][1]) is not None:
                total += part
        collected, self._whole = self._whole, {}
        return [
            Answer(rank, header._replace(flags=WHOLE), total.nbytes, total.view(np.uint8).data)
            for rank, (header, _) in collected.items()
        ]

    def _align(self) -> None:
        """In a new stage nobody is ahead."""
        number = self._pace.stage.number
        if self._stage != number:
            self._stage, self._done = number, [0] * self._pace.workers

    def _take_assigned(self) -> None:
        """All ranks have assigned values: rank 0's count, then their gradients, in rank order."""
        self._parameters.take_put()
        marked, self._marked = self._marked, {}
        if self._delay_compensation:
            now = self._parameters.parameters().copy()
            self._seen = dict.fromkeys(marked, now)
        for rank in sorted(marked):
            self._apply(rank, marked[rank])

    def _apply(self, rank: int, pushed: _Pushed) -> None:
        if pushed.gradient is not None:
            self._parameters.update(self._compensated(rank, pushed.gradient).data, pushed.numbers)
            if self._recorder.enabled:
                self._record(rank, pushed.header, self.nbytes, pushed.arrived_ns)
        self._done[rank] += 1
        self._held[rank] = pushed.header

    def _compensated(self, rank: int, gradient: Floats) -> Floats:
        if not self._delay_compensation or rank not in self._seen:
            return gradient
        change = self._parameters.parameters() - self._seen[rank]
        change *= gradient
        change *= gradient
        change *= np.float32(self._delay_compensation)
        change += gradient
        return change

    def _answers(self) -> list[Answer]:
        """Answers of all ranks that have been answered nothing yet and may go on."""
        ready = [rank for rank in self._held if self._pace.may_go_on(self._done, rank)]
        return [self._answer(rank, self._held.pop(rank)) for rank in ready]

    def _answer(self, rank: int, header: Header) -> Answer:
        """A copy of the parameters: other ranks' pushes change them while it is on its way."""
        parameters = self._parameters.parameters()
        header = header._replace(flags=WHOLE if self._codec is not None else 0)
        if self._delay_compensation:
            self._seen[rank] = parameters.copy()
        if (target := self._targets.pop(rank, None)) is not None:
            np.copyto(target.memory, parameters.view(np.uint8))
            return Answer(rank, header, target.place.nbytes, None, target)
        copied = self._seen[rank] if self._delay_compensation else parameters.copy()
        return Answer(rank, header, copied.nbytes, copied.view(np.uint8).data)
