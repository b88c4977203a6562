"""Copies rank 0's initial values to all ranks before the first step that could use them."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

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


class Progress(contextlib.ExitStack):
    """Shows within its block how many of `total` bytes are transferred; 0: nothing. For one thread."""

    def __init__(self, what: str, total: int) -> None:
        super().__init__()
        self._what, self._total = what, total
        self._started_s = 0.0  # the first `show`: before, workers may have waited for each other
        self._bar: rich.progress.Progress | None = None
        self._said = False

    def show(self, done: float) -> None:
        """Shows `done` bytes. Call it a few times per second."""
        if not self._total:
            return
        self._started_s = self._started_s or time.monotonic()
        elapsed_s, unfinished = time.monotonic() - self._started_s, done < self._total
        if self._bar is None and not self._said and elapsed_s >= _BAR_AFTER_S and unfinished:
            self._bar = _bar(self._what, self._total)
            if self._bar is not None:
                self.enter_context(self._bar)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True)
        elif not self._said and elapsed_s >= _LINE_AFTER_S:
            self._said = True
            left = f", about {elapsed_s * (self._total / done - 1):.0f} s to go" if done > 0 and unfinished else ""
            logger.info("%s: %.0f of %.0f MB%s", self._what, done / 1e6, self._total / 1e6, left)


def _bar(what: str, total: int) -> rich.progress.Progress | None:
    """A bar on stderr, removed at the end; None without a terminal or rich."""
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
    return bar


_BATCH_BYTES = 64 * 2**20  # per exchange; more would only need more memory
INITIAL_VALUES = "initial values"
Take = Callable[[Variable, Value], None]  # of a variable that value


class InitialValues:
    """Variables whose values are not agreed yet. Used by the main thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._created: list[Variable] = []  # not weak: ranks collect garbage at different times
        self.agreed: list[weakref.ref[Variable]] = []  # in the same order everywhere

    def created(self, variable: Variable) -> None:
        if self._runtime.exchange.view.workers > 1:
            self._created.append(variable)

    def agree(self, *, used: bool = False, written: Collection[str] = ()) -> None:
        """Gives all new variables their values on rank 0; every rank must call it.

        `used`: gradients have been computed with this rank's already. `written`: unique ids of those that each rank has
        written for itself since then; they stay as they are.
        """
        if not self._created:
            return
        with tf.init_scope():
            new = [each for each in self._created if bool(each.is_initialized())]
            different = self.share(new, used=used, written=written)
        if different:
            error = MismatchError(
                f"variable {different[0]!r} has another initial value on rank {self._runtime.exchange.rank} than on "
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

    def share(self, variables: list[Variable], *, used: bool = False, written: Collection[str] = ()) -> list[str]:
        """As `agree`, for `variables`; goes on where Ctrl-C stopped it. Returns what was `used` with another value."""
        rank, different = self._runtime.exchange.rank, list[str]()

        def take(variable: Variable, value: Value) -> None:
            if variable._unique_id in written or (used and _on_read(variable)):
                return  # each rank's own
            if _on_read(variable):
                variable.assign(value)  # on rank 0 too: which replica holds a sum depends on the rank
            elif rank != self._runtime.source:
                if used and variable.trainable and _bytes(variable).tobytes() != np.asarray(value).tobytes():
                    different.append(common_name(variable))
                for component in variable.values:  # waits for pending updates
                    component.assign(value)

        fixed = [variable for variable in variables if _has_fixed_size(variable)]
        total = sum(map(_nbytes, fixed)) if rank == 0 else 0  # only rank 0 shows it
        done = 0
        with Progress(f"tfps: {INITIAL_VALUES}", total) as progress:
            for batch in _batches(fixed):
                done = self._sum(batch, progress, done, take)
        if others := [variable for variable in variables if not _has_fixed_size(variable)]:
            self._gather(others, take)
        for variable in variables:
            if isinstance(variable, GatedVariable):
                variable.note_assigned()
        return different

    def _sum(self, variables: list[Variable], progress: Progress, done: int, take: Take) -> int:
        """Exchanges variables of a fixed size after `done` bytes; returns how many bytes are done then."""
        total = sum(map(_nbytes, variables))
        broadcast = FixedBroadcast(self._runtime, INITIAL_VALUES, total, **_named(variables))
        broadcast.declare()

        def own() -> NDArray[np.uint8]:
            return np.concatenate([_bytes(variable) for variable in variables])

        with indivisible(self._runtime.exchange, INITIAL_VALUES):
            received, start = broadcast(own, lambda part: progress.show(done + part * total)), 0
            for variable in variables:
                value = received[start : start + _nbytes(variable)].view(variable.dtype.as_numpy_dtype)
                take(variable, value.reshape(variable.shape))
                start += value.nbytes
            self.forget(variables)
        progress.show(done + total)
        return done + total

    def _gather(self, variables: list[Variable], take: Take) -> None:
        """Exchanges variables whose size in bytes only rank 0 knows."""
        broadcast = Broadcast(self._runtime, INITIAL_VALUES, **_named(variables))
        broadcast.declare()

        def own() -> bytes:
            values = [tf.io.serialize_tensor(variable.values[0]).numpy() for variable in variables]
            return b"".join([np.array([len(value) for value in values], np.int64).tobytes(), *values])

        with indivisible(self._runtime.exchange, INITIAL_VALUES):
            first, start = broadcast(own), 8 * len(variables)
            for variable, size in zip(variables, np.frombuffer(first[:start], np.int64).tolist(), strict=True):
                take(variable, tf.io.parse_tensor(first[start : start + size], variable.dtype))
                start += size
            self.forget(variables)

    def forget(self, variables: list[Variable]) -> None:
        """Forgets new `variables`, which have their values."""
        agreed = {id(variable) for variable in variables}
        self.agreed += [weakref.ref(each) for each in self._created if id(each) in agreed]
        self._created = [each for each in self._created if id(each) not in agreed]


def _named(variables: list[Variable]) -> Options:
    return {
        "key": (INITIAL_VALUES, tuple(variable._unique_id for variable in variables)),
        "details": [f"variable '{common_name(v)}' {v.shape} {v.dtype.name}" for v in variables],
    }


def _batches(variables: list[Variable]) -> Iterator[list[Variable]]:
    batch: list[Variable] = []
    filled = 0
    for variable in variables:
        batch.append(variable)
        filled += _nbytes(variable)
        if filled >= _BATCH_BYTES or variable is variables[-1]:
            yield batch
            batch, filled = [], 0


def _has_fixed_size(variable: Variable) -> bool:
    return bool(variable.dtype != tf.string and variable.shape.is_fully_defined())


def _on_read(variable: Variable) -> bool:
    return isinstance(variable, OnReadVariable) and variable.aggregation != tf.VariableAggregation.NONE


def _nbytes(variable: Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * int(variable.dtype.size)


def _bytes(variable: Variable) -> tf.Tensor:
    value = variable.current() if _on_read(variable) else variable.values[0]
    return np.ascontiguousarray(value.numpy()).reshape(-1).view(np.uint8)
