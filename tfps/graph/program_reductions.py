"""What a program itself reduces in a replica function (`context.all_reduce`, `all_gather`) counts by rows, too.

A replica without rows adds nothing, and a mean is one over rows. In steps of Keras gradients are weighted only where
they are exchanged: between two replicas they pass as parts of the weighted whole, so that what reaches another one, and
is weighted there again, is right.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf

from tfps.graph.shares import Share, current_share, in_keras_step, is_reducing_gradients
from tfps.types import Structure, Value

_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


@functools.cache
def count_rows(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Wraps the reductions of replica contexts of a `strategy_class`; done once per process."""
    reduce, gather = tf.distribute.ReplicaContext.all_reduce, tf.distribute.ReplicaContext.all_gather

    def share_of(context: tf.distribute.ReplicaContext) -> Share | None:
        if not isinstance(context.strategy, strategy_class) or is_reducing_gradients():
            return None
        return current_share()

    @functools.wraps(reduce)
    def all_reduce(
        self: tf.distribute.ReplicaContext,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Structure,
        options: object = None,
    ) -> Structure:
        share = share_of(self)
        if share is None:
            return reduce(self, reduce_op, value, options)
        reduce_op = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        flat = [each if isinstance(each, tf.IndexedSlices) else tf.convert_to_tensor(each) for each in _flat(value)]
        if reduce_op == _MEAN:
            if not all(isinstance(each, tf.Tensor) and each.dtype.is_floating for each in flat):
                return reduce(self, reduce_op, value, options)
            even = tf.constant(1 / share.replicas, tf.float64)
            weight = share.weight(even, exchange=True)
            flat = [each * tf.cast(weight, each.dtype) for each in flat]
        own = [_leaving(share, share.only_if_rows(each)) if share.depends_on_rows(each) else each for each in flat]
        summed = reduce(self, _SUM, own, options)
        return tf.nest.pack_sequence_as(value, [share.alike(_arriving(share, each)) for each in summed])

    @functools.wraps(gather)
    def all_gather(self: tf.distribute.ReplicaContext, value: Structure, axis: Value, options: object = None) -> Value:
        share = share_of(self)
        if share is None or tf.get_static_value(axis) != 0:
            return gather(self, value, axis, options)

        def own(each: Value) -> Value:
            each = tf.convert_to_tensor(each)
            if not each.shape.rank or not share.depends_on_rows(each):
                return each
            if share.may_be_empty:
                each = each[: tf.where(share.has_rows, tf.shape(each)[0], 0)]
            return _leaving(share, each)

        gathered = gather(self, tf.nest.map_structure(own, value), axis, options)
        return tf.nest.map_structure(lambda each: share.alike(_arriving(share, each)), gathered)

    tf.distribute.ReplicaContext.all_reduce, tf.distribute.ReplicaContext.all_gather = all_reduce, all_gather


def _flat(value: Structure) -> list[Value]:
    flat: list[Value] = tf.nest.flatten(value)
    return flat


def _leaving(share: Share, value: Value) -> Value:
    """Returns `value`, whose gradient comes from the whole job: this replica's weight is taken from it."""
    return _with_gradient(share, value, tf.math.divide_no_nan)


def _arriving(share: Share, value: Value) -> Value:
    """Returns `value`, whose gradient goes to the whole job, by this replica's weight."""
    return _with_gradient(share, value, tf.multiply)


def _with_gradient(share: Share, value: Value, change: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Value:
    if not in_keras_step() or not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    relative = share.relative(value.dtype)

    @tf.custom_gradient
    def weighted(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(value), lambda gradient: change(gradient, relative)

    return weighted(value)
