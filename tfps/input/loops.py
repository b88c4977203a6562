"""Loops over a dataset inside a `tf.function`: several workers agree on each batch.

Each run of the function creates its own iterator, which no host thread could follow: TensorFlow's iterator reads, and
the ranks decide whether to use a batch.

Tested in tests/integration/test_input.py.
"""

from __future__ import annotations

import itertools

import tensorflow as tf

from tfps.graph.ops import HOST
from tfps.graph.shares import UNKNOWN, rows_of
from tfps.graph.tf_private import ops, outer_graphs, values
from tfps.input.lockstep import CLOSED, Line, Lockstep, Request
from tfps.input.staging import Staging
from tfps.types import Batches, Structure, Value

_BEGINS, _NONE = -3, -2  # sent in place of the number of rows of the next batch
_numbers = itertools.count(-1, -1)  # distinct from those of feeds


class Loop(Request):
    """A dataset loop inside a function: TensorFlow's iterator reads, the ranks decide whether to use a batch.

    Each run of the function is a separate line. Its batches are not known ahead, so the ranks agree on each one when it
    is read: a round trip per training batch.
    """

    def __init__(self, lockstep: Lockstep) -> None:
        graph = ops.get_default_graph()
        super().__init__(lockstep, outer_graphs(graph)[-1])
        lockstep.runtime.adopt(self, graph)
        self._line: Line | None = None  # of this run; pump thread only
        with tf.init_scope(), tf.device(HOST):
            # Whether to use the batch, an error, the rows of the batch summed over all workers.
            self._answers = tf.queue.FIFOQueue(1000, [tf.bool, tf.string, tf.int64], [[], [], []], name="tfps_loop")

    def begin(self) -> None:
        """Adds the op that begins a run."""
        self.send(tf.constant(_BEGINS, tf.int64))

    def may_use(self, has_batch: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Announces this rank's batch; returns whether all ranks have one, and its rows summed over them."""
        asked = self.send(tf.where(has_batch, rows, tf.constant(_NONE, tf.int64)))
        with tf.control_dependencies([asked]), tf.device(HOST):
            used, error, total = tf.raw_ops.QueueDequeueV2(
                handle=self._answers.queue_ref, component_types=self._answers.dtypes
            )
            with tf.control_dependencies([tf.debugging.Assert(tf.equal(error, ""), [error])]):
                used, total = tf.identity(used), tf.identity(total)
        used.set_shape([])
        total.set_shape([])
        return used, total

    def collect(self, graph_run: tf.Tensor, data: tf.Tensor, indices: tf.Tensor, times: tf.Tensor) -> None:
        said, line = int(graph_run), self._line
        if said == _BEGINS or line is None:
            self._begin()
            return
        if line.gone:
            self._answer(None, CLOSED, UNKNOWN)
            return
        if said != _NONE:
            line.exists(line.asked, said)
            line.staged(line.asked, line.asked)
        else:
            line.ended("")
        self.lockstep.request(self._number, self.trains(), eager=False)

    def _begin(self) -> None:
        if self._line is not None:
            self._line.leave()
        with tf.device(HOST):
            while int(self._answers.size()):  # left from a stopped run
                self._answers.dequeue()
        self._number = next(_numbers)
        self._line = self.lockstep.line(self._number, None, self._answer, foresees=False)

    def _answer(self, key: int | None, error: str, rows: int) -> None:
        with tf.init_scope(), tf.device(HOST):
            self._answers.enqueue([key is not None, error, tf.constant(rows, tf.int64)])


class LoopIterator:
    """Wraps TensorFlow's iterator inside a function; several workers agree on each batch.

    Each run of the function creates a new one, which a staging thread could not follow.
    """

    def __init__(self, iterator: Batches, staging: Staging, loop: Loop) -> None:
        self._iterator, self._staging, self._loop = iterator, staging, loop
        loop.begin()

    def __iter__(self) -> LoopIterator:
        return self

    def __next__(self) -> Structure:
        return self.get_next()

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Returns the next batch; empty at the end of the data, here or (if the function trains) on another worker."""
        batch = self._iterator.get_next_as_optional()
        replicas = len(self._staging.devices)
        rows = tf.cond(
            batch.has_value(),
            lambda: self._rows(batch.get_value(), replicas),
            lambda: tf.constant([UNKNOWN] * replicas, tf.int64),
        )
        unknown = tf.constant(UNKNOWN, tf.int64)
        total = tf.where(tf.reduce_any(rows < 0), unknown, tf.reduce_sum(rows))
        used, total = self._loop.may_use(batch.has_value(), total)
        if (last_batch := self._staging.last_batch) is not None:
            last_batch.note(self, tf.concat([[total], rows], 0))
        return tf.cond(used, lambda: batch, lambda: tf.experimental.Optional.empty(batch.element_spec))

    @staticmethod
    def _rows(batch: Structure, replicas: int) -> tf.Tensor:
        """Returns the rows of each replica's part of `batch`, int64 [replicas]."""
        parts = [tf.nest.map_structure(lambda each, i=i: _part(each, i), batch) for i in range(replicas)]
        found = [rows_of(part) for part in parts]
        return tf.stack([tf.constant(UNKNOWN, tf.int64) if rows is None else rows for rows in found])

    def get_next(self) -> Structure:
        """Returns the next batch.

        Raises:
            tf.errors.OutOfRangeError: the data has ended.
        """
        batch = self.get_next_as_optional()
        go_on = tf.cond(batch.has_value(), lambda: tf.constant(0, tf.int64), self._staging.no_batch)
        with tf.control_dependencies([go_on]):
            return batch.get_value()


def _part(value: Value, replica: int) -> Value:
    return value.values[replica] if isinstance(value, values.DistributedValues) else value
