"""Slices on their owner, which answer pushes with `Answer`s: here rounds of all ranks, else see async_slice.py."""

from __future__ import annotations

import abc
import threading
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple

import numpy as np

from tfps.errors import MismatchError, ProtocolError, TfpsError, WorkerLostError
from tfps.exchange.aggregate import GatherRound, SliceFormat, SumRound
from tfps.exchange.codecs import Floats
from tfps.exchange.layout import cut
from tfps.exchange.parameter_shard import Delta, ParameterShard
from tfps.exchange.rules import flushed
from tfps.exchange.update_spec import WEIGHT, StepScalars, UpdateSpec, difference
from tfps.membership.view import RankSets, View
from tfps.trace.capture import NONE
from tfps.trace.capture import Kind as SpanKind
from tfps.trace.recorder import Recorder
from tfps.types import Array
from tfps.wire.frames import EMPTY, LAST, UNCODED, Header, Kind
from tfps.wire.send_queue import Encoding
from tfps.wire.shared_memory import Target

_NOTHING = memoryview(b"")
_ROUNDING = 1e-6  # of a quorum times a number of workers


class Push(NamedTuple):
    """A PUSH of one rank. Its payload is kept, and may be written to unless it is in shared memory (`target`)."""

    rank: int
    header: Header
    payload: memoryview
    target: Target | None = None

    def reply(self, flags: int, generation: int = 1, index: int | None = None) -> Header:
        """The header of what answers it, with the pushes of the set `generation` of ranks; `index`: default its own."""
        _, _, bucket, own, priority, step, _, _ = self.header
        return Header(Kind.REPLY, flags, bucket, own if index is None else index, priority, step, 0, generation)

    def part(self, format_: SliceFormat) -> Array | None:
        """What it contributes; None: nothing."""
        flags, payload, target = self.header.flags, self.payload, self.target
        encoded, uncoded = format_.codec is not None, bool(flags & UNCODED)
        expected = 0 if flags & EMPTY else format_.part_bytes(uncoded)
        if len(payload) != expected or flags & LAST or (target is not None if encoded else uncoded):
            rule = "in its frame and no LAST flag" if encoded else "and no LAST or UNCODED flag"
            raise ProtocolError(
                f"payload of {format_.label} must have {expected} bytes {rule}, got {len(payload)} bytes and flags "
                f"{flags}"
            )
        if target is not None and target.place.nbytes != format_.nbytes:
            raise ProtocolError(f"the place of {format_.label} must have {format_.nbytes} bytes, got {target.place}")
        return None if flags & EMPTY else format_.part(payload, uncoded)


class Answer(NamedTuple):
    """A reply to `ranks`, with `target` to one whose shared memory takes the payload; None: it is there already."""

    ranks: Collection[int]
    header: Header
    payload: memoryview | Encoding | None
    target: Target | None = None


class Late(NamedTuple):
    """A rank without whose push others do not go on, and the step of that."""

    rank: int
    step: int


class OwnedSlice(abc.ABC):
    """A slice (or a whole gather, of 0 `nbytes`) on its owner; any thread. Put and Get reach its `parameters`.

    `sets` numbers the ranks whose pushes are in an answer.
    """

    def __init__(
        self, recorder: Recorder, nbytes: int, sets: RankSets, parameters: ParameterShard | None = None
    ) -> None:
        self._recorder, self.nbytes, self._sets, self.parameters = recorder, nbytes, sets, parameters
        self.lock = threading.Lock()  # guards all

    @abc.abstractmethod
    def take(self, push: Push, upcoming: Container[int] = ()) -> tuple[list[Answer], int]:
        """Takes a push; returns answers and by how many ns it is late. This slice ends before a step of `upcoming`."""

    @abc.abstractmethod
    def change_view(self, view: View, upcoming: Container[int] = ()) -> list[Answer]:
        """Waits for the ranks of `view` from now on; returns answers that waited for others. What had come counts."""

    @abc.abstractmethod
    def missing(self, asking: int | None = None) -> list[int]:
        """The ranks that others wait for, or `asking` alone if it is not the same for all."""

    @abc.abstractmethod
    def late(self, ranks: Iterable[int]) -> Late | None:
        """The first of `ranks` that others wait for and cannot do without."""

    @property
    def steps_over(self) -> int:
        """How many rounds are over; 0 if ranks step apart."""
        return 0

    def released(self) -> list[Answer]:
        """Answers for ranks that may go on after others have quiesced or left."""
        return []

    def _arrived(self, push: Push, now_ns: int) -> None:
        header = push.header
        if self._recorder.enabled:
            self._recorder.arrived(now_ns, header.step, header.bucket, header.index, push.rank, NONE)

    def _record(self, push: Push, begin_ns: int, nbytes: int, index: int, what: SpanKind = "aggregate") -> None:
        """Records what `push` has completed: one span, also for all pieces of a gather."""
        header = push.header
        if self._recorder.enabled:
            of_push = {"step": header.step, "bucket": header.bucket, "priority": header.priority, "rank": push.rank}
            self._recorder.span(what, begin_ns, self._recorder.clock(), slice=index, nbytes=nbytes, **of_push)


class RoundSlice(OwnedSlice):
    """All ranks push a step; the last of them completes it, and then all are answered."""

    round: SumRound | GatherRound
    _first_ns = 0  # first push of this round, on the recorder's clock
    _latest: Push  # of this round, without its payload

    @property
    def steps_over(self) -> int:
        return self.round.step

    def take(self, push: Push, upcoming: Container[int] = ()) -> tuple[list[Answer], int]:
        now_ns, round_ = self._recorder.clock(), self.round
        with self.lock:
            if push.rank not in round_.view.ranks:
                return [], 0  # it has just been lost
            if not round_.arrived:
                self._first_ns = now_ns
            self._add(push)
            self._arrived(push, now_ns)
            self._latest = Push(push.rank, push.header, _NOTHING)
            wait_ns = now_ns - self._first_ns if push.rank in round_.arrived else 0
            return self._completed(upcoming) if round_.complete else [], wait_ns

    def change_view(self, view: View, upcoming: Container[int] = ()) -> list[Answer]:
        with self.lock:
            self.round.view = view
            return self._completed(upcoming) if self.round.arrived and self.round.complete else []

    def _completed(self, upcoming: Container[int]) -> list[Answer]:
        latest = self._latest
        return self._finish(latest, self._sets.number(self.round.arrived), latest.header.step + 1 in upcoming)

    def missing(self, asking: int | None = None) -> list[int]:
        with self.lock:
            return self.round.missing() if self.round.arrived else []

    def late(self, ranks: Iterable[int]) -> Late | None:
        with self.lock:
            arrived = self.round.arrived
            return next((Late(rank, self.round.step) for rank in ranks if arrived and rank not in arrived), None)

    @abc.abstractmethod
    def _add(self, push: Push) -> None: ...

    @abc.abstractmethod
    def _finish(self, push: Push, generation: int, last: bool) -> list[Answer]:
        """The answers to the round that `push` has completed, with the set `generation`; the slice's `last` or not."""


class SumSlice(RoundSlice):
    """A round whose sum comes back, or updates `parameters`: then these do or, with a codec, their change.

    With a codec whoever first sends the answer encodes it, once, so that all ranks get the same bytes. What a sum's
    codec cannot express is the **residual**, which is added to the next sum; that of a change is in the next change.
    """

    round: SumRound

    def __init__(
        self,
        recorder: Recorder,
        round_: SumRound,
        sets: RankSets,
        parameters: ParameterShard | None = None,
        scalars: RoundScalars | None = None,
    ) -> None:
        super().__init__(recorder, round_.format.nbytes, sets, parameters)
        self.round, self._scalars, self._codec = round_, scalars, round_.format.codec
        self._residual: Floats | None = None  # made when needed: while a job is tuned there are two slices of the same
        self._targets: dict[int, Target] = {}  # of the ranks whose answer goes to shared memory

    def _add(self, push: Push) -> None:
        rank, header, payload, target = push
        part = push.part(self.round.format)
        owned = target is None and not payload.readonly
        self.round.add(rank, header.step, part, uncoded=bool(header.flags & UNCODED), owned=owned)
        if target is not None:
            self._targets[rank] = target

    def _finish(self, push: Push, generation: int, last: bool) -> list[Answer]:
        if self.parameters is None or self._scalars is None:
            payload, flags = self._sum(last)
        else:
            payload, flags = self._updated(self.parameters, self._scalars)
        self._record(push, self._first_ns, self.nbytes, push.header.index)
        header, targets, self._targets = push.reply(flags, generation), self._targets, {}
        ranks = self.round.view.ranks
        answers = [Answer((rank,), header, payload, target) for rank, target in targets.items() if rank in ranks]
        answers.append(Answer([rank for rank in ranks if rank not in targets], header, payload))
        return answers

    def awaited(self, quorum: float) -> tuple[int, list[int]]:
        """The ranks that have not pushed once a `quorum` has, and the step; nobody while ranks assign values."""
        with self.lock:
            step, arrived = self.round.step, len(self.round.arrived)
            enough = arrived and arrived >= quorum * len(self.round.view.ranks) - _ROUNDING
            if not enough or self.round.uncoded or self._scalars is None or self._scalars.marked(step):
                return step, []
            return step, self.round.missing()

    def _sum(self, last: bool) -> tuple[memoryview | Encoding, int]:
        """The sum and its flags: uncoded, without a residual, if ranks collect theirs or it is the last."""
        uncoded, contributed = self.round.uncoded, self.round.contributed
        total = self.round.finish()
        if self._codec is None:
            return total, 0
        values = np.frombuffer(total, np.float32)
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses the residual.
        if not uncoded and not last:
            if contributed and self._codec.feeds_back and self._residual is None:
                self._residual = np.zeros(self.nbytes // 4, np.float32)
            return Encoding(self._codec, values, self._residual if contributed else None), 0
        residual, self._residual = self._residual, None
        if residual is not None and residual.any():  # adding 0 makes -0 to 0
            with np.errstate(all="ignore"):
                values = np.add(values, residual, out=residual)
        return values.view(np.uint8).data, UNCODED

    def _updated(self, parameters: ParameterShard, step_scalars: RoundScalars) -> tuple[memoryview | Encoding, int]:
        if self.round.uncoded:  # the sum of the ranks' residuals, which changes nothing here
            step_scalars.skip(self.round.step)
            return self.round.finish(), UNCODED
        scalars = step_scalars.at(self.round.step)
        if scalars.mark and not step_scalars.writers.intersection(self.round.arrived):
            raise not_written(self.round.label)
        parameters.take_put()
        share = step_scalars.share(self.round.arrived, self.round.view)
        total = self.round.finish()
        if share != 1.0:
            with flushed(), np.errstate(all="ignore"):
                total = np.multiply(np.frombuffer(total, np.float32), np.float32(share)).view(np.uint8).data
        updated = parameters.update(total, scalars)
        if self._codec is None:
            return updated, 0
        # The reply before this one has reached all ranks, so it has been encoded: nobody else uses the view.
        return Encoding(Delta(self._codec, parameters.shadow), np.frombuffer(updated, np.float32), None), 0


def not_written(label: str) -> WorkerLostError:
    """No worker that is left has written what all have assigned."""
    return WorkerLostError(
        f"a worker was lost before it had written what all ranks have assigned ({label}): begin the job again, from "
        "its last checkpoint"
    )


class GatherSlice(RoundSlice):
    """A round whose payloads are returned one by one."""

    round: GatherRound

    def __init__(self, recorder: Recorder, round_: GatherRound, sets: RankSets) -> None:
        super().__init__(recorder, 0, sets)
        self.round = round_

    def _add(self, push: Push) -> None:
        header = push.header
        self.round.add(push.rank, header.step, header.index, push.payload, bool(header.flags & LAST))

    def _finish(self, push: Push, generation: int, last: bool) -> list[Answer]:
        result = self.round.finish()
        self._record(push, self._first_ns, len(result), NONE)
        answers = []
        for index, (offset, nbytes) in enumerate(cut(len(result), self.round.slice_bytes)):
            end = offset + nbytes
            header = push.reply(LAST if end == len(result) else 0, generation, index)
            answers.append(Answer(self.round.view.ranks, header, result[offset:end]))
        return answers


class RoundScalars:
    """The scalars of a bucket's current step, from all ranks; any thread."""

    def __init__(self, name: str, spec: UpdateSpec, step: int = 0) -> None:
        self.name, self.spec = name, spec
        self._lock = threading.Lock()  # guards the next two
        self._step = step
        self._by_rank: dict[int, StepScalars] = {}

    def take(self, rank: int, step: int, data: memoryview, members: Container[int]) -> TfpsError | None:
        """Takes packed scalars; returns why the job must fail, if another member's differ from those of `rank`."""
        scalars = StepScalars.unpack(data, self.spec)
        with self._lock:
            if step == self._step + 1 and self._by_rank:  # some rank has the whole reply: nobody needs these any more
                self._step, self._by_rank = step, {}
            if step != self._step or rank in self._by_rank:
                raise ProtocolError(
                    f"step scalars of bucket '{self.name}' must come once per step, for step {self._step} or the next, "
                    f"got them for step {step}"
                )
            for other, theirs in list(self._by_rank.items()):
                if (what := difference(self.spec.scalars, theirs, scalars)) is None:
                    continue
                if other not in members:  # it was lost, maybe as it differs
                    del self._by_rank[other]
                else:
                    return MismatchError(
                        f"the workers do not train the same: at step {step} of bucket '{self.name}' ranks {other} and "
                        f"{rank} have different {what}; change them on every rank, and alike"
                    )
            self._by_rank[rank] = scalars
        return None

    def share(self, ranks: Collection[int], view: View) -> float:
        """By what the sum of the current step is multiplied, if it has the pushes of `ranks`; see `MEAN`."""
        if WEIGHT not in self.spec.scalars:
            return 1.0
        place = self.spec.scalars.index(WEIGHT)
        with self._lock:
            weight = sum(scalars.values[place] for rank, scalars in self._by_rank.items() if rank in ranks)
        return view.workers / weight if weight else 1.0

    def marked(self, step: int) -> bool:
        """Whether the values that ranks have assigned come with `step`."""
        with self._lock:
            return step == self._step and any(scalars.mark for scalars in self._by_rank.values())

    @property
    def writers(self) -> set[int]:
        """The ranks that have written what all have assigned before this step."""
        with self._lock:
            return {rank for rank, scalars in self._by_rank.items() if scalars.wrote}

    def skip(self, step: int) -> None:
        """Notes that `step` is over and was none of training: it had no scalars."""
        with self._lock:
            if step >= self._step:
                self._step, self._by_rank = step + 1, {}

    def at(self, step: int) -> StepScalars:
        """The first rank's scalars of `step`, which is complete."""
        with self._lock:
            if step != self._step or not self._by_rank:
                raise ProtocolError(f"step scalars of bucket '{self.name}' must come before the slices of step {step}")
            return self._by_rank[min(self._by_rank)]
