"""A slice on its owner: its round, the lock that guards it, and its recording.

Tested in tests/pserver/test_job.py.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Sequence
from typing import NamedTuple

import numpy as np

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import GatherRound, SumRound
from tfps.exchange.kept_slice import KeptSlice
from tfps.pserver.updated_slice import UpdatedSlice
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.encoding import Encoding
from tfps.wire.frames import EMPTY, LAST, WHOLE, Header
from tfps.wire.shared_memory import Target


class Answer(NamedTuple):
    """What one rank gets for its push `header`; with `target` it is there already, else it is the payload.

    The reply has the header's flags.
    """

    rank: int
    header: Header
    nbytes: int
    payload: memoryview | None
    target: Target | None = None


class Taken(NamedTuple):
    """Result of a push.

    Attributes:
        step: of its round or, if it completed that, of the next one.
        wait_ns: this rank's delay after the first rank's push.
        result: of the round, if complete.
        targets: of the ranks that get the sum in shared memory, not in a frame.
        encoding: of the result, where that is to be encoded.
        flags: of the reply's frames.
        answers: for single ranks, where there are no rounds.
    """

    step: int
    wait_ns: int
    result: memoryview | None
    targets: dict[int, Target]
    encoding: Encoding | None = None
    flags: int = 0
    answers: Sequence[Answer] = ()


class OwnedSlice:
    """A slice of a sum, or a whole gather. Set `round` once, before anything else; `kept` if it has an update."""

    __slots__ = ("_recorder", "_targets", "first_ns", "kept", "lock", "round")

    def __init__(self, recorder: Recorder) -> None:
        self.lock = threading.Lock()
        self.first_ns = 0  # first push of this round, on the recorder's clock
        self.round: SumRound | GatherRound
        self.kept: KeptSlice | None = None  # guarded by the lock, too
        self._targets: dict[int, Target] = {}
        self._recorder = recorder

    def take(
        self,
        rank: int,
        header: Header,
        payload: memoryview,
        target: Target | None,
        upcoming: Container[int] = (),
    ) -> Taken:
        """Adds a push to the round. Keeps `payload`, and may write to it unless it is in shared memory (`target`).

        Args:
            upcoming: steps from which the bucket is cut anew, so that this slice ends.

        Raises:
            ProtocolError: the frame does not fit the slice or its step.
        """
        recorder, result, encoding, flags = self._recorder, None, None, 0
        targets: dict[int, Target] = {}
        now_ns = recorder.clock()
        with self.lock:
            if not self.round.started:
                self.first_ns = now_ns
            self._add(rank, header, payload, target)
            if recorder.enabled:
                recorder.arrived(now_ns, header.step, header.bucket, header.index, rank, NONE)
            wait_ns = now_ns - self.first_ns if rank in self.round.arrived else 0
            if self.round.complete:
                result, encoding, flags = self._finish(header.step + 1 in upcoming)
                targets, self._targets = self._targets, targets
                if recorder.enabled:
                    self._record(rank, header, len(result), self.first_ns)
            return Taken(self.round.step, wait_ns, result, targets, encoding, flags)

    @property
    def _gathers(self) -> bool:
        return isinstance(self.round, GatherRound)

    def _finish(self, last: bool) -> tuple[memoryview, Encoding | None, int]:
        """Returns the result of the complete round, its encoding, and the reply's flags; `last`: the slice ends."""
        step = self.round.step
        result = self.round.finish()
        return self.kept.updated(result, step) if isinstance(self.kept, UpdatedSlice) else result, None, 0

    @property
    def nbytes(self) -> int:
        """Of a sum; 0 for a gather."""
        return self.round.nbytes if isinstance(self.round, SumRound) else 0

    def missing(self, asking: int | None = None) -> list[int]:
        """The ranks that others wait for, or `asking` alone if it is not the same for all."""
        with self.lock:
            return self.round.missing() if self.round.started else []

    def needs(self, rank: int) -> int | None:
        """The step for which others wait and that does not end without `rank`; None if there is none."""
        with self.lock:
            return self.round.step if self.round.started and rank not in self.round.arrived else None

    def waits_for(self, ranks: Collection[int], step: int) -> list[int]:
        """Those of `ranks` that the round of `step` waits for; none if it is over."""
        with self.lock:
            if self.round.step != step:
                return []
            return [rank for rank in ranks if rank not in self.round.arrived]

    def _add(self, rank: int, header: Header, payload: memoryview, target: Target | None) -> None:
        round_ = self.round
        if isinstance(round_, GatherRound):
            round_.add(rank, header.step, header.index, payload, bool(header.flags & LAST))
            return
        expected = 0 if header.flags & EMPTY else round_.nbytes
        if len(payload) != expected or header.flags & (LAST | WHOLE):
            raise ProtocolError(
                f"payload of {round_.label} must have {expected} bytes and no LAST or WHOLE flag, got {len(payload)} "
                f"bytes and flags {header.flags}"
            )
        if target is not None:
            if target.place.nbytes != round_.nbytes:
                raise ProtocolError(f"the place of {round_.label} must have {round_.nbytes} bytes, got {target.place}")
            self._targets[rank] = target
        part = None if header.flags & EMPTY else np.frombuffer(payload, np.uint8).view(round_.dtype)
        round_.add(rank, header.step, part, owned=target is None and not payload.readonly)

    def _record(self, rank: int, header: Header, nbytes: int, begin_ns: int) -> None:
        """Records what `rank` completed, a round or its own push: one span, also for all pieces of a gather."""
        self._recorder.span(
            "aggregate",
            begin_ns,
            self._recorder.clock(),
            step=header.step,
            bucket=header.bucket,
            slice=NONE if self._gathers else header.index,
            priority=header.priority,
            nbytes=nbytes,
            rank=rank,
        )
