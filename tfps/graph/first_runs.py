"""Tells the host when parts of a step run for the first time with some sizes, which is when XLA compiles them.

A graph compares the sizes of what it gets with those of its last run, and sends messages only if they differ, or while
a capture is recorded: one before its parts run, one with their times when all have ended.

Tested in tests/strategy/test_xla.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfps.graph import tf_private
from tfps.graph.ops import HOST, clock, traced_once
from tfps.graph.parts import Part
from tfps.graph.timestamps import now_after
from tfps.types import Variable

_RESOURCE = tf.TensorSpec([], tf.resource)
_NUMBER = tf.TensorSpec([], tf.int64)


def _tell(queue: tf.Tensor, transfer: tf.Tensor, run: tf.Tensor, sizes: tf.Tensor, times: tf.Tensor) -> tf.Operation:
    data = tf.reshape(tf.bitcast(sizes, tf.uint8), [-1])
    components = [transfer, run, data, tf.constant([], tf.uint8), times, queue]
    return tf.raw_ops.QueueEnqueueV2(handle=queue, components=components)


@traced_once(_RESOURCE, _RESOURCE, _RESOURCE, _NUMBER, tf.TensorSpec([None], tf.int64))
def tfps_sizes(
    queue: tf.Tensor, recording: tf.Tensor, last: tf.Tensor, transfer: tf.Tensor, sizes: tf.Tensor
) -> tf.Tensor:
    """Returns a number of this run if its sizes are not those of the last one, or all are of interest, else 0."""
    before = tf.raw_ops.ReadVariableOp(resource=last, dtype=tf.int64)
    recorded = tf.raw_ops.ReadVariableOp(resource=recording, dtype=tf.bool)
    differ = tf.logical_or(recorded, tf.reduce_any(tf.not_equal(before, sizes)))

    def tell() -> tf.Tensor:
        run = tf.bitcast(clock(), tf.int64)
        told = _tell(queue, transfer, run, sizes, tf.constant([], tf.float64))
        noted = tf.raw_ops.AssignVariableOp(resource=last, value=sizes)
        with tf.control_dependencies([told, noted]):
            return tf.identity(run)

    # A closed runtime takes no messages; a model that it leaves behind may still predict.
    tells = tf.logical_and(differ, tf.logical_not(tf.raw_ops.QueueIsClosedV2(handle=queue)))
    return tf.cond(tells, tell, lambda: tf.constant(0, tf.int64))


@traced_once(_RESOURCE, _NUMBER, _NUMBER, tf.TensorSpec([None], tf.float64))
def tfps_ran(queue: tf.Tensor, transfer: tf.Tensor, run: tf.Tensor, times: tf.Tensor) -> tf.Tensor:
    def tell() -> tf.Tensor:
        with tf.control_dependencies([_tell(queue, transfer, run, tf.constant([], tf.int64), times)]):
            return tf.constant(True)

    tells = tf.logical_and(tf.not_equal(run, 0), tf.logical_not(tf.raw_ops.QueueIsClosedV2(handle=queue)))
    return tf.cond(tells, tell, lambda: tf.constant(False))


def flag() -> Variable:
    """Whether a capture is recorded, as graphs read it."""
    with tf.init_scope(), tf.device(HOST):
        return tf_private.ResourceVariable(False, dtype=tf.bool, trainable=False, name="tfps_recording")


def watch(
    parts: Sequence[Part], sized: Sequence[tf.Tensor], queue: tf.Tensor, recording: Variable, transfer: int
) -> Variable:
    """Has the current graph send the messages about `parts`; returns the variable with the sizes of its last run.

    The first has, as data, one and the sizes of `sized` (int64); the second, as times, when each part had what it needs
    and when it had ended. Both have the same number.
    """
    with tf.device(HOST), tf.control_dependencies(None):
        identity = tf.constant(transfer, tf.int64)
        shapes = [tf.shape(each, tf.int64) for each in sized]
        sizes = tf.concat([tf.ones([1], tf.int64), *shapes], 0)  # the one: before the first run there are none
        with tf.init_scope():
            last = tf_private.ResourceVariable([0] * sizes.shape[0], dtype=tf.int64, trainable=False, name="tfps_sizes")
        run = tfps_sizes()(queue, recording.handle, last.handle, identity, sizes)
        tf_private.set_read_only_inputs(run, [0, 1])
        times = []
        for part in parts:
            tf_private.set_control_inputs(part.call, [*part.call.control_inputs, run.op])
            times += [now_after([run, *part.call.inputs]), now_after([part.call])]
        told = tfps_ran()(queue, identity, run, tf.stack(times))
        tf_private.set_read_only_inputs(told, [0])
    return last
