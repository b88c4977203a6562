"""Counts the rows of a step's batch that each replica has, and weights its part of a mean over the global batch.

A replica with k of n rows counts k / n. docs/design.md, "Who weights what", says what is weighted where.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import tensorflow as tf

from tfps.graph.ops import HOST, computed_from, is_argument, is_backward
from tfps.graph.patches import replaced
from tfps.graph.row_kinds import FIXED, MEAN, Kind, Of, RowKinds
from tfps.graph.rows import UNKNOWN, Fillers, cut, rows_of
from tfps.graph.tf_private import (
    ResourceVariable,
    control_flow_free,
    distribute_lib,
    in_xla,
    is_differentiated,
    ops,
    outer_graphs,
)
from tfps.types import Batches, Function, Structure, Value

logger = logging.getLogger("tfps")
# A step that Keras runs on replicas: of `fit` or `train_on_batch`, or of evaluation and prediction.
KerasStep = Literal["training", "evaluation"]
_NESTED = "_tfps_nested_share"  # of a graph
_EACH_ROW = "_tfps_each_row"  # of a tensor of fixed size


def _warn_of_empty_first(structure: Structure) -> None:
    """Logs once that the first value with rows is known to have none, while another may have some."""
    known = [value for value in tf.nest.flatten(structure) if isinstance(value, (tf.Tensor, np.ndarray))]
    sizes = [shape[0] for shape in (tf.TensorShape(value.shape) for value in known) if shape.rank]
    if sizes and sizes[0] == 0 and any(size != 0 for size in sizes):
        say_once(
            "the first tensor given to a replica function has no rows, so the step counts for nothing on this replica; "
            "if that is not the batch, pass the batch first"
        )


class LastBatch:
    """Rows of the last batch that one strategy's graphs took, and of the last ones given to its local `replicas`."""

    def __init__(self, replicas: int, *, changes: bool = False) -> None:  # `changes`: the number of workers may
        self.changes = changes
        # In variables, as Keras nests functions: a tensor captured from another's graph is lost when a third calls it.
        self.replicas, self.fillers = replicas, Fillers()
        self.fixed: set[str] = set()  # names of what steps of Keras return and that is not for each row
        self._name = f"_tfps_taken_{id(self)}"
        with tf.init_scope(), tf.device(HOST):
            # Of the whole job, then of each local replica; last, if it `changes`, the number of replicas of the job.
            self.size = 1 + replicas + changes
            self._rows, self._evaluated = (  # noted last, and in an evaluation of Keras
                ResourceVariable([UNKNOWN] * self.size, dtype=tf.int64, trainable=False, name="tfps_rows")
                for _ in range(2)
            )
            # Of each local replica: given to the function that runs now, and to the last one; then of the whole job in
            # the step of Keras that trains now.
            self._given = [
                ResourceVariable([UNKNOWN] * 3, dtype=tf.int64, trainable=False, name="tfps_given")
                for _ in range(replicas)
            ]

    def note(self, iterator: Batches, rows: tf.Tensor) -> None:
        """Notes, in a graph, that `iterator` took a batch of `rows`, int64 [size]; in training if it is known."""
        graph = ops.get_default_graph()
        if not hasattr(graph, self._name):
            setattr(graph, self._name, weakref.WeakSet())
        getattr(graph, self._name).add(iterator)
        rows = tf.ensure_shape(rows, [self.size])
        with tf.device(HOST):
            if _current.step == "evaluation":
                self._evaluated.assign(rows, read_value=False)
                return
            # Not `where`: a graph that evaluates on another thread must not write back what it read.
            tf.cond(rows[0] >= 0, lambda: self._rows.assign(rows, read_value=False), tf.no_op)

    def replicas_of_job(self, otherwise: int) -> tf.Tensor | int:
        """How many replicas took the batch that was noted last; `otherwise` if that does not change or is unknown."""
        if not self.changes:
            return otherwise
        with tf.device(HOST):
            known = self._rows.read_value()[-1]
        return tf.where(known > 0, known, tf.constant(otherwise, tf.int64))

    def of_graph(self, step: KerasStep | None = None) -> tf.Tensor | None:
        """Returns the rows noted last in a `step`; None if the current and outer graphs have not one iterator."""
        graphs = outer_graphs(ops.get_default_graph())
        taken = {id(iterator) for graph in graphs for iterator in getattr(graph, self._name, ())}
        if len(taken) != 1:
            return None
        with tf.device(HOST):
            return (self._evaluated if step == "evaluation" else self._rows).read_value()

    @contextlib.contextmanager
    def giving(self, replica: int, rows: tf.Tensor | None, total: tf.Tensor | None) -> Iterator[None]:
        """Notes the rows given to the replica function in the block, and those of the whole job (`total`) if known."""
        unknown = tf.constant(UNKNOWN, tf.int64)
        given = unknown if rows is None else rows
        with tf.device(HOST):
            self._given[replica].assign([given, given, unknown if total is None else total], read_value=False)
        try:
            yield
        finally:
            with tf.device(HOST):  # another strategy may run a function that was nested here
                self._given[replica].assign([unknown, given, unknown], read_value=False)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Eagerly: what runs in the block is not of a batch, and the rows last given stay those of the last batch."""
        before = [each.read_value() for each in self._given]
        try:
            yield
        finally:
            for variable, value in zip(self._given, before, strict=True):
                variable.assign(value)

    def running(self, replica: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns rows given to the replica function that runs, and of the whole job; UNKNOWN if there are none."""
        with tf.device(HOST):
            given = self._given[replica].read_value()
        return given[0], given[2]

    def given(self) -> tf.Tensor:
        """Returns the rows last given to each local replica, int64 [replicas]; UNKNOWN if none were."""
        with tf.device(HOST):
            return tf.stack([each.read_value()[1] for each in self._given])


class Share:
    """One replica's part of the batch of one step. Used by the thread that traces or runs this replica."""

    def __init__(
        self,
        rows: tf.Tensor,  # of this replica, int64 scalar
        replicas: tf.Tensor | int,  # in the whole job
        last: tuple[tf.Tensor, tf.Tensor] | None,  # as last noted, if the graph takes batches: of the job, and of this
        sum_rows: Callable[[tf.Tensor], tf.Tensor | None],  # over all replicas, by an exchange; None if it cannot
        step: KerasStep | None = None,  # None if the replica function is a program's own
        inputs: Structure = (),  # the batch, in the graph of the replica function
        *,
        changes: bool = False,  # whether `replicas` may be others, of which the sum of rows tells
    ) -> None:
        self.graph = None if tf.executing_eagerly() else ops.get_default_graph()
        self.rows, self.replicas, self.step = rows, replicas, step
        self._inputs = tf.nest.flatten(inputs, expand_composites=True)
        self._alike: list[tf.Tensor] = []  # the same on all replicas, as they were reduced
        self.outer: Share | None = self  # of the replica function itself
        # Called at the end of the replica function, while it is traced, with what it returns; by id of a variable.
        self.at_end: dict[int, Callable[[Structure], None]] = {}
        self._kinds: RowKinds | None = None
        self._sum_rows, self._changes = sum_rows, changes
        self._total: tf.Tensor | None = None
        self._noted: tf.Tensor | None = None  # the total, if this graph trains
        self._weight: tf.Tensor | None = None  # replaces that by rows
        if last is not None:  # batches not from the iterator are assumed to divide evenly
            self._noted = tf.where(tf.equal(last[1], rows), last[0], tf.constant(UNKNOWN, tf.int64))

    @property
    def fixed_rows(self) -> int | None:
        """How many rows this replica has in every step of its graph, as after `batch(drop_remainder=True)`."""
        known = tf.get_static_value(self.rows)
        return None if known is None else int(known)

    @property
    def may_be_empty(self) -> bool:
        """Whether it may have no rows: then one that counts for nothing is in their place."""
        return not self.fixed_rows

    @property
    def has_rows(self) -> tf.Tensor:
        with self._in_graph():
            return tf.not_equal(self.rows, 0)

    def only_if_rows(self, value: Value, otherwise: Structure = None) -> Structure:
        """Returns `value`, a tensor or IndexedSlices, if this replica has rows; else `otherwise` or zeros."""
        if not self.may_be_empty or value is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return with_values(value, self.only_if_rows)
        return tf.where(self.has_rows, value, tf.zeros_like(value) if otherwise is None else otherwise)

    @property
    def trains(self) -> bool:
        """Whether something has been, or is being, differentiated; else what was noted last is of another batch."""
        if self.step is not None:
            return self.step == "training"
        if is_differentiated() or _current.gradients or self.graph is None:
            return True
        return any(is_backward(op) for op in self.graph.get_operations())

    def total(self, *, exchange: bool) -> tf.Tensor | None:
        """Returns the rows of the global batch, int64, -1 if unknown; None if only a forbidden exchange would tell."""
        exchange = exchange or self.step == "training"  # all replicas take part in this
        if self._total is None and (self.trains or self.step == "evaluation"):  # whose notes are of its own batches
            self._total = self._noted
        if self._total is None and exchange:
            with self._in_graph(), replaced(_current, "gradients", None):
                if not self._changes:
                    self._total = self._sum_rows(self.rows)
                elif (both := self._sum_rows(tf.stack([self.rows, 1]))) is not None:
                    self._total, self.replicas = both[0], both[1]
        return self._total

    def relative(self, dtype: tf.DType, *, exchange: bool = False) -> tf.Tensor:
        """Returns this replica's rows over the average of all replicas, exactly 1 if all are equal or it is unknown."""
        total = self.total(exchange=exchange)
        one = tf.ones([], dtype)
        return one if total is None else self._if_known(total, _ratio(self.rows * self.replicas, total, dtype), one)

    def weight(self, even: tf.Tensor, *, exchange: bool | None = None) -> tf.Tensor:
        """The weight of this replica's mean; `even` if unknown. Differentiated or with `exchange` all must call it."""
        if self._weight is not None:
            return tf.cast(self._weight, even.dtype)
        total = self.total(exchange=is_differentiated() if exchange is None else exchange)
        return even if total is None else self._if_known(total, _ratio(self.rows, total, even.dtype), even)

    def of_amount(self, amount: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """The factor by which a mean counts by `amount`, not rows: exactly 1 if both are even; all call it."""
        amount = self.only_if_rows(tf.stop_gradient(tf.cast(amount, tf.float64)))
        total, rows = self._sum_rows(amount), self.total(exchange=True)
        if total is None or rows is None:
            return tf.ones([], dtype)
        alike = self.even
        counted = self._if_known(rows, _ratio(self.rows, rows, tf.float64), alike)
        even = tf.equal(amount * self._in_job, total) & tf.equal(counted, alike)
        factor = tf.math.divide_no_nan(tf.math.divide_no_nan(amount, total), counted)
        return tf.cast(tf.where(even, tf.ones([], tf.float64), factor), dtype)

    def of_whole_sum(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the factor that makes a sum over this replica's rows count whole where means are weighted by rows."""
        total = self.total(exchange=self.trains)
        even = self._in_job
        if total is None:
            return tf.cast(even, dtype)
        # Not a division: by a constant TensorFlow multiplies by its reciprocal, which is not exact.
        ratio = tf.math.divide_no_nan(tf.cast(total, tf.float64), tf.cast(self.rows, tf.float64))
        return tf.cast(self._if_known(total, ratio, even), dtype)

    def depends_on_rows(self, value: Value) -> bool:
        """Whether `value` may be computed from this replica's rows, not only from reduced values; eagerly always."""
        if self.graph is None or not tf.is_symbolic_tensor(getattr(value, "values", value)):
            return self.graph is None
        batch, reduced = set(map(id, self._inputs)), set(map(id, self._alike))

        def goes_on(tensor: tf.Tensor) -> bool:
            return id(tensor) not in reduced and not _is_size_within_row(tensor.op)

        # What a function within gets as an argument may be from rows.
        sources = computed_from(tf.nest.flatten(value, expand_composites=True), goes_on)
        if tf.is_symbolic_tensor(value) and self.kinds.of(value).of is Of.FIXED:
            # As a mean of ones: a constant where the number of rows is fixed. Numbers given with the batch count.
            return any(id(each) in batch and each.shape.rank == 0 for each in sources)
        return any(id(each) in batch or (id(each) not in reduced and is_argument(each)) for each in sources)

    def alike(self, value: Value) -> Value:
        """Notes that `value`, a tensor or IndexedSlices, is the same on all replicas, and returns it."""
        if self.graph is not None:
            for each in tf.nest.flatten(value, expand_composites=True):
                self._alike.append(each)
                self.kinds.note(each, FIXED)
        return value

    @property
    def kinds(self) -> RowKinds:
        """What tensors of the graph are to this replica's rows."""
        if self._kinds is None:
            self._kinds = RowKinds(self.fixed_rows or None)  # in place of no rows there is one
            for each in self._inputs:
                if tf.is_symbolic_tensor(each):
                    self._kinds.note(each, FIXED if each.shape.rank == 0 else Kind(Of.ROWS))
        return self._kinds

    def note_mean(self, value: Value) -> None:
        """Notes that `value`, a loss of Keras, is weighted so that replicas' values add up."""
        if tf.is_symbolic_tensor(value):
            self.kinds.note(value, MEAN)

    def has_each_row(self, value: Value) -> bool:
        """Whether `value` has numbers for each row, so far as its graph shows; eagerly if it is as long as the rows."""
        if self.graph is not None:
            return self.kinds.of(value).sums_rows
        return bool(value.shape.rank) and value.shape[0] == int(self.rows)

    def mark_each_row(self, result: Structure) -> None:
        """Marks, in a graph whose rows are fixed, what has a value for each of them: its size alone does not tell."""
        for value in tf.nest.flatten(result):
            if tf.is_symbolic_tensor(value) and value.shape.rank and value.shape[0] == self.fixed_rows:
                setattr(value, _EACH_ROW, self.kinds.of(value) == Kind(Of.ROWS))

    def counting(self, amount: tf.Tensor, even: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """Weights by this replica's scalar `amount` instead of by rows within the block."""
        amount = tf.stop_gradient(tf.cast(amount, tf.float64))
        if (total := self._sum_rows(amount)) is None:
            return contextlib.nullcontext()
        evenly = tf.equal(amount * self._in_job, total)
        weight = tf.where(evenly, tf.cast(even, tf.float64), tf.math.divide_no_nan(amount, total))
        return replaced(self, "_weight", weight)

    @property
    def even(self) -> tf.Tensor:
        """The weight of a replica, float64, if all have as many rows."""
        if isinstance(self.replicas, int):
            # By a constant TensorFlow does not divide, but multiplies: that is not exact.
            return tf.constant(1 / self.replicas, tf.float64)
        return 1 / self._in_job

    @property
    def _in_job(self) -> tf.Tensor:
        return tf.cast(self.replicas, tf.float64)

    def _if_known(self, total: tf.Tensor, value: tf.Tensor, otherwise: tf.Tensor) -> tf.Tensor:
        return tf.where((total > 0) & (self.rows >= 0), value, otherwise)

    @contextlib.contextmanager
    def _in_graph(self) -> Iterator[None]:
        """Enters the replica function's graph: what a branch needs must not exist in that branch alone."""
        if self.graph is None or ops.get_default_graph() is self.graph:
            yield
        else:
            with self.graph.as_default(), tf.control_dependencies(None):
                yield


class NestedShare(Share):
    """What a nested function, which reads a variable, knows: its rows, and in steps of Keras how many all have.

    Traced once, for training and evaluation alike, it does not weight a program's own means. `around`: its caller's.
    """

    def __init__(
        self, last_batch: LastBatch, replica: int, replicas: int, step: KerasStep | None, around: Share | None
    ) -> None:
        rows, total = last_batch.running(replica)
        super().__init__(rows, replicas, None, lambda amount: None, step)
        self._total = total if step is not None else None
        if around is not None:
            self._inputs, self._alike, self._kinds = around._inputs, around._alike, around.kinds
            self.at_end = around.at_end
        self.outer = around

    @property
    def trains(self) -> bool:
        return True  # evaluation counts no differently


@dataclass(frozen=True)
class _Function:
    """The function of one replica that a thread traces or runs."""

    graph: tf.Graph | None  # without parts of control flow
    share: Share | None  # None if no argument has rows
    nested: Callable[[], NestedShare]  # makes the share of the current graph
    step: KerasStep | None


class _Current(threading.local):
    function: _Function | None = None
    step: KerasStep | None = None
    # Gradients are being reduced: replicas in the whole job, and whether they are weighted by rows already.
    gradients: tuple[int, bool] | None = None


_current = _Current()


def with_share(
    function: Function, replicas: int, last_batch: LastBatch, sum_rows: Callable[[tf.Tensor], tf.Tensor]
) -> Function:
    """Wraps `function`, which each replica calls, so that the replica's share is current meanwhile; see `Share`."""
    step = _current.step  # of this thread; each replica has one of its own

    def shared(*args: object, **kwargs: object) -> Structure:
        given = (args, kwargs)
        rows, replica = rows_of(given), distribute_lib.get_replica_context()._replica_id
        eager, share, known = tf.executing_eagerly(), None, None
        if rows is not None:
            _warn_of_empty_first(given)
            noted = None if eager else last_batch.of_graph(step)
            last = None if noted is None else (noted[0], noted[1 + replica])
            if eager or tf.get_static_value(rows) in (None, 0):
                given = last_batch.fillers.fill(replica, rows, given)
            of_job, changes = last_batch.replicas_of_job(replicas), last_batch.changes
            share = Share(rows, of_job, last, sum_rows, step, given, changes=changes)
            known = share.total(exchange=False) if step == "training" else None
        nested = functools.partial(NestedShare, last_batch, replica, replicas, step, share)
        graph = None if eager else control_flow_free(ops.get_default_graph())
        own = _Function(graph, share, nested, step)
        with last_batch.giving(replica, rows, known), replaced(_current, "function", own):
            result = function(*given[0], **given[1])
            for end in list(share.at_end.values()) if share is not None else ():
                end(result)
        if share is not None and step is not None and share.fixed_rows:
            share.mark_each_row(result)
        if share is None or not share.may_be_empty:
            return result
        result = cut(rows, result)
        if step is not None:
            return result  # it is weighted by rows; a program's own may be summed

        def left_out(value: Value) -> Value:
            """Zeros for a number that may be computed from a batch without rows."""
            number = isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)
            return share.only_if_rows(value) if number and share.depends_on_rows(value) else value

        return tf.nest.map_structure(left_out, result)

    return shared


def _ratio(part: tf.Tensor, whole: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.cast(part, tf.float64) / tf.cast(whole, tf.float64), dtype)


def keras_step(*, trains: bool) -> contextlib.AbstractContextManager[None]:
    """Marks that replica functions which this thread calls in the block are steps of Keras."""
    return replaced(_current, "step", "training" if trains else "evaluation")


def in_keras_step() -> bool:
    """Whether this thread traces or runs a replica function that is a step of Keras."""
    return _current.function is not None and _current.function.step is not None


def current_share() -> Share | None:
    """Returns the share of the replica that this thread traces or runs; None outside, and in what XLA compiles."""
    function = _current.function
    if function is None:
        return None
    if tf.executing_eagerly():
        return function.share if function.graph is None else None
    graph = control_flow_free(ops.get_default_graph())
    if graph is function.graph:
        return function.share
    around = outer_graphs(graph)
    if not around or (function.graph is not None and function.graph not in around) or in_xla(graph):
        return None
    if not hasattr(graph, _NESTED):
        with graph.as_default(), tf.control_dependencies(None):
            setattr(graph, _NESTED, function.nested())
    nested: Share = getattr(graph, _NESTED)
    return nested


def reducing_gradients(replicas: int, *, weighted: bool = False) -> contextlib.AbstractContextManager[None]:
    """Marks what this thread reduces in the block as gradients; accumulated ones are `weighted` by rows already."""
    return replaced(_current, "gradients", (replicas, weighted))


@dataclass(frozen=True)
class Counted:
    """How this replica's gradients count in the sum over replicas."""

    has_rows: tf.Tensor | None = None  # bool scalar, whether they do; None if always
    weight: tf.Tensor | None = None  # float64 scalar that they are multiplied by; None if they are summed as they are

    def part(self, value: Value) -> Value:
        """Returns what `value`, a tensor or IndexedSlices, adds to the sum."""
        if self.has_rows is not None:
            value = with_values(value, lambda each: tf.where(self.has_rows, each, tf.zeros_like(each)))
        return self.weighted(value)

    def weighted(self, value: Value) -> Value:
        if self.weight is None:
            return value
        return with_values(value, lambda each: each * tf.cast(self.weight, each.dtype))


def with_values(value: Value, change: Callable[[tf.Tensor], tf.Tensor]) -> Value:
    """Returns `value`, a tensor or IndexedSlices, with changed values."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(change(value.values), value.indices, value.dense_shape)
    return change(value)


def counted() -> Counted:
    """Returns how what this thread reduces now counts; as it is, unless it is gradients."""
    if _current.gradients is None or _current.function is None:
        return Counted()
    replicas, weighted = _current.gradients
    share = current_share()
    has_rows = share.has_rows if share is not None and share.may_be_empty else None
    if not in_keras_step():
        return Counted(has_rows)
    if weighted:
        return Counted()
    if share is None:
        return Counted(weight=tf.constant(1 / replicas, tf.float64))
    return Counted(has_rows, share.weight(share.even, exchange=True))


def is_reducing_gradients() -> bool:
    return _current.gradients is not None


def _is_size_within_row(op: tf.Operation) -> bool:
    """Whether `op` takes sizes of a tensor, but not of its first dimension, which alone is from rows."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and begin.tolist() != [] and begin[0] > 0


def may_be_of_rows(value: Value) -> bool:
    """Whether `value`, which a replica function returned in a graph, may have one value for each row."""
    if not isinstance(value, tf.Tensor) or not value.shape.rank:
        return False
    return value.shape[0] is None or getattr(value, _EACH_ROW, False)


@functools.cache
def say_once(what: str) -> None:
    """Logs a warning about rows, once per process."""
    logger.warning('tfps: %s (docs/contract.md, "Rows that do not divide evenly")', what)
