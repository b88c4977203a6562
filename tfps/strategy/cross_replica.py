"""Reductions and gathers in cross-replica context, outside of replica functions.

Tested in tests/integration/test_semantics.py.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence

import tensorflow as tf

from tfps.graph.tf_private import distribute_utils, mirrored_strategy, values
from tfps.runtime.runtime import Runtime
from tfps.types import Value
from tfps.updates.reductions import Reductions, as_tensor, divide, identity, sum_locally

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


class CrossReplica(mirrored_strategy.MirroredExtended):
    """`strategy.reduce`, `strategy.gather`, `reduce_to`: over all replicas of all workers."""

    _runtime: Runtime
    _reductions: Reductions

    @abc.abstractmethod
    def _cross_replica_key(self) -> tuple[Hashable, ...]:
        """Returns a key that identifies a reduction within its graph."""

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Value, destinations: Value, options: object
    ) -> Value:
        if distribute_utils.is_mirrored(value):
            if reduce_op == MEAN:
                return value
            raise ValueError(f"a sum over replicas needs one value per replica, got {value!r}, which all share")
        flat = tf.nest.flatten(value)
        local, counts = [], []  # local sums, and how many values they sum over all workers
        for each in flat:
            if each is None and reduce_op == MEAN:
                continue  # kept as is, like in MirroredStrategy
            if isinstance(each, values.DistributedValues):
                local.append(sum_locally(each.values))
                counts.append(self._num_replicas_in_sync)
            elif len(self._devices) == 1 or reduce_op == MEAN:  # all local replicas have it
                local.append(as_tensor(each))
                counts.append(self._runtime.exchange.view.workers)
            else:
                raise ValueError(f"a sum over replicas needs one value per replica, got {each!r}")
        with tf.device(None):
            summed = self._reductions.sum_all(local, self._cross_replica_key())
        if reduce_op == MEAN:
            summed = [divide(each, count) for each, count in zip(summed, counts, strict=True)]
        reduced = iter(summed)
        return tf.nest.pack_sequence_as(
            value, [each if each is None else self._to(next(reduced), destinations) for each in flat]
        )

    def _to(self, value: Value, destinations: Value) -> Value:
        """Copies `value` to every local device if `destinations` has several, as `update` and `all_reduce` expect."""
        if not isinstance(destinations, values.DistributedValues) or len(destinations._values) == 1:
            return value
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(identity(value))
        return distribute_utils.regroup(copies, wrap_class=values.Mirrored)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, pairs: Sequence[tuple[Value, Value]], options: object
    ) -> list[Value]:
        return [self._reduce_to(reduce_op, value, to, options) for value, to in pairs]

    def _gather_to_implementation(self, value: Value, destinations: Value, axis: Value, options: object) -> Value:
        components = value.values if isinstance(value, values.DistributedValues) else [value]
        with tf.device(None):
            local = [as_tensor(each) for each in components]
            gathered = self._reductions.gather(local, axis, self._cross_replica_key())
        return self._to(gathered, destinations)
