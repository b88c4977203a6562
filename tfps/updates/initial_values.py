"""Copies rank 0's initial values to all ranks before the first step that could use them.

Variables are noted at creation and exchanged together at the next `strategy.run`, so only rank 0 needs to load a new
model's weights; weights loaded later must be loaded on every rank. Ranks first compare which variables they created.
A long transfer shows its progress.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfps.collectives import Broadcast, FixedBroadcast
from tfps.errors import MismatchError
from tfps.runtime.runtime import Runtime, indivisible
from tfps.types import Options, Value, Variable
from tfps.updates.names import common_name
from tfps.updates.on_read_variable import OnReadVariable
from tfps.updates.variables import GatedVariable

if TYPE_CHECKING:
    import rich.progress

logger = logging.getLogger("tfps")
_BAR_AFTER_S = 0.5  # no bar that only flashes
_LINE_AFTER_S = 5.0


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Context manager that shows how many of `total` bytes are transferred. For one thread.

    The bar is drawn on stderr with rich, if installed, and removed at the end.

    Args:
        what: `"tfps: initial values"`.
        total: bytes; 0 shows nothing.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done = 0
        self._started_s = 0.0  # the first `show`: before, workers may have waited for each other
        self._bar: rich.progress.Progress | None = None
        self._said = False

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, nbytes: int) -> None:
        """Counts `nbytes` as transferred."""
        self._done += nbytes
        self.show(0.0)

    def show(self, nbytes: float) -> None:
        """Shows `nbytes` beyond those added. Call it a few times per second."""
        if not self._total:
            return
        self._started_s = self._started_s or time.monotonic()
        elapsed_s, now = time.monotonic() - self._started_s, self._done + nbytes
        if self._bar is None and not self._said and elapsed_s >= _BAR_AFTER_S and now < self._total:
            self._bar = _bar(self._what, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=now, refresh=True)
        elif not self._said and elapsed_s >= _LINE_AFTER_S:
            self._said = True
            left_s = elapsed_s * (self._total / now - 1) if now else 0.0
            left = f", about {left_s:.0f} s to go" if left_s else ""
            logger.info("%s: %.0f of %.0f MB%s", self._what, now / 1e6, self._total / 1e6, left)


def _bar(what: str, total: int) -> rich.progress.Progress | None:
    """A started rich bar; None without a terminal or rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.add_task(what, total=total)
    bar.start()
    return bar


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
