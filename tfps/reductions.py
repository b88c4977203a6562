"""Sums over workers that the program waits for: pulls inside graphs, and exchanges of eager code.

Gradients that nothing but their update uses never come here (see deferred.py). Sparse gradients are gathered, as
Horovod does: every worker ends with the rows of all workers, in rank order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfps import graph_ops
from tfps.errors import UnsupportedError
from tfps.exchange import BucketSpec
from tfps.runtime import Runtime
from tfps.sparse import pack_sparse, unpack_sparse
from tfps.tf_private import ops
from tfps.transfers import Pull


class Reductions:
    """Sums `value`, a tensor or IndexedSlices, over the workers. Used by the threads that trace or run eagerly."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def sum_all(self, values: list[Any], key: tuple[Any, ...]) -> list[Any]:
        """The sums of `values`, each in its own shape and dtype.

        `key` is the same for the same call on every rank and in every retrace.

        Raises:
            TfpsError: eagerly, the exchange failed.
            UnsupportedError: a dtype cannot be summed.
        """
        if self._runtime.alone:
            return [_identity(value) for value in values]
        if tf.executing_eagerly():
            return [self._now(value) for value in values]
        specs = [_spec(value) for value in values]
        keys = [("pull", *key, index, spec) for index, spec in enumerate(specs)]
        with ops.init_scope():
            buckets = self._runtime.buckets(list(zip(keys, specs, strict=True)))
        return [self._pull(value, bucket, spec) for value, bucket, spec in zip(values, buckets, specs, strict=True)]

    def _pull(self, value: Any, bucket: int, spec: BucketSpec) -> Any:
        transfer = Pull(bucket, spec)
        self._runtime.adopt(transfer, ops.get_default_graph())
        data, indices = _encode(value)
        pulled = graph_ops.pull(self._runtime.queue, transfer.results.queue_ref, transfer.id, data, indices)
        return _decode(value, spec, pulled[0], pulled[1], self._runtime.exchange.workers)

    def _now(self, value: Any) -> Any:
        spec = _spec(value)
        (bucket,) = self._runtime.buckets([(("eager", spec), spec)])
        data, indices = (part.numpy() for part in _encode(value))
        reply = self._runtime.exchange_now(bucket, pack_sparse(indices, data) if spec.kind == "gather" else data)
        if spec.kind == "gather":
            indices, data = unpack_sparse(reply.parts or [])
        else:
            data, indices = reply.sum, np.empty(0, np.uint8)
        return _decode(value, spec, tf.constant(data), tf.constant(indices), self._runtime.exchange.workers)


def _identity(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), value.dense_shape)
    return tf.identity(value)


def _spec(value: Any) -> BucketSpec:
    """How `value` is exchanged: sparse ones, and shapes that are not known, by gathering."""
    if isinstance(value, tf.IndexedSlices):
        return BucketSpec(
            name=f"IndexedSlices {value.values.dtype.name}",
            kind="gather",
            nbytes=0,
            dtype="uint8",
            priority=0,
            occasional=True,
        )
    dtype = graph_ops.wire_dtype(value.dtype)
    name = f"tensor {value.shape} {value.dtype.name}"
    if not value.shape.is_fully_defined():
        return BucketSpec(name=name, kind="gather", nbytes=0, dtype="uint8", priority=0, occasional=True)
    return BucketSpec(
        name=name,
        kind="sum",
        nbytes=value.shape.num_elements() * dtype.size,
        dtype=dtype.name,
        priority=0,
        occasional=True,
    )


def _encode(value: Any) -> tuple[tf.Tensor, tf.Tensor]:
    if isinstance(value, tf.IndexedSlices):
        return graph_ops.to_bytes(value.values), graph_ops.to_bytes(tf.cast(value.indices, tf.int64))
    return graph_ops.to_bytes(value), tf.constant([], tf.uint8)


def _decode(value: Any, spec: BucketSpec, data: tf.Tensor, indices: tf.Tensor, workers: int) -> Any:
    if isinstance(value, tf.IndexedSlices):
        rows = tf.reshape(
            graph_ops.from_bytes(data, value.values.dtype), tf.concat([[-1], tf.shape(value.values)[1:]], 0)
        )
        rows.set_shape([None, *value.values.shape[1:]])
        where = tf.cast(graph_ops.from_bytes(indices, tf.int64), value.indices.dtype)
        return tf.IndexedSlices(tf.cast(rows, value.values.dtype), where, value.dense_shape)
    flat = graph_ops.from_bytes(data, value.dtype)
    if spec.kind == "gather":
        flat = tf.reduce_sum(tf.reshape(flat, [workers, -1]), 0)  # raises where the ranks' sizes differ
    summed = tf.cast(tf.reshape(flat, tf.shape(value)), value.dtype)
    summed.set_shape(value.shape)
    return summed


def divide(value: Any, count: int) -> Any:
    """`value / count` in the dtype of `value`: what MEAN does after SUM."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(divide(value.values, count), value.indices, value.dense_shape)
    if not (value.dtype.is_floating or value.dtype.is_integer):
        raise UnsupportedError(f"a mean needs numbers, got dtype {value.dtype.name}")
    return value / tf.cast(count, value.dtype) if value.dtype.is_floating else value // tf.cast(count, value.dtype)
