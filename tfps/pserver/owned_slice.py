"""A slice on the pserver that owns it: a round, the lock that guards it, and what is recorded of it.

Tested in tests/pserver/test_job.py.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfps.errors import ProtocolError
from tfps.exchange.aggregate import GatherRound, SumRound
from tfps.trace.capture import NONE
from tfps.trace.recorder import Recorder
from tfps.wire.frames import EMPTY, LAST, Blank, Header
from tfps.wire.shared_memory import Target


class Taken(NamedTuple):
    """What a push did.

    Attributes:
        step: of the round that it belongs to, or, if it completed that, of the next one.
        missing: ranks that the round waits for.
        wait_ns: how long after the first rank's push this rank's came.
        result: of the round, if it is complete.
        blank: the reply, if the sum has been written into it.
        targets: of the ranks that want it somewhere else than in a reply.
    """

    step: int
    missing: list[int]
    wait_ns: int
    result: memoryview | None
    blank: Blank | None
    targets: dict[int, Target]


class OwnedSlice:
    """A gather has one, of the whole bucket. `round` is set once, before anything else."""

    __slots__ = ("_blank", "_recorder", "_targets", "first_ns", "lock", "round")

    def __init__(self, recorder: Recorder) -> None:
        self.lock = threading.Lock()
        self.first_ns = 0  # when the first rank pushed it in this round, by the recorder's clock
        self.round: SumRound | GatherRound
        self._blank: Blank | None = None
        self._targets: dict[int, Target] = {}
        self._recorder = recorder

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Where to write the sum: into the reply itself, which saves a copy."""
        self._blank = Blank(nbytes)
        return self._blank.payload

    def take(self, rank: int, header: Header, payload: memoryview, target: Target | None) -> Taken:
        """Adds a push to the round. Keeps `payload` by reference.

        Raises:
            ProtocolError: the frame does not fit the slice, or not the step of it.
        """
        recorder, result, blank = self._recorder, None, None
        targets: dict[int, Target] = {}
        now_ns = recorder.clock()
        with self.lock:
            if not self.round.started:
                self.first_ns = now_ns
            self._add(rank, header, payload, target)
            if recorder.enabled:
                recorder.arrived(now_ns, header.step, header.bucket, header.index, rank, NONE)
            wait_ns = now_ns - self.first_ns if rank in self.round.arrived else 0
            missing = self.round.missing()
            if not missing:
                result = self.round.finish()
                blank, self._blank = self._blank, None
                targets, self._targets = self._targets, targets
                if recorder.enabled:
                    self._record(rank, header, len(result))
            return Taken(self.round.step, missing, wait_ns, result, blank, targets)

    def _add(self, rank: int, header: Header, payload: memoryview, target: Target | None) -> None:
        round_ = self.round
        if isinstance(round_, GatherRound):
            round_.add(rank, header.step, header.index, payload, bool(header.flags & LAST))
            return
        expected = 0 if header.flags & EMPTY else round_.nbytes
        if len(payload) != expected or header.flags & LAST:
            raise ProtocolError(
                f"payload of {round_.label} must have {expected} bytes and no LAST flag, got {len(payload)} bytes and "
                f"flags {header.flags}"
            )
        if target is not None:
            if target.place.nbytes != round_.nbytes:
                raise ProtocolError(f"the place of {round_.label} must have {round_.nbytes} bytes, got {target.place}")
            self._targets[rank] = target
        part = None if header.flags & EMPTY else np.frombuffer(payload, np.uint8).view(round_.dtype)
        round_.add(rank, header.step, part)

    def _record(self, rank: int, header: Header, nbytes: int) -> None:
        """The round that `rank` has completed. The pieces of a gather belong together."""
        self._recorder.span(
            "aggregate",
            self.first_ns,
            self._recorder.clock(),
            step=header.step,
            bucket=header.bucket,
            slice=NONE if isinstance(self.round, GatherRound) else header.index,
            priority=header.priority,
            nbytes=nbytes,
            rank=rank,
        )
