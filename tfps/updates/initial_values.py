"""Copies rank 0's initial values to all ranks before the first step that could use them.

Variables are noted at creation and exchanged together at the next `strategy.run`, so only rank 0 needs to load a new
model's weights; weights loaded later must be loaded on every rank. Ranks first compare which variables they created.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator

import numpy as np
import tensorflow as tf

from tfps.collectives.collectives import Broadcast, FixedBroadcast
from tfps.errors import MismatchError
from tfps.runtime.interrupts import indivisible
from tfps.runtime.runtime import Runtime
from tfps.types import Options, Value, Variable
from tfps.updates.names import common_name
from tfps.updates.on_read_variable import OnReadVariable
from tfps.updates.progress import Progress
from tfps.updates.variables import GatedVariable

_BATCH_BYTES = 64 * 2**20  # per exchange; more would only need more memory
INITIAL_VALUES = "initial values"


class InitialValues:
    """Variables whose values are not agreed yet. Used by the main thread.

    They are kept until then, so that the comparison depends on what the program created, not on what a rank still
    references or has garbage-collected.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._created: list[Variable] = []
        self._used = False  # whether values have been used before they are agreed
        self._written: Collection[str] = ()
        self._other: str | None = None  # the name of one that differs then
        self.agreed: list[
            weakref.ref[Variable]
        ] = []  # all whose values have been agreed on, in the same order everywhere

    def created(self, variable: Variable) -> None:
        """Notes a new distributed variable."""
        if self._runtime.exchange.view.workers > 1:
            self._created.append(variable)

    def agree(self, *, used: bool = False, written: Collection[str] = ()) -> None:
        """Gives all new variables their values on rank 0.

        Args:
            used: gradients have been computed with their values on this rank already.
            written: unique ids of those that each rank has written for itself since then; they stay as they are.
        """
        if not self._created:
            return
        self._used, self._written, self._other = used, written, None
        try:
            with tf.init_scope():
                self.share([variable for variable in self._created if bool(variable.is_initialized())])
        finally:
            self._used, self._written = False, ()
        if self._other is not None:
            error = MismatchError(
                f"variable {self._other!r} has another initial value on rank {self._runtime.exchange.rank} than on "
                "rank 0, and gradients have been computed with it; set one seed on all ranks before the model is built "
                "(keras.utils.set_random_seed), load weights on all ranks, or compute gradients within strategy.run"
            )
            self._runtime.exchange.fail(error)
            raise error

    def share_now(self, variable: Variable) -> None:
        """Gives a new variable its value on rank 0, if it can be before the step that creates it ends."""
        if self._created and _has_fixed_size(variable) and not _on_read(variable):
            with tf.init_scope():
                self.share([variable])

    def share(self, variables: list[Variable]) -> None:
        """Gives `variables` their values on rank 0; every rank must call it.

        After an interruption (Ctrl-C), values that have arrived are not requested again.
        """
        fixed = [variable for variable in variables if _has_fixed_size(variable)]
        total = sum(map(_nbytes, fixed)) if self._runtime.exchange.rank == 0 else 0  # only rank 0 shows it
        with Progress(f"tfps: {INITIAL_VALUES}", total) as progress:
            for batch in _batches(fixed):
                self._sum(batch, progress)
        if others := [variable for variable in variables if not _has_fixed_size(variable)]:
            self._gather(others)
        for variable in variables:
            if isinstance(variable, GatedVariable):
                variable.note_assigned()

    @staticmethod
    def _named(variables: list[Variable]) -> Options:
        """What names the broadcast of `variables`."""
        return {
            "key": (INITIAL_VALUES, tuple(variable._unique_id for variable in variables)),
            "details": [f"variable '{common_name(v)}' {v.shape} {v.dtype.name}" for v in variables],
        }

    def _sum(self, variables: list[Variable], progress: Progress) -> None:
        total = sum(map(_nbytes, variables))
        broadcast, payload = FixedBroadcast(self._runtime, INITIAL_VALUES, total, **self._named(variables)), None
        broadcast.declare()
        if self._runtime.exchange.rank == 0:
            payload = np.concatenate([_bytes(variable) for variable in variables])
        with indivisible(self._runtime.exchange, INITIAL_VALUES):
            received = broadcast(payload, lambda part: progress.show(part * total))
            start = 0
            for variable in variables:
                end = start + _nbytes(variable)
                value = received[start:end].view(variable.dtype.as_numpy_dtype).reshape(variable.shape)
                self._take(variable, value)
                start = end
            self.forget(variables)
        progress.add(total)

    def _gather(self, variables: list[Variable]) -> None:
        """Exchanges variables whose size in bytes only rank 0 knows."""
        broadcast, payload = Broadcast(self._runtime, INITIAL_VALUES, **self._named(variables)), b""
        broadcast.declare()
        if self._runtime.exchange.rank == 0:
            values = [tf.io.serialize_tensor(variable.values[0]).numpy() for variable in variables]
            payload = b"".join([np.array([len(value) for value in values], np.int64).tobytes(), *values])
        with indivisible(self._runtime.exchange, INITIAL_VALUES):
            (first,) = broadcast(payload)
            start = 8 * len(variables)
            for variable, size in zip(variables, np.frombuffer(first[:start], np.int64).tolist(), strict=True):
                value = tf.io.parse_tensor(first[start : start + size], variable.dtype)
                self._take(variable, value)
                start += size
            self.forget(variables)

    def _take(self, variable: Variable, value: Value) -> None:
        if variable._unique_id in self._written or (self._used and _on_read(variable)):
            return  # each rank's own
        if _on_read(variable):
            variable.assign(value)  # on rank 0 too: which replica holds a sum depends on the rank
        elif self._runtime.exchange.rank > 0:
            if self._used and variable.trainable and _bytes(variable).tobytes() != np.asarray(value).tobytes():
                self._other = self._other or common_name(variable)
            for component in variable.values:  # waits for pending updates
                component.assign(value)

    def forget(self, variables: list[Variable]) -> None:
        """Forgets new `variables`, which have their values."""
        agreed = {id(variable) for variable in variables}
        self.agreed += [weakref.ref(variable) for variable in self._created if id(variable) in agreed]
        self._created = [variable for variable in self._created if id(variable) not in agreed]


def _batches(variables: list[Variable]) -> Iterator[list[Variable]]:
    """`variables` in groups of about `_BATCH_BYTES`."""
    batch: list[Variable] = []
    filled = 0
    for variable in variables:
        batch.append(variable)
        filled += _nbytes(variable)
        if filled >= _BATCH_BYTES:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch


def _has_fixed_size(variable: Variable) -> bool:
    return bool(variable.dtype != tf.string and variable.shape.is_fully_defined())


def _on_read(variable: Variable) -> bool:
    return isinstance(variable, OnReadVariable) and variable.aggregation != tf.VariableAggregation.NONE


def _nbytes(variable: Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * int(variable.dtype.size)


def _bytes(variable: Variable) -> tf.Tensor:
    value = variable.current() if _on_read(variable) else variable.values[0]
    return np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)
