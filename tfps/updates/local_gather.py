"""Sparse gradients of a worker's replicas, joined within a graph.

TensorFlow's own sum of IndexedSlices over local devices fails in a loop within a graph (steps_per_execution, an epoch
in a function) as soon as two iterations have different numbers of rows: it remembers a shape for each collective, and
one in a loop has the same number in all iterations ("Shape mismatch in the collective instance"). It also crashes if
all replicas have no rows. Here the number of a collective is the number of rows.

Tested in tests/integration/test_machine.py and tests/integration/test_rows.py.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence

import tensorflow as tf

from tfps.graph.tf_private import ResourceVariable, ops, outer_graphs

# TensorFlow's own groups of devices have small numbers, see strategy.py.
_group_keys = itertools.count(1 << 30)


class LocalGather:
    """Concatenates the IndexedSlices of all local replicas. Used by the threads that trace."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._lock = threading.Lock()
        # By outermost graph and key: the number of the first of three groups, for sizes, values and indices.
        self._groups: weakref.WeakKeyDictionary[tf.Graph, dict[Hashable, int]] = weakref.WeakKeyDictionary()
        self._tokens: list[tf.Tensor] = []  # resources that keep each replica's collectives in order
        with tf.init_scope():
            for device in self._devices if len(self._devices) > 1 else ():
                with tf.device(device):
                    self._tokens.append(ResourceVariable(0.0, trainable=False, name="tfps_order"))

    def gather(self, own: tf.IndexedSlices, replica: int, key: Hashable) -> tf.IndexedSlices:
        """Returns the rows of all local replicas, in their order; every one of them must call it, in a graph.

        Args:
            own: rows of this replica, values [rows, ...]; none is fine. Only the number of rows may differ.
            replica: number of this replica on this worker.
            key: the same for the same call on all replicas, and another for each call in a graph.
        """
        with tf.device(self._devices[replica]):
            group, rows = self._group(key), tf.shape(own.indices)[0]
            # TensorFlow's order is that of the devices' links: each says who it is.
            said = self._all(tf.stack([[replica, rows]]), replica, group, 0)
            order = tf.argsort(said[:, 0])
            sizes = tf.gather(said[:, 1], order)
            most = tf.maximum(tf.reduce_max(sizes), 1)
            values = self._all(_padded(own.values, most - rows), replica, group + 1, most)
            indices = self._all(_padded(own.indices, most - rows), replica, group + 2, most)
            kept = tf.boolean_mask(order[:, None] * most + tf.range(most), tf.sequence_mask(sizes, most))
            values, indices = tf.gather(values, kept), tf.gather(indices, kept)
            values.set_shape([None, *own.values.shape[1:]])
        return tf.IndexedSlices(values, indices, own.dense_shape)

    def _group(self, key: Hashable) -> int:
        with self._lock:
            groups = self._groups.setdefault(outer_graphs(ops.get_default_graph())[-1], {})
            if key not in groups:
                groups[key] = next(_group_keys)
                next(_group_keys), next(_group_keys)
            return groups[key]

    def _all(self, own: tf.Tensor, replica: int, group: int, instance: tf.Tensor | int) -> tf.Tensor:
        """Returns the tensors `own` of all replicas, one after the other; of one shape per group and instance."""
        return tf.raw_ops.CollectiveGatherV2(
            input=own,
            group_size=len(self._devices),
            group_key=group,
            instance_key=instance,
            ordering_token=[self._tokens[replica].handle],
            communication_hint="ring",  # NCCL would have to be launched in the order of TensorFlow's own collectives
        )


def _padded(rows: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
    """Returns `rows` with so many `more` of zeros."""
    return tf.concat([rows, tf.zeros(tf.concat([[more], tf.shape(rows)[1:]], 0), rows.dtype)], 0)
