"""How many rows of a step's batch each replica has, and what its part of a mean over the whole batch counts for.

A loss is a mean over rows. Where a batch does not divide evenly, the mean of the replicas' means is not the mean over
the batch: a replica with k of n rows counts k / n. One without rows counts nothing, whatever it computes of no rows
(often NaN).

Graphs that take batches themselves know the size of the whole batch from the announcements of the ranks (lockstep.py).
Where a program hands batches over in another way, replicas sum their rows, while the forward pass already runs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfps.graph.ops import HOST
from tfps.graph.tf_private import (
    ResourceVariable,
    control_flow_free,
    distribute_lib,
    is_differentiated,
    ops,
    outer_graphs,
)

UNKNOWN = -1  # in place of a number of rows


def rows_of(structure: Any) -> Any:
    """Size of the first dimension of the first value in `structure` that has one, an int64 scalar; else None.

    UNKNOWN for a scalar whose number of dimensions the graph does not know.
    """
    for value in tf.nest.flatten(structure):
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.nrows(), tf.int64)
        if isinstance(value, tf.SparseTensor):
            return value.dense_shape[0]
        if isinstance(value, np.ndarray):
            value = tf.convert_to_tensor(value)
        if isinstance(value, tf.Tensor) and value.shape.rank != 0:
            sizes = tf.shape(value, tf.int64)
            return sizes[0] if value.shape.rank is not None else tf.concat([sizes, [UNKNOWN]], 0)[0]
    return None


def not_known_to_be_empty(structure: Any) -> Any:
    """`structure` without static sizes of 0 in first dimensions: some code of Keras takes these for scalars."""

    def relaxed(value: Any) -> Any:
        if not tf.is_symbolic_tensor(value) or not value.shape.rank or value.shape[0] != 0:
            return value
        return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])

    return tf.nest.map_structure(relaxed, structure)


class LastBatch:
    """Rows of the batch that the graphs of one strategy took last, and of those that replica functions were given last.

    Variables and no tensors: Keras calls functions within functions, and what one captures of another's graph is
    lost when it is called from a third.
    """

    def __init__(self, replicas: int) -> None:
        """`replicas`: on this worker."""
        self.replicas = replicas
        self._name = f"_tfps_taken_{id(self)}"
        with tf.init_scope(), tf.device(HOST):
            # Of the whole job, then of each local replica.
            self._rows = ResourceVariable([UNKNOWN] * (1 + replicas), dtype=tf.int64, trainable=False, name="tfps_rows")
            self._given = [
                ResourceVariable(UNKNOWN, dtype=tf.int64, trainable=False, name="tfps_given") for _ in range(replicas)
            ]

    def note(self, iterator: Any, rows: tf.Tensor) -> None:
        """In a graph: `iterator` has taken a batch with `rows`, int64 [1 + replicas], unless the first is unknown."""
        graph = ops.get_default_graph()
        taken = getattr(graph, self._name, None)
        if taken is None:
            taken = weakref.WeakSet()
            setattr(graph, self._name, taken)
        taken.add(iterator)
        rows = tf.ensure_shape(rows, [1 + self.replicas])
        with tf.device(HOST):
            # Not `where`: a graph that evaluates on another thread must not write what it has read.
            tf.cond(rows[0] >= 0, lambda: self._rows.assign(rows, read_value=False), tf.no_op)

    def of_graph(self) -> tf.Tensor | None:
        """What was noted last, where the current graph and those around it take the batches of one iterator, else None.

        With several iterators it could be the batch of another one.
        """
        taken: set[int] = set()
        for graph in outer_graphs(ops.get_default_graph()):
            taken.update(map(id, getattr(graph, self._name, ())))
        if len(taken) != 1:
            return None
        with tf.device(HOST):
            return self._rows.read_value()

    def give(self, replica: int, rows: tf.Tensor | None) -> None:
        """A replica function begins, eagerly or whenever this graph runs."""
        with tf.device(HOST):
            self._given[replica].assign(UNKNOWN if rows is None else rows, read_value=False)

    def given(self) -> tf.Tensor:
        """Rows of each local replica as of the last replica function, int64 [replicas]; UNKNOWN where it had none."""
        with tf.device(HOST):
            return tf.stack([each.read_value() for each in self._given])


class Share:
    """One replica's part of the batch of one step. Used by the thread that traces or runs this replica.

    Args:
        rows: of this replica, int64 scalar.
        replicas: in the whole job.
        last: rows of the whole job and of this replica as last noted, if the graph takes batches itself.
        sum_rows: sums `rows` over all replicas: an exchange.
    """

    def __init__(
        self,
        rows: tf.Tensor,
        replicas: int,
        last: tuple[tf.Tensor, tf.Tensor] | None,
        sum_rows: Callable[[tf.Tensor], tf.Tensor],
    ) -> None:
        self.graph = None if tf.executing_eagerly() else ops.get_default_graph()
        self.rows, self.replicas = rows, replicas
        self._sum_rows = sum_rows
        self._total: tf.Tensor | None = None
        self._weights: list[tf.Tensor] = []  # what replaces the share by rows
        if last is not None:  # batches that do not come from the iterator are taken to be divided evenly
            self._total = tf.where(tf.equal(last[1], rows), last[0], tf.constant(UNKNOWN, tf.int64))

    @property
    def may_be_empty(self) -> bool:
        """Whether it is not certain that this replica has rows."""
        known = tf.get_static_value(self.rows)
        return known is None or int(known) == 0

    @property
    def has_rows(self) -> tf.Tensor:
        """A bool scalar."""
        with self._in_graph():
            return tf.not_equal(self.rows, 0)

    def only_if_rows(self, value: Any, otherwise: Any = None) -> Any:
        """`value`, a tensor or IndexedSlices, where this replica has rows; else zeros, or `otherwise`."""
        if not self.may_be_empty or value is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.only_if_rows(value.values), value.indices, value.dense_shape)
        return tf.where(self.has_rows, value, tf.zeros_like(value) if otherwise is None else otherwise)

    def total(self, *, exchange: bool) -> tf.Tensor | None:
        """Rows of the whole batch, int64, -1 where unknown; None if only an exchange would tell and it may not."""
        if self._total is None and exchange:
            with self._in_graph():
                self._total = self._sum_rows(self.rows)
        return self._total

    def relative(self, dtype: tf.DType, *, exchange: bool = False) -> tf.Tensor:
        """This replica's rows over the average of all replicas, exactly 1 where all have as many or it is unknown."""
        total = self.total(exchange=exchange)
        one = tf.ones([], dtype)
        if total is None:
            return one
        return tf.where(self._uneven(self.rows, total), self._of(self.rows * self.replicas, total, dtype), one)

    def weight(self, even: tf.Tensor) -> tf.Tensor:
        """What this replica's mean counts for in the mean over the batch; `even` where all replicas count alike.

        While the result is being differentiated all replicas must ask together.
        """
        if self._weights:
            return tf.cast(self._weights[-1], even.dtype)
        total = self.total(exchange=is_differentiated())
        if total is None:
            return even
        return tf.where(self._uneven(self.rows, total), self._of(self.rows, total, even.dtype), even)

    @contextlib.contextmanager
    def counting(self, amount: tf.Tensor, even: tf.Tensor) -> Iterator[None]:
        """What is weighed meanwhile counts by `amount` (of this replica, scalar) instead of by rows."""
        amount = tf.stop_gradient(tf.cast(amount, tf.float64))
        total = self._sum_rows(amount)
        evenly = tf.equal(amount * self.replicas, total)
        self._weights.append(tf.where(evenly, tf.cast(even, tf.float64), tf.math.divide_no_nan(amount, total)))
        try:
            yield
        finally:
            self._weights.pop()

    def _uneven(self, rows: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
        return tf.logical_and(tf.logical_and(total > 0, rows >= 0), tf.not_equal(rows * self.replicas, total))

    def _of(self, rows: tf.Tensor, total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tf.cast(rows, tf.float64) / tf.cast(total, tf.float64), dtype)

    def _in_graph(self) -> contextlib.AbstractContextManager[Any]:
        """In the graph of the replica function: what a branch needs must not exist in this branch alone."""
        if self.graph is None or ops.get_default_graph() is self.graph:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(self.graph.as_default())
        stack.enter_context(tf.control_dependencies(None))
        return stack


class _Current(threading.local):
    share: Share | None = None
    gradients = False


_current = _Current()


def with_share(
    function: Callable[..., Any], replicas: int, last_batch: LastBatch, sum_rows: Callable[[tf.Tensor], tf.Tensor]
) -> Callable[..., Any]:
    """`function`, called by each replica, while which its share is the current one; see `Share`."""

    def shared(*args: Any, **kwargs: Any) -> Any:
        rows, replica = rows_of((args, kwargs)), distribute_lib.get_replica_context()._replica_id
        last_batch.give(replica, rows)
        if rows is None:
            return function(*args, **kwargs)
        args, kwargs = not_known_to_be_empty((args, kwargs))
        noted = None if tf.executing_eagerly() else last_batch.of_graph()
        last = None if noted is None else (noted[0], noted[1 + replica])
        before, _current.share = _current.share, Share(rows, replicas, last, sum_rows)
        try:
            return function(*args, **kwargs)
        finally:
            _current.share = before

    return shared


def current_share() -> Share | None:
    """The share of the replica that this thread traces or runs; None outside, and in functions of their own within."""
    share = _current.share
    if share is None or (share.graph is None) != tf.executing_eagerly():
        return None
    if share.graph is not None and control_flow_free(ops.get_default_graph()) is not control_flow_free(share.graph):
        return None
    return share


@contextlib.contextmanager
def reducing_gradients() -> Iterator[None]:
    """What this thread reduces meanwhile are gradients: a replica without rows has none."""
    before, _current.gradients = _current.gradients, True
    try:
        yield
    finally:
        _current.gradients = before


def share_of_gradients() -> Share | None:
    """The current share while gradients are reduced, if the replica may have no rows."""
    share = current_share() if _current.gradients else None
    return share if share is not None and share.may_be_empty else None
