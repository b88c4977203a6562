"""Combines variables that each replica writes for itself: metrics, moving statistics.

Each graph that writes such variables counts its runs in a host variable, so all ranks know what has been written since
the last combination, and combine it together. Afterward one rank alone may save.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfps.collectives import AllReduce, from_source
from tfps.errors import MismatchError, WaitTimeoutError
from tfps.graph.ops import HOST
from tfps.graph.tf_private import ResourceVariable, ops, outer_graphs
from tfps.runtime.runtime import Runtime, indivisible
from tfps.types import Array, DType, Variable
from tfps.updates.names import common_name, own_name

logger = logging.getLogger("tfps")
_numbers = itertools.count()
_PATIENCE_S = 5.0  # before a wait is logged
_ONLY_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


@dataclass(eq=False)
class _Writes:
    """The variables that one graph writes at each run."""

    runs: Variable  # int64 host variable that the graph increments
    graphs: list[weakref.ref[tf.Graph]]  # the graph and its outer graphs, which may still run it
    seen: int = 0  # runs that have been combined
    # By unique id, in tracing order. Not weak: what is combined must not depend on what a rank still references.
    variables: dict[str, Variable] = field(default_factory=dict)


class Combiner:
    """Tracks and combines what replicas write locally. Used by the threads that trace or run eagerly."""

    def __init__(self, runtime: Runtime, replicas: int) -> None:  # on this worker
        self._runtime, self._replicas = runtime, replicas
        # What the only replica of the job writes is the value.
        self.single = replicas * runtime.exchange.view.workers == 1
        self._name = f"_tfps_writes_{next(_numbers)}"
        self._graphs: list[_Writes] = []
        self._eager: dict[str, Variable] = {}

    def note_write(self, variable: Variable, graph: tf.Graph, after: list[tf.Tensor]) -> None:
        """Notes that a replica writes `variable` now (eagerly), or whenever `graph`, which is being traced, runs."""
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
            # After the step's input: no rank counts a run that ends because the data ran out.
            with graph.as_default(), tf.device(HOST), tf.control_dependencies(after):
                runs.assign_add(1, read_value=False)
        writes.variables.setdefault(variable._unique_id, variable)

    def written_eagerly(self) -> set[str]:
        """The unique ids of variables that have been written eagerly since the last combination."""
        return set(self._eager)

    def run_elsewhere(self, graph: tf.Graph) -> None:
        """Notes that `graph` has run on other ranks: this one takes part in combining what they have written."""
        writes: _Writes | None = getattr(graph, self._name, None)
        if writes is not None:
            writes.seen -= 1

    def refresh(self, variable: Variable | None = None) -> bool:
        """Combines what has been written since the last call, if `variable` was; then every rank must call it."""
        if self.single:
            return False
        with ops.init_scope(), tf.device(HOST):
            runs = [(writes, int(writes.runs)) for writes in self._graphs]
            by_id = {key: each for writes, n in runs if n != writes.seen for key, each in writes.variables.items()}
            written = list((by_id | self._eager).values())
            if not written:
                self._prune()
            if not written or (variable is not None and all(each is not variable for each in written)):
                return False
            floats = [each for each in written if each.dtype.is_floating], np.dtype(np.float64)
            others = [each for each in written if not each.dtype.is_floating], np.dtype(np.int64)
            with self._saying(written[0]):
                parts = [(*part, self._sum_of(*part)) for part in (floats, others) if part[0]]
                # If this could be interrupted, only some ranks would have to combine again, and would wait in vain.
                with indivisible(self._runtime.exchange, f"values of {own_name(written[0])} and others"):
                    for part in parts:
                        self._combine(*part)
                    for writes, count in runs:
                        writes.seen = count
                    self._eager.clear()
                    self._prune()
        return True

    def align(self) -> None:
        """Nothing is left to combine: what was written is combined, or was for this worker alone."""
        with ops.init_scope(), tf.device(HOST):
            for writes in self._graphs:
                writes.seen = int(writes.runs)
        self._eager.clear()

    def _prune(self) -> None:
        self._graphs = [writes for writes in self._graphs if any(ref() is not None for ref in writes.graphs)]

    def _combine(self, variables: list[Variable], dtype: DType, total: AllReduce | None) -> None:
        """Combines in 64 bits: the mean of equal values is exact, and the order of summing does not matter."""

        def exchange(is_source: bool) -> tuple[tuple[Array, Collection[int]], Collection[int]]:
            own = self._own(variables, dtype, is_source)
            found = (own, [self._runtime.exchange.rank]) if total is None else total.of_ranks(own)
            return found, found[1]

        sums, ranks = from_source(self._runtime, exchange)
        pieces = np.split(sums, np.cumsum([math.prod(variable.shape) for variable in variables])[:-1])
        for variable, piece in zip(variables, pieces, strict=True):
            value = piece.reshape(variable.shape)
            if variable.aggregation not in (tf.VariableAggregation.SUM, _ONLY_FIRST):
                value = value / (self._replicas * len(ranks))
            variable.take_combined(value.astype(variable.dtype.as_numpy_dtype))

    def _own(self, variables: list[Variable], dtype: DType, is_source: bool) -> Array:
        """What this worker adds, flat: of those of which the first replica's value counts only if it has that."""
        own = []
        for variable in variables:
            first, *others = (component.numpy().astype(dtype) for component in variable._values)
            if variable.aggregation != _ONLY_FIRST:
                first = sum(others, first)
            elif not is_source:
                first = np.zeros_like(first)
            own.append(np.reshape(first, -1))
        return np.concatenate(own)

    def _sum_of(self, variables: list[Variable], dtype: DType) -> AllReduce | None:
        """Declares the exchange that combines `variables`; None with a single worker."""
        if self._runtime.exchange.view.workers == 1:
            return None
        first, *more = variables
        total = AllReduce(
            self._runtime,
            f"values of {own_name(first)} and {len(more)} more variables",
            [sum(math.prod(variable.shape) for variable in variables)],
            dtype,
            key=("combined", dtype.name, tuple(variable._unique_id for variable in variables)),
            alike=f"values of {common_name(first)} and {len(more)} more variables",
            details=[f"variable '{common_name(v)}' {tuple(v.shape)} {v.dtype.name} to be combined" for v in variables],
        )
        total.declare()
        return total

    @contextlib.contextmanager
    def _saying(self, first: Variable) -> Iterator[None]:
        """Explains the exchange in the block if it takes long or fails."""
        what = (
            f"rank {self._runtime.exchange.rank}: variables that every replica writes for itself ({own_name(first)} "
            "and others) were read after training steps, which combines them over all workers, so that every rank has "
            "to read them; to read or save on one rank only, call strategy.combine() on every rank before"
        )
        timer = threading.Timer(_PATIENCE_S, logger.warning, ["tfps: waits: %s", what])
        timer.name, timer.daemon = "tfps-combine-patience", True
        timer.start()
        try:
            yield
        except (WaitTimeoutError, MismatchError) as error:  # as when one rank reads alone
            raise type(error)(f"{what}. {error}") from error
        finally:
            timer.cancel()
            timer.join()
