"""Sums over workers that the program waits for: pulls inside graphs, and exchanges of eager code.

A pull is declared right before its graph first runs, and only if its result is used: while tracing, that is unknown.

Tested in tests/updates/test_pulls.py, tests/integration/test_semantics.py and, `LocalGather`, in
tests/integration/test_machine.py and tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather, AllReduce
from tfps.compression import LEAST_BYTES
from tfps.errors import TfpsError, UnsupportedError
from tfps.exchange.aggregate import pack_sparse, unpack_sparse
from tfps.exchange.interface import BucketSpec
from tfps.graph import ops as graph_ops
from tfps.graph.patches import Patch
from tfps.graph.shares import with_values
from tfps.graph.tf_private import ConcreteFunction, ResourceVariable, ops, outer_graphs
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import UNDECLARED, Pull
from tfps.types import Function, Structure, Value

logger = logging.getLogger("tfps")
_NAME = "_tfps_pulls"  # of what a graph has of them
_group_keys = itertools.count(1 << 30, 3)  # TensorFlow's own groups of devices have small numbers


class Reductions:
    """Sums over the workers; in a graph, if these do not step together (`estimates`), by this worker's part alone."""

    def __init__(self, runtime: Runtime, *, estimates: bool, changes: bool = False) -> None:
        self._runtime, self.estimates = runtime, estimates
        self.changes = changes  # whether the number of workers may change

    def estimated(self, values: list[Value]) -> list[Value]:
        """Returns the sums of `values` over the workers if all workers had the same."""
        workers = self._runtime.exchange.view.workers
        return [with_values(value, lambda each: each * tf.cast(workers, each.dtype)) for value in values]

    def sum_all(self, values: list[Value], key: tuple[Hashable, ...]) -> list[Value]:
        """Returns the sums of `values`; `key` is the same for the same call on every rank and in every retrace."""
        eagerly = tf.executing_eagerly()
        if eagerly:
            self._runtime.spans.reduced = True
        if self._runtime.alone:
            return [identity(value) for value in values]
        if self.estimates and not eagerly:
            return self.estimated(values)
        return [self._sum(value, () if eagerly else (*key, index)) for index, value in enumerate(values)]

    def means(self, sums: list[Value], counts: Sequence[int], key: tuple[Hashable, ...]) -> list[Value]:
        """Returns the means over all workers of what `counts` values on each of them add up to `sums`."""
        workers = self._runtime.exchange.view.workers
        if not self.changes:
            totals = self.sum_all(sums, key)
            return [divide(total, count * workers) for total, count in zip(totals, counts, strict=True)]
        # A lost worker is in all of an exchange or in nothing of it, so the number of values travels with their sum.
        dense = [each.values if isinstance(each, tf.IndexedSlices) else each for each in sums]
        if any(isinstance(each, tf.IndexedSlices) for each in sums):
            raise UnsupportedError("a mean of IndexedSlices does not work with min_workers; take the mean of a tensor")
        flat = [
            tf.concat([tf.reshape(each, [-1]), tf.cast([count], each.dtype)], 0)
            for each, count in zip(dense, counts, strict=True)
        ]
        return [
            tf.reshape(divide(total[:-1], total[-1]), tf.shape(each))
            for total, each in zip(self.sum_all(flat, key), dense, strict=True)
        ]

    def gather(self, components: list[tf.Tensor], axis: Value, key: tuple[Hashable, ...]) -> tf.Tensor:
        """Concatenates all replicas' `components` along `axis`, in their order; only the sizes along it may differ."""
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
        data, shape = self._exchange(key, spec, data, shape)
        shapes = tf.reshape(graph_ops.from_raw(shape, tf.int64), [-1, rank])
        message = f"gather along axis {axis}: all other sizes must be the same on all workers"
        with tf.control_dependencies([tf.debugging.assert_equal(shapes[:, 1:], shapes[:1, 1:], message)]):
            sizes = tf.concat([tf.reduce_sum(shapes[:, :1], 0), shapes[0, 1:]], 0)
        joined = tf.reshape(graph_ops.from_raw(data, local.dtype), sizes)
        if axis:
            joined = tf.transpose(joined, [order.index(each) for each in range(rank)])
        joined.set_shape([None if each == axis else size for each, size in enumerate(local.shape)])
        return joined

    def _sum(self, value: Value, key: tuple[Hashable, ...]) -> Value:
        if isinstance(value, tf.IndexedSlices):
            spec = _gather_spec(f"IndexedSlices {value.values.dtype.name}")
            indices = graph_ops.to_bytes(tf.cast(value.indices, tf.int64))
            data, indices = self._exchange(key, spec, graph_ops.to_bytes(value.values), indices)
            size = tf.concat([[-1], tf.shape(value.values)[1:]], 0)
            rows = tf.reshape(graph_ops.from_bytes(data, value.values.dtype), size)
            rows.set_shape([None, *value.values.shape[1:]])
            where = tf.cast(graph_ops.from_bytes(indices, tf.int64), value.indices.dtype)
            return tf.IndexedSlices(tf.cast(rows, value.values.dtype), where, value.dense_shape)
        name, dtype, fixed = f"tensor {value.shape} {value.dtype.name}", graph_ops.wire_dtype(value.dtype), value.shape
        if fixed.is_fully_defined():
            spec = BucketSpec((name,), "sum", fixed.num_elements() * dtype.size, dtype.name, 0, occasional=True)
        else:
            spec = _gather_spec(name)
        data, _ = self._exchange(key, spec, graph_ops.to_bytes(value), tf.constant([], tf.uint8))
        flat = graph_ops.from_bytes(data, value.dtype)
        if spec.kind == "gather":
            size = tf.size(
                value
            )  # reshaping raises if the ranks' sizes differ; without items there are no ranks to see
            flat = tf.reduce_sum(tf.reshape(flat, tf.stack([-1, tf.maximum(size, 1)])), 0)[:size]
        summed = tf.cast(tf.reshape(flat, tf.shape(value)), value.dtype)
        summed.set_shape(value.shape)
        return summed

    def _exchange(
        self, key: tuple[Hashable, ...], spec: BucketSpec, data: tf.Tensor, indices: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """Returns the sum of all ranks' `data`, or all ranks' `data` and `indices`, flat uint8; in graphs by a pull."""
        if not tf.executing_eagerly():
            runtime, graph, transfer = self._runtime, ops.get_default_graph(), Pull(spec)
            runtime.adopt(transfer, graph)
            pulled = graph_ops.pull(runtime.queue, transfer.id, data, indices)
            around = _add(graph, [_TracedPull(runtime, transfer, ("pull", *key, spec), pulled[0].op)])
            transfer.declare = lambda: _declare_late(runtime, around(), spec.name)
            return pulled
        if spec.kind == "gather":
            parts = AllGather(self._runtime, spec.name)(pack_sparse(indices.numpy(), data.numpy()))
            indices, data = map(tf.constant, unpack_sparse(parts.values()))
        else:
            total = AllReduce(self._runtime, spec.name, [spec.nbytes // np.dtype(spec.dtype).itemsize], spec.dtype)
            data = tf.constant(total(data.numpy().view(total.dtype)).view(np.uint8))
        return data, indices


def check_one_device(setting: str, devices: int) -> None:
    """Checks that `setting` may take a step in eager mode."""
    if devices > 1:
        raise UnsupportedError(
            f"{setting} takes eager steps (run_eagerly) with one device per worker, this one has {devices}; trace the "
            "step, give each worker one device, or leave that setting out"
        )


def as_tensor(value: Value) -> Value:
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


def divide(value: Value, count: int | tf.Tensor) -> Value:
    """Returns `value / count` in the dtype of `value`: what MEAN does after SUM."""
    if isinstance(value, tf.IndexedSlices):
        return with_values(value, lambda each: divide(each, count))
    if not (value.dtype.is_floating or value.dtype.is_integer):
        raise UnsupportedError(f"a mean needs numbers, got dtype {value.dtype.name}")
    return value / tf.cast(count, value.dtype) if value.dtype.is_floating else value // tf.cast(count, value.dtype)


def _axis(axis: Value, value: tf.Tensor) -> int:
    rank, number = value.shape.rank, tf.get_static_value(axis)
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
    return BucketSpec((name,), "gather", 0, "uint8", 0, occasional=True)


class LocalGather:
    """Concatenates the IndexedSlices of all local replicas, within a graph. Used by the threads that trace.

    TensorFlow's own sum of these remembers one shape for each collective ("Shape mismatch in the collective instance"),
    and crashes if no replica has rows. Here the number of a collective is the number of rows.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices, self._lock = list(devices), threading.Lock()
        # By outermost graph and key: the number of the first of three groups, for sizes, values and indices.
        self._groups: weakref.WeakKeyDictionary[tf.Graph, dict[Hashable, int]] = weakref.WeakKeyDictionary()
        self._tokens: list[tf.Tensor] = []  # resources that keep each replica's collectives in order
        with tf.init_scope():
            for device in self._devices if len(self._devices) > 1 else ():
                with tf.device(device):
                    self._tokens.append(ResourceVariable(0.0, trainable=False, name="tfps_order"))

    def gather(self, own: tf.IndexedSlices, replica: int, key: Hashable) -> tf.IndexedSlices:
        """Returns the rows of all local replicas, which all call it in a graph; `key`: another for each call there."""
        with tf.device(self._devices[replica]):
            with self._lock:
                groups = self._groups.setdefault(outer_graphs(ops.get_default_graph())[-1], {})
                if key not in groups:
                    groups[key] = next(_group_keys)
                group = groups[key]
            rows = tf.shape(own.indices)[0]
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

    def _all(self, own: tf.Tensor, replica: int, group: int, instance: tf.Tensor | int) -> tf.Tensor:
        """Returns all replicas' `own`, one after the other; of one shape per group and instance."""
        return tf.raw_ops.CollectiveGatherV2(
            input=own,
            group_size=len(self._devices),
            group_key=group,
            instance_key=instance,
            ordering_token=[self._tokens[replica].handle],
            communication_hint="ring",  # NCCL would have to be launched in the order of TensorFlow's own collectives
        )


def _padded(rows: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
    return tf.concat([rows, tf.zeros(tf.concat([[more], tf.shape(rows)[1:]], 0), rows.dtype)], 0)


class _TracedPull(NamedTuple):
    runtime: Runtime
    transfer: Pull
    key: tuple[Hashable, ...]  # of its bucket
    op: tf.Operation  # that calls it


class _Pulls(dict[_TracedPull, None]):
    """The pulls of one graph and of the functions it calls, in tracing order."""

    settled = False  # whether those that the graph needs are declared


def _add(graph: tf.Graph, pulls: Iterable[_TracedPull]) -> weakref.ref[_Pulls]:
    """Adds `pulls` to `graph` and its outer graphs; returns the pulls of the outermost."""
    found = _Pulls()
    for each in outer_graphs(graph):
        # On the graph itself: they hold ops of the graph, so a table would keep both alive forever.
        found = getattr(each, _NAME, None) or _Pulls()
        setattr(each, _NAME, found)
        found.update(dict.fromkeys(pulls))
        found.settled = False
    return weakref.ref(found)


def _declare(pulls: Iterable[_TracedPull]) -> None:
    new = [each for each in pulls if each.transfer.bucket == UNDECLARED]
    for runtime in dict.fromkeys(each.runtime for each in new):
        own = [each for each in new if each.runtime is runtime]
        buckets = runtime.buckets([(each.key, each.transfer.spec) for each in own])
        for each, bucket in zip(own, buckets, strict=True):
            each.transfer.bucket = bucket
            if runtime.compresses and each.transfer.spec.nbytes >= LEAST_BYTES:
                _say_uncompressed(each.transfer.spec.name)


@functools.cache
def _say_uncompressed(name: str) -> None:
    logger.warning(
        "tfps: %s is not compressed: the program computes with the sum, or it is no gradient of an optimizer", name
    )


def _declare_late(runtime: Runtime, pulls: _Pulls | None, name: str) -> None:
    """Declares all pulls of a graph when `name`, which seemed unneeded, sends a message. Called by the pump thread.

    Its function is a dataset's, or only a gradient needs it. Others may follow in another order on each rank.
    """
    if pulls is None:
        raise TfpsError(f"the graph that reduces {name} is gone")
    _declare([each for each in pulls if each.runtime is runtime])


def _call_flat(original: Function) -> Function:
    """Declares the pulls of a function that runs next, or is called in the graph under construction."""

    def call_flat(self: ConcreteFunction, *arguments: object, **named: object) -> Structure:
        pulls: _Pulls | None = getattr(self.graph, _NAME, None)
        if pulls is not None and not pulls.settled:
            if tf.executing_eagerly():
                needed = {each: graph_ops.needed(each) for each in {one.op.graph for one in pulls}}
                _declare([each for each in pulls if each.op.name in needed[each.op.graph]])
                pulls.settled = True
            else:  # a function may have been traced for another caller
                _add(ops.get_default_graph(), pulls)
        return original(self, *arguments, **named)

    return call_flat


_WHY = (
    "declares what a function sends right before it first runs: it is fully traced then, and no public hook lies "
    "between"
)
PATCHES = (Patch(ConcreteFunction, "_call_flat", _call_flat, _WHY, "tests/updates/test_pulls.py"),)
