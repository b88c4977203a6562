"""A slice whose parameters live on its owner: the numbers of each step, and the update of a completed sum."""

from __future__ import annotations

import threading

from tfps.errors import MismatchError, ProtocolError, TfpsError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.kept_slice import KeptSlice
from tfps.exchange.layout import Slice
from tfps.exchange.update_spec import StepNumbers, UpdateSpec, difference


def kept_arrays(spec: BucketSpec) -> int:
    """How many arrays of its size the pservers keep of a bucket with an update, or of one that is compressed."""
    if spec.update is not None:
        return spec.update.kept + (spec.codec is not None)  # with a codec also what workers have
    return int(spec.codec is not None and spec.codec.feeds_back)  # what is held back


class UpdateNumbers:
    """The numbers of a bucket's current step, from all ranks; any thread."""

    def __init__(self, name: str, spec: UpdateSpec) -> None:
        self.name, self.spec = name, spec
        self._lock = threading.Lock()  # guards the next two
        self._step = 0
        self._by_rank: dict[int, StepNumbers] = {}

    @classmethod
    def of(cls, spec: BucketSpec) -> UpdateNumbers | None:
        """Those of a bucket; None without an update."""
        return None if spec.update is None else cls(spec.name, spec.update)

    def take(self, rank: int, step: int, data: memoryview) -> TfpsError | None:
        """Takes the numbers of `rank` for `step`, packed; returns why the job must fail, if another rank's differ.

        A rank sends those of the next step when it has the whole reply to this one: nobody needs this one's any more.

        Raises:
            ProtocolError: they are malformed, of another step, or the rank has sent them already.
        """
        numbers = StepNumbers.unpack(data, self.spec)
        with self._lock:
            if step == self._step + 1 and self._by_rank:
                self._step, self._by_rank = step, {}
            if step != self._step or rank in self._by_rank:
                raise ProtocolError(
                    f"numbers of bucket '{self.name}' must come once per step, for step {self._step} or the next, got "
                    f"them for step {step}"
                )
            for other, theirs in self._by_rank.items():
                if (what := difference(self.spec.numbers, theirs, numbers)) is not None:
                    return MismatchError(
                        f"the workers do not train the same: at step {step} of bucket '{self.name}' ranks {other} and "
                        f"{rank} have different {what}; change them on every rank, and alike"
                    )
            self._by_rank[rank] = numbers
        return None

    def skip(self, step: int) -> None:
        """Notes that `step` is over and was none of training: it had no numbers."""
        with self._lock:
            if step >= self._step:
                self._step, self._by_rank = step + 1, {}

    def at(self, step: int) -> StepNumbers:
        """Rank 0's numbers of `step`, which is complete.

        Raises:
            ProtocolError: a rank has pushed without numbers.
        """
        with self._lock:
            if step != self._step or 0 not in self._by_rank:
                raise ProtocolError(f"numbers of bucket '{self.name}' must come before the slices of step {step}")
            return self._by_rank[0]


class UpdatedSlice(KeptSlice):
    """What a pserver keeps of a slice. The owner's lock guards it."""

    def __init__(self, label: str, numbers: UpdateNumbers, piece: Slice, *, shows: bool = False) -> None:
        super().__init__(label, numbers.spec, piece.offset, piece.nbytes, shows=shows)
        self._numbers = numbers

    def updated(self, gradient: memoryview, step: int) -> memoryview:
        """The new parameters, after the update with the sum of `step`.

        Raises:
            ProtocolError: the numbers of the step, or the parameters, have not come.
        """
        return self.update(gradient, self._numbers.at(step))

    def skip(self, step: int) -> None:
        """See `UpdateNumbers.skip`."""
        self._numbers.skip(step)
