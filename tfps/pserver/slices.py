"""Slices on their owner. Each push is answered with `Answer`s, at once or when others have pushed.

A slice is made of three things:

* a **format** (`SliceFormat`): how its numbers travel, as they are or encoded by a codec;
* a **state**: what becomes of a sum. `SumState` returns it, `UpdatedState` returns the parameters that it has updated,
  `DeltaState` the encoded change of these since the workers' view of them;
* an **admission**: which pushes count together, and when they are answered. `SumAdmission` and `GatherAdmission` are
  rounds of all ranks, `AsyncAdmission` (async_admission.py) takes each push by itself and bounds how far ranks drift
  apart.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Collection, Container, Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from tfps.errors import MismatchError, ProtocolError, TfpsError
from tfps.exchange.aggregate import GatherRound, Part, SliceFormat, SumRound
from tfps.exchange.codecs import Codec, Floats
from tfps.exchange.layout import cut
from tfps.exchange.parameter_shard import Delta, ParameterShard
from tfps.exchange.update_spec import StepScalars, UpdateSpec, difference
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import EMPTY, LAST, WHOLE, Header, Kind
from tfps.wire.send_queue import Encoding, Outgoing, SendQueue, put_in_all
from tfps.wire.shared_memory import Target


class Push(NamedTuple):
    """A PUSH of one rank. Its payload is kept, and may be written to unless it is in shared memory (`target`)."""

    rank: int
    header: Header
    payload: memoryview
    target: Target | None = None

    def reply(self, flags: int = 0) -> Header:
        """The header of what answers it."""
        return self.header._replace(kind=Kind.REPLY, flags=flags, received=0)

    def part(self, format_: SliceFormat) -> Part | None:
        """What it contributes; None: nothing."""
        flags, payload, target = self.header.flags, self.payload, self.target
        encoded, whole = format_.codec is not None, bool(flags & WHOLE)
        expected = 0 if flags & EMPTY else format_.part_bytes(whole)
        if len(payload) != expected or flags & LAST or (target is not None if encoded else whole):
            rule = "in its frame and no LAST flag" if encoded else "and no LAST or WHOLE flag"
            raise ProtocolError(
                f"payload of {format_.label} must have {expected} bytes {rule}, got {len(payload)} bytes and flags "
                f"{flags}"
            )
        if target is not None and target.place.nbytes != format_.nbytes:
            raise ProtocolError(f"the place of {format_.label} must have {format_.nbytes} bytes, got {target.place}")
        return None if flags & EMPTY else format_.part(payload, whole)


class Answer(NamedTuple):
    """A reply to `ranks`: its header, and the payload or what makes that when it is sent.

    With `target`, for one rank only, the payload goes there instead of into a frame; None: it is there already.
    """

    ranks: Collection[int]
    header: Header
    payload: memoryview | Encoding | None
    target: Target | None = None


class Taken(NamedTuple):
    """Result of a push.

    Attributes:
        answers: what is to be sent now, maybe to other ranks, or to nobody.
        wait_ns: this rank's delay after the first rank's push.
    """

    answers: Collection[Answer]
    wait_ns: int = 0


def send(queues: Mapping[int, SendQueue], answers: Iterable[Answer]) -> None:
    """Puts answers into the queues of their ranks."""
    for ranks, header, payload, target in answers:
        if isinstance(payload, Encoding):
            for rank in ranks:
                queues[rank].put([Outgoing(header, payload.nbytes, encoding=payload)])
        elif target is not None:
            for rank in ranks:
                queues[rank].put([Outgoing(header, target.place.nbytes, payload, target=target)])
        elif payload is not None:
            put_in_all([queues[rank] for rank in ranks], [(header, payload)])


class Late(NamedTuple):
    """A rank without whose push others do not go on, and the step of that."""

    rank: int
    step: int


class Admission(abc.ABC):
    """Decides which pushes of a slice count together, and when they are answered. The slice's lock guards it.

    Attributes:
        nbytes: of the slice; 0 for a gather.
    """

    nbytes: int

    @abc.abstractmethod
    def take(self, push: Push, now_ns: int, upcoming: Container[int]) -> Taken:
        """See `OwnedSlice.take`."""

    @abc.abstractmethod
    def missing(self, asking: int | None) -> list[int]:
        """The ranks that others wait for, or `asking` alone if it is not the same for all."""

    @abc.abstractmethod
    def late(self, ranks: Iterable[int]) -> Late | None:
        """The first of `ranks` that others wait for and cannot do without."""

    def quiesced(self) -> Collection[int]:
        """The ranks that push nothing more before all are quiesced."""
        return ()

    def released(self) -> Collection[Answer]:
        """Answers for the ranks that may go on after others have quiesced or left."""
        return ()


class OwnedSlice:
    """A slice, or a whole gather, on its owner; any thread. A push that does not fit it raises ProtocolError.

    Attributes:
        lock: guards `admission` and `parameters`.
        parameters: what Put and Get reach; None if nothing is kept.
    """

    __slots__ = ("_recorder", "admission", "lock", "parameters")

    def __init__(self, recorder: Recorder, admission: Admission, parameters: ParameterShard | None = None) -> None:
        self._recorder, self.admission, self.parameters = recorder, admission, parameters
        self.lock = threading.Lock()

    def take(self, push: Push, upcoming: Container[int] = ()) -> Taken:
        """Takes a push, and maybe completes what others have waited for.

        Args:
            upcoming: steps from which the bucket is cut anew, so that this slice ends.
        """
        now_ns = self._recorder.clock()
        with self.lock:
            return self.admission.take(push, now_ns, upcoming)

    def missing(self, asking: int | None = None) -> list[int]:
        """See `Admission.missing`."""
        with self.lock:
            return self.admission.missing(asking)

    def late(self, ranks: Iterable[int]) -> Late | None:
        """See `Admission.late`."""
        with self.lock:
            return self.admission.late(ranks)

    def released(self) -> Collection[Answer]:
        """See `Admission.released`."""
        with self.lock:
            return self.admission.released()


# States


class State(Protocol):
    """What becomes of the sum of a round."""

    def finish(self, round_: SumRound, last: bool) -> tuple[memoryview | Encoding, int]:
        """Takes the sum of a complete round; returns payload and flags of the answer.

        Args:
            last: whether the slice is cut anew after it.
        """


class SumState:
    """Returns the sum. With a codec whoever first sends it encodes it, once, so that all ranks get the same bytes.

    What the codec cannot express is the **residual**, which is added to the next sum. An answer is whole (not encoded)
    and leaves no residual if the ranks collect theirs, and in the last step of a slice that is cut anew.
    """

    __slots__ = ("_codec", "_residual")

    def __init__(self, format_: SliceFormat) -> None:
        self._codec = codec = format_.codec
        feeds_back = codec is not None and codec.feeds_back
        self._residual: Floats | None = np.zeros(format_.nbytes // 4, np.float32) if feeds_back else None

    def finish(self, round_: SumRound, last: bool) -> tuple[memoryview | Encoding, int]:
        whole, contributed = round_.whole, round_.contributed
        total = round_.finish()
        if self._codec is None:
            return total, 0
        values = np.frombuffer(total, np.float32)
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses the residual.
        if not whole and not last:
            return Encoding(self._codec, values, self._residual if contributed else None), 0
        if self._residual is not None:
            values = values + self._residual
            self._residual[...] = 0
        return values.view(np.uint8).data, WHOLE


class UpdatedState:
    """Updates parameters with the sum and returns them."""

    __slots__ = ("_parameters", "_scalars")

    def __init__(self, parameters: ParameterShard, scalars: RoundScalars) -> None:
        self._parameters, self._scalars = parameters, scalars

    def finish(self, round_: SumRound, last: bool) -> tuple[memoryview | Encoding, int]:
        return self._updated(round_), 0

    def _updated(self, round_: SumRound) -> memoryview:
        """The new parameters."""
        scalars = self._scalars.at(round_.step)
        self._parameters.take_put()
        return self._parameters.update(round_.finish(), scalars)


class DeltaState(UpdatedState):
    """Updates parameters with the sum and returns their change since the workers' view.

    There is no residual: what an answer cannot express is in the next one. A whole step changes nothing that is kept;
    its answer is the sum of the ranks' residuals.
    """

    __slots__ = ("_codec",)

    def __init__(self, parameters: ParameterShard, scalars: RoundScalars, codec: Codec) -> None:
        super().__init__(parameters, scalars)
        self._codec = codec

    def finish(self, round_: SumRound, last: bool) -> tuple[memoryview | Encoding, int]:
        if round_.whole:
            self._scalars.skip(round_.step)
            return round_.finish(), WHOLE
        parameters = np.frombuffer(self._updated(round_), np.float32)
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses the view.
        return Encoding(Delta(self._codec, self._parameters.worker_view), parameters, None), 0


class RoundScalars:
    """The scalars of a bucket's current step, from all ranks; any thread."""

    def __init__(self, name: str, spec: UpdateSpec) -> None:
        self.name, self.spec = name, spec
        self._lock = threading.Lock()  # guards the next two
        self._step = 0
        self._by_rank: dict[int, StepScalars] = {}

    def take(self, rank: int, step: int, data: memoryview) -> TfpsError | None:
        """Takes the scalars of `rank` for `step`, packed; returns why the job must fail, if another rank's differ.

        A rank sends those of the next step when it has the whole reply to this one: nobody needs this one's any more.
        """
        scalars = StepScalars.unpack(data, self.spec)
        with self._lock:
            if step == self._step + 1 and self._by_rank:
                self._step, self._by_rank = step, {}
            if step != self._step or rank in self._by_rank:
                raise ProtocolError(
                    f"step scalars of bucket '{self.name}' must come once per step, for step {self._step} or the next, "
                    f"got them for step {step}"
                )
            for other, theirs in self._by_rank.items():
                if (what := difference(self.spec.scalars, theirs, scalars)) is not None:
                    return MismatchError(
                        f"the workers do not train the same: at step {step} of bucket '{self.name}' ranks {other} and "
                        f"{rank} have different {what}; change them on every rank, and alike"
                    )
            self._by_rank[rank] = scalars
        return None

    def skip(self, step: int) -> None:
        """Notes that `step` is over and was none of training: it had no scalars."""
        with self._lock:
            if step >= self._step:
                self._step, self._by_rank = step + 1, {}

    def at(self, step: int) -> StepScalars:
        """Rank 0's scalars of `step`, which is complete."""
        with self._lock:
            if step != self._step or 0 not in self._by_rank:
                raise ProtocolError(f"step scalars of bucket '{self.name}' must come before the slices of step {step}")
            return self._by_rank[0]


# Rounds of all ranks


class RoundAdmission(Admission):
    """All ranks push a step; the last of them completes it, and then all are answered."""

    round: SumRound | GatherRound

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._first_ns = 0  # first push of this round, on the recorder's clock

    def take(self, push: Push, now_ns: int, upcoming: Container[int]) -> Taken:
        recorder, round_, header = self._recorder, self.round, push.header
        if not round_.started:
            self._first_ns = now_ns
        self._add(push)
        if recorder.enabled:
            recorder.arrived(now_ns, header.step, header.bucket, header.index, push.rank, NONE)
        wait_ns = now_ns - self._first_ns if push.rank in round_.arrived else 0
        if not round_.complete:
            return Taken((), wait_ns)
        answers, nbytes, index = self._finish(push, header.step + 1 in upcoming)
        if recorder.enabled:
            record(recorder, push, self._first_ns, nbytes, index)
        return Taken(answers, wait_ns)

    def missing(self, asking: int | None) -> list[int]:
        return self.round.missing() if self.round.started else []

    def late(self, ranks: Iterable[int]) -> Late | None:
        if not self.round.started:
            return None
        return next((Late(rank, self.round.step) for rank in ranks if rank not in self.round.arrived), None)

    @abc.abstractmethod
    def _add(self, push: Push) -> None: ...

    @abc.abstractmethod
    def _finish(self, push: Push, last: bool) -> tuple[list[Answer], int, int]:
        """The answers to the round that `push` has completed, its result's size, and the slice's number."""


class SumAdmission(RoundAdmission):
    """A round whose sum goes through `state`."""

    round: SumRound

    def __init__(self, recorder: Recorder, round_: SumRound, state: State) -> None:
        super().__init__(recorder)
        self.round, self.nbytes = round_, round_.format.nbytes
        self._state = state
        self._targets: dict[int, Target] = {}  # of the ranks whose answer goes to shared memory

    def _add(self, push: Push) -> None:
        rank, header, payload, target = push
        part = push.part(self.round.format)
        owned = target is None and not payload.readonly
        self.round.add(rank, header.step, part, whole=bool(header.flags & WHOLE), owned=owned)
        if target is not None:
            self._targets[rank] = target

    def _finish(self, push: Push, last: bool) -> tuple[list[Answer], int, int]:
        payload, flags = self._state.finish(self.round, last)
        header, everyone, targets = push.reply(flags), self.round.view.ranks, self._targets
        if not targets:
            return [Answer(everyone, header, payload)], self.nbytes, push.header.index
        self._targets = {}
        answers = [Answer((rank,), header, payload, target) for rank, target in targets.items()]
        answers.append(Answer([rank for rank in everyone if rank not in targets], header, payload))
        return answers, self.nbytes, push.header.index


class GatherAdmission(RoundAdmission):
    """A round whose payloads are returned one by one."""

    round: GatherRound
    nbytes = 0

    def __init__(self, recorder: Recorder, round_: GatherRound) -> None:
        super().__init__(recorder)
        self.round = round_

    def _add(self, push: Push) -> None:
        header = push.header
        self.round.add(push.rank, header.step, header.index, push.payload, bool(header.flags & LAST))

    def _finish(self, push: Push, last: bool) -> tuple[list[Answer], int, int]:
        result, everyone = self.round.finish(), self.round.view.ranks
        pieces = cut(len(result), self.round.slice_bytes)
        answers = []
        for index, piece in enumerate(pieces):
            header = push.reply(LAST if index == len(pieces) - 1 else 0)._replace(index=index)
            answers.append(Answer(everyone, header, result[piece.offset : piece.offset + piece.nbytes]))
        return answers, len(result), NONE


def record(recorder: Recorder, push: Push, begin_ns: int, nbytes: int, index: int) -> None:
    """Records what `push` has completed: one span, also for all pieces of a gather."""
    header = push.header
    recorder.span(
        "aggregate",
        begin_ns,
        recorder.clock(),
        step=header.step,
        bucket=header.bucket,
        slice=index,
        priority=header.priority,
        nbytes=nbytes,
        rank=push.rank,
    )
