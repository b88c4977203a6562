"""Sums over workers that the program waits for: pulls inside graphs, and exchanges of eager code.

Gradients that only their update uses never come here (see deferred.py). Sparse gradients are gathered, as in Horovod:
every worker gets the rows of all workers, in rank order.

Tested in tests/integration/test_semantics.py.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import numpy as np
import tensorflow as tf

from tfps.collectives.collectives import AllGather, AllReduce
from tfps.errors import UnsupportedError
from tfps.exchange.aggregate import pack_sparse, unpack_sparse
from tfps.exchange.interface import BucketSpec
from tfps.graph import ops as graph_ops
from tfps.graph.shares import with_values
from tfps.runtime.runtime import Runtime
from tfps.types import Value
from tfps.updates.pulls import pull


class Reductions:
    """Sums `value`, a tensor or IndexedSlices, over the workers. Used by the threads that trace or run eagerly.

    `estimates`: the workers do not step together. In a graph a sum over them is then estimated by this worker's part.
    """

    def __init__(self, runtime: Runtime, *, estimates: bool = False) -> None:
        self._runtime, self.estimates = runtime, estimates

    def estimated(self, values: list[Value]) -> list[Value]:
        """Returns the sums of `values` over the workers if all workers had the same."""
        workers = self._runtime.exchange.view.workers
        return [with_values(value, lambda each: each * tf.cast(workers, each.dtype)) for value in values]

    def sum_all(self, values: list[Value], key: tuple[Hashable, ...]) -> list[Value]:
        """Returns the sums of `values`, each in its own shape and dtype.

        `key` is the same for the same call on every rank and in every retrace.

        Raises:
            TfpsError: eagerly, the exchange failed.
            UnsupportedError: a dtype cannot be summed.
        """
        if tf.executing_eagerly():
            self._runtime.spans.reduced = True
        if self._runtime.alone:
            return [identity(value) for value in values]
        if tf.executing_eagerly():
            return [self._now(value) for value in values]
        if self.estimates:
            return self.estimated(values)
        return [self._pull(value, (*key, index)) for index, value in enumerate(values)]

    def gather(self, components: list[tf.Tensor], axis: Value, key: tuple[Hashable, ...]) -> tf.Tensor:
        """Concatenates `components` of all replicas of all workers along `axis`, in replica id order.

        Only the sizes along `axis` may differ.

        Raises:
            TfpsError: eagerly, the exchange failed.
            UnsupportedError: the values, or in this mode, cannot be gathered; the message says what to do.
            tf.errors.InvalidArgumentError: the ranks' other sizes differ.
        """
        rank = components[0].shape.rank
        axis = _axis(axis, components[0])
        local = components[0] if len(components) == 1 else tf.concat(components, axis)
        if self._runtime.alone:
            return tf.identity(local)
        if self.estimates and not tf.executing_eagerly():
            raise UnsupportedError(
                "gather over workers within a function needs mode='sync', where workers step together; gather eagerly, "
                "at the end of an epoch"
            )
        # Move the axis to the front, so that the ranks' bytes follow each other in the result.
        order = [axis, *(each for each in range(rank) if each != axis)]
        turned = tf.transpose(local, order) if axis else local
        data, shape = graph_ops.to_raw(turned), graph_ops.to_raw(tf.shape(turned, tf.int64))
        spec = _gather_spec(f"gather {local.dtype.name} with {rank} dimensions along {axis}")
        if tf.executing_eagerly():
            parts = AllGather(self._runtime, spec.name)(pack_sparse(shape.numpy(), data.numpy()))
            shape, data = map(tf.constant, unpack_sparse(parts))
        else:
            data, shape = pull(self._runtime, key, spec, data, shape)
        shapes = tf.reshape(graph_ops.from_raw(shape, tf.int64), [-1, rank])
        message = f"gather along axis {axis}: all other sizes must be the same on all workers"
        with tf.control_dependencies([tf.debugging.assert_equal(shapes[:, 1:], shapes[:1, 1:], message)]):
            sizes = tf.concat([tf.reduce_sum(shapes[:, :1], 0), shapes[0, 1:]], 0)
        joined = tf.reshape(graph_ops.from_raw(data, local.dtype), sizes)
        if axis:
            joined = tf.transpose(joined, [order.index(each) for each in range(rank)])
        joined.set_shape([None if each == axis else size for each, size in enumerate(local.shape)])
        return joined

    def _pull(self, value: Value, key: tuple[Hashable, ...]) -> Value:
        spec = _spec(value)
        pulled = pull(self._runtime, key, spec, *_encode(value))
        return _decode(value, spec, pulled[0], pulled[1], self._runtime.exchange.view.workers)

    def _now(self, value: Value) -> Value:
        spec = _spec(value)
        data, indices = (part.numpy() for part in _encode(value))
        if spec.kind == "gather":
            indices, data = unpack_sparse(AllGather(self._runtime, spec.name)(pack_sparse(indices, data)))
        else:
            total = AllReduce(self._runtime, spec.name, [spec.nbytes // np.dtype(spec.dtype).itemsize], spec.dtype)
            data, indices = total(data.view(total.dtype)).view(np.uint8), np.empty(0, np.uint8)
        return _decode(value, spec, tf.constant(data), tf.constant(indices), self._runtime.exchange.view.workers)


def check_one_device(setting: str, devices: int) -> None:
    """Checks that `setting` may take a step in eager mode.

    Raises:
        UnsupportedError: this worker has several devices.
    """
    if devices > 1:
        raise UnsupportedError(
            f"{setting} takes eager steps (run_eagerly) with one device per worker, this one has {devices}; trace the "
            "step, give each worker one device, or leave that setting out"
        )


def as_tensor(value: Value) -> Value:
    """Converts `value` to a dense tensor; keeps IndexedSlices."""
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def sum_locally(components: Sequence[Value]) -> Value:
    """Sums the local replicas' values on the device of the first; concatenates IndexedSlices."""
    components = [as_tensor(each) for each in components]
    if len(components) == 1:
        return components[0]
    if isinstance(components[0], tf.IndexedSlices):
        values = tf.concat([each.values for each in components], 0)
        indices = tf.concat([each.indices for each in components], 0)
        return tf.IndexedSlices(values, indices, components[0].dense_shape)
    return functools.reduce(tf.add, components)


def identity(value: Value) -> Value:
    """Copies `value`, a tensor or IndexedSlices, to the current device."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(value.values), tf.identity(value.indices), value.dense_shape)
    return tf.identity(value)


def _axis(axis: Value, value: tf.Tensor) -> int:
    """Returns `axis` of a gather of `value` as a number.

    Raises:
        UnsupportedError: `value` cannot be gathered along it.
    """
    number, rank = tf.get_static_value(axis), value.shape.rank
    if isinstance(value, tf.IndexedSlices) or value.dtype in (tf.string, tf.variant, tf.resource):
        raise UnsupportedError(f"gather needs dense tensors of numbers, got {value!r}; encode what it stands for")
    if not rank:
        raise UnsupportedError(
            f"gather needs values with a known number of dimensions, at least one, got {value!r}; use reduce, or give "
            "it a dimension with tf.reshape(value, [1])"
        )
    if number is None or not 0 <= number < rank:
        raise UnsupportedError(f"the axis of a gather must be a constant from 0 to {rank - 1}, got {axis!r}")
    return int(number)


def _gather_spec(name: str) -> BucketSpec:
    return BucketSpec(names=(name,), kind="gather", nbytes=0, dtype="uint8", priority=0, occasional=True)


def _spec(value: Value) -> BucketSpec:
    """Returns how `value` is exchanged: IndexedSlices and unknown shapes by gathering, others by summing."""
    if isinstance(value, tf.IndexedSlices):
        return _gather_spec(f"IndexedSlices {value.values.dtype.name}")
    dtype = graph_ops.wire_dtype(value.dtype)
    name = f"tensor {value.shape} {value.dtype.name}"
    if not value.shape.is_fully_defined():
        return _gather_spec(name)
    return BucketSpec(
        names=(name,),
        kind="sum",
        nbytes=value.shape.num_elements() * dtype.size,
        dtype=dtype.name,
        priority=0,
        occasional=True,
    )


def _encode(value: Value) -> tuple[tf.Tensor, tf.Tensor]:
    if isinstance(value, tf.IndexedSlices):
        return graph_ops.to_bytes(value.values), graph_ops.to_bytes(tf.cast(value.indices, tf.int64))
    return graph_ops.to_bytes(value), tf.constant([], tf.uint8)


def _decode(value: Value, spec: BucketSpec, data: tf.Tensor, indices: tf.Tensor, workers: int) -> Value:
    if isinstance(value, tf.IndexedSlices):
        rows = tf.reshape(
            graph_ops.from_bytes(data, value.values.dtype), tf.concat([[-1], tf.shape(value.values)[1:]], 0)
        )
        rows.set_shape([None, *value.values.shape[1:]])
        where = tf.cast(graph_ops.from_bytes(indices, tf.int64), value.indices.dtype)
        return tf.IndexedSlices(tf.cast(rows, value.values.dtype), where, value.dense_shape)
    flat = graph_ops.from_bytes(data, value.dtype)
    if spec.kind == "gather":
        flat = tf.reduce_sum(tf.reshape(flat, [workers, -1]), 0)  # raises if the ranks' sizes differ
    summed = tf.cast(tf.reshape(flat, tf.shape(value)), value.dtype)
    summed.set_shape(value.shape)
    return summed


def divide(value: Value, count: int) -> Value:
    """Returns `value / count` in the dtype of `value`: what MEAN does after SUM."""
    if isinstance(value, tf.IndexedSlices):
        return with_values(value, lambda each: divide(each, count))
    if not (value.dtype.is_floating or value.dtype.is_integer):
        raise UnsupportedError(f"a mean needs numbers, got dtype {value.dtype.name}")
    return value / tf.cast(count, value.dtype) if value.dtype.is_floating else value // tf.cast(count, value.dtype)
