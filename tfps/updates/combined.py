"""Combines variables that each replica writes for itself: metrics, moving statistics.

A step writes its replica's component; nothing is sent. Each graph that writes such variables counts its runs in a
separate host variable, so a read knows locally what has been written since the last combination. One exchange then
combines all of it; afterward every rank knows the values, so that one rank alone may save.

All ranks run the same steps and write the same variables, so they agree without communication whether a read exchanges.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import tensorflow as tf

from tfps.collectives import AllReduce
from tfps.errors import MismatchError, WaitTimeoutError
from tfps.graph.ops import HOST
from tfps.graph.tf_private import ResourceVariable, ops, outer_graphs
from tfps.runtime.runtime import Runtime, indivisible
from tfps.types import Array, DType, Variable
from tfps.updates.names import common_name, own_name

logger = logging.getLogger("tfps")
_numbers = itertools.count()
_PATIENCE_S = 5.0  # before a wait is logged
_WIDE = (np.float64, np.int64)
_ONLY_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


class Local(Protocol):
    """A variable with one component per local replica, written by that replica."""

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    aggregation: tf.VariableAggregation
    _unique_id: str
    _values: tuple[Variable, ...]

    def take_combined(self, value: Array) -> None:
        """Takes the combined `value`, in the variable's shape and dtype; it is the same on all ranks."""


@dataclass(eq=False)
class _Writes:
    """The variables that one graph writes at each run."""

    runs: Variable  # int64 host variable that the graph increments
    graphs: list[weakref.ref[tf.Graph]]  # the graph and its outer graphs, which may still run it
    seen: int = 0  # runs that have been combined
    # By unique id, in tracing order. Not weak: what is combined must not depend on what a rank still references.
    variables: dict[str, Variable] = field(default_factory=dict)


@dataclass(eq=False)
class _Part:
    """What one exchange combines; `sum` is None with a single worker."""

    variables: list[Variable]
    dtype: DType
    sum: AllReduce | None = None


class Combiner:
    """Tracks and combines what replicas write locally. Used by the threads that trace or run eagerly."""

    def __init__(self, runtime: Runtime, replicas: int) -> None:
        """`replicas`: number on this worker."""
        self._runtime, self._total = runtime, replicas * runtime.exchange.view.workers
        self._name = f"_tfps_writes_{next(_numbers)}"
        self._graphs: list[_Writes] = []
        self._eager: dict[str, Variable] = {}

    @property
    def single(self) -> bool:
        """Whether there is only one replica in the job: what it writes is the value."""
        return self._total == 1

    def note_write(self, variable: Local, graph: tf.Graph, after: list[tf.Tensor]) -> None:
        """Notes that a replica writes `variable`, now (eagerly) or whenever `graph` runs, which is being traced.

        `after`: the step's input, so that no rank counts a run that ends because the data ran out.
        """
        if self.single:
            return
        if tf.executing_eagerly():
            self._eager[variable._unique_id] = variable
            return
        writes: _Writes | None = getattr(graph, self._name, None)
        if writes is None:
            with ops.init_scope(), tf.device(HOST):
                runs = ResourceVariable(0, dtype=tf.int64, trainable=False, name="tfps_runs")
            writes = _Writes(runs, [weakref.ref(each) for each in outer_graphs(graph)])
            setattr(graph, self._name, writes)
            self._graphs.append(writes)
            with graph.as_default(), tf.device(HOST), tf.control_dependencies(after):
                runs.assign_add(1, read_value=False)
        writes.variables.setdefault(variable._unique_id, variable)

    def written_eagerly(self) -> set[str]:
        """Returns the unique ids of variables that have been written eagerly since the last combination."""
        return set(self._eager)

    def run_elsewhere(self, graph: tf.Graph) -> None:
        """Notes that `graph` has run on other ranks: this one takes part in combining what they have written."""
        writes: _Writes | None = getattr(graph, self._name, None)
        if writes is not None:
            writes.seen -= 1

    def refresh(self, variable: Local | None = None) -> bool:
        """Combines what has been written since the last call; if anything was, every rank must call it.

        Returns whether anything was. With `variable` it does nothing unless that one was.
        """
        if self.single:
            return False
        with ops.init_scope(), tf.device(HOST):
            runs = [(writes, int(writes.runs)) for writes in self._graphs]
            written = self._written(runs)
            parts = [_Part(chosen, np.dtype(dtype)) for dtype in _WIDE if (chosen := _of(written, dtype))]
            if not parts:
                self._prune()
            if not parts or (variable is not None and all(each is not variable for each in written)):
                return False
            with self._saying(written[0]):
                if self._runtime.exchange.view.workers > 1:
                    for part in parts:
                        part.sum = self._sum_of(part)
                        part.sum.declare()
                # If this could be interrupted, only some ranks would have to combine again, and would wait in vain.
                with indivisible(self._runtime.exchange, f"values of {own_name(written[0])} and others"):
                    for part in parts:
                        self._combine(part)
                    for writes, count in runs:
                        writes.seen = count
                    self._eager.clear()
                    self._prune()
        return True

    def _prune(self) -> None:
        """Forgets graphs that are gone; what they wrote has been combined."""
        self._graphs = [writes for writes in self._graphs if any(ref() is not None for ref in writes.graphs)]

    def _written(self, runs: list[tuple[_Writes, int]]) -> list[Variable]:
        written: dict[str, Variable] = {}
        for writes, count in runs:
            if count != writes.seen:
                written.update(writes.variables)
        return list({**written, **self._eager}.values())

    def _combine(self, part: _Part) -> None:
        """Combines in 64 bits: the mean of equal values is exact, and the order of summing does not matter."""
        rank = self._runtime.exchange.rank
        sums = np.concatenate([_contribution(variable, part.dtype, rank).reshape(-1) for variable in part.variables])
        if part.sum is not None:
            sums = part.sum(sums)
        start = 0
        for variable in part.variables:
            end = start + _elements(variable)
            value = sums[start:end].reshape(variable.shape)
            if variable.aggregation not in (tf.VariableAggregation.SUM, _ONLY_FIRST):
                value = value / self._total
            variable.take_combined(value.astype(variable.dtype.as_numpy_dtype))
            start = end

    def _sum_of(self, part: _Part) -> AllReduce:
        first, *more = part.variables
        return AllReduce(
            self._runtime,
            f"values of {own_name(first)} and {len(more)} more variables",
            [sum(map(_elements, part.variables))],
            part.dtype,
            key=("combined", part.dtype.name, tuple(variable._unique_id for variable in part.variables)),
            alike=f"values of {common_name(first)} and {len(more)} more variables",
            details=[
                f"variable '{common_name(v)}' {tuple(v.shape)} {v.dtype.name} to be combined" for v in part.variables
            ],
        )

    @contextlib.contextmanager
    def _saying(self, first: Variable) -> Iterator[None]:
        """Explains the exchange in the block if it takes long or fails."""
        what = (
            f"rank {self._runtime.exchange.rank}: variables that every replica writes for itself ({own_name(first)} "
            "and others) were read after training steps, which combines them over all workers, so that every rank has "
            "to read them; to read or save on one rank only, call strategy.combine() on every rank before"
        )
        timer = threading.Timer(_PATIENCE_S, logger.warning, ["tfps: waits: %s", what])
        timer.name = "tfps-combine-patience"
        timer.daemon = True
        timer.start()
        try:
            yield
        except (WaitTimeoutError, MismatchError) as error:  # as when one rank reads alone
            raise type(error)(f"{what}. {error}") from error
        finally:
            timer.cancel()
            timer.join()


def _contribution(variable: Variable, dtype: DType, rank: int) -> Array:
    """Returns what this worker adds to the sum."""
    components = [component.numpy().astype(dtype) for component in variable._values]
    if variable.aggregation == _ONLY_FIRST:
        return np.asarray(components[0] if rank == 0 else np.zeros_like(components[0]))
    return np.asarray(sum(components[1:], components[0]))


def _of(variables: list[Variable], wide: type[np.float64 | np.int64]) -> list[Variable]:
    """Returns the variables that are combined in dtype `wide`."""
    return [variable for variable in variables if variable.dtype.is_floating == (wide is np.float64)]


def _elements(variable: Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))
