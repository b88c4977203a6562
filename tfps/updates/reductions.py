"""Sums over workers that the program waits for: pulls inside graphs, and exchanges of eager code.

Gradients that only their update uses never come here (see pending.py). Sparse gradients are gathered, as in Horovod:
every worker gets the rows of all workers, in rank order.

A pull is declared right before the first run of its graph, and only if its result is used. During tracing it is unknown
whether anything but a deferred update uses the result of `all_reduce`. When a function is called, it and the functions
it calls are fully traced: pulls that no output or stateful op of its graph needs are pruned. The others are declared
then, in tracing order, which is the same on all ranks; the messages of a run arrive in any order.

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
from dataclasses import dataclass, field

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
_group_keys = itertools.count(1 << 30)  # TensorFlow's own groups of devices have small numbers, see strategy.py


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
    """Checks that `setting` may take a step in eager mode."""
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


def divide(value: Value, count: int) -> Value:
    """Returns `value / count` in the dtype of `value`: what MEAN does after SUM."""
    if isinstance(value, tf.IndexedSlices):
        return with_values(value, lambda each: divide(each, count))
    if not (value.dtype.is_floating or value.dtype.is_integer):
        raise UnsupportedError(f"a mean needs numbers, got dtype {value.dtype.name}")
    return value / tf.cast(count, value.dtype) if value.dtype.is_floating else value // tf.cast(count, value.dtype)


def _axis(axis: Value, value: tf.Tensor) -> int:
    """Returns `axis` of a gather of `value` as a number."""
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


class LocalGather:
    """Concatenates the IndexedSlices of all local replicas, within a graph. Used by the threads that trace.

    TensorFlow's own sum of IndexedSlices over local devices fails in a loop within a graph (steps_per_execution, an
    epoch in a function) as soon as two iterations have different numbers of rows: it remembers a shape for each
    collective, and one in a loop has the same number in all iterations ("Shape mismatch in the collective instance").
    It also crashes if all replicas have no rows. Here the number of a collective is the number of rows.
    """

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


@dataclass(eq=False)
class _TracedPull:
    """A pull, the key of its bucket, and the op that calls it."""

    runtime: Runtime
    transfer: Pull
    key: tuple[Hashable, ...]
    op: tf.Operation


@dataclass(eq=False)
class _Pulls:
    """The pulls of one graph and of the functions it calls, in tracing order."""

    traced: dict[_TracedPull, None] = field(default_factory=dict)
    settled: bool = False  # whether those that the graph needs are declared

    def add(self, pulls: Iterable[_TracedPull]) -> None:
        self.traced.update(dict.fromkeys(pulls))
        self.settled = False


def pull(
    runtime: Runtime, key: tuple[Hashable, ...], spec: BucketSpec, data: tf.Tensor, indices: tf.Tensor
) -> list[tf.Tensor]:
    """In a graph under construction: sends `data` and waits for the reduced bytes, [data, indices], flat uint8.

    `key` is the same for the same call on every rank and in every retrace.
    """
    graph, transfer = ops.get_default_graph(), Pull(spec)
    runtime.adopt(transfer, graph)
    pulled = graph_ops.pull(runtime.queue, transfer.id, data, indices)
    around = _add(graph, [_TracedPull(runtime, transfer, ("pull", *key, spec), pulled[0].op)])
    transfer.declare = lambda: _declare_late(runtime, around(), spec.name)
    return pulled


def _add(graph: tf.Graph, pulls: Iterable[_TracedPull]) -> weakref.ref[_Pulls]:
    """Adds `pulls` to `graph` and its outer graphs; returns the pulls of the outermost."""
    found = _Pulls()
    for each in outer_graphs(graph):
        # On the graph itself: they hold ops of the graph, so a table would keep both alive forever.
        found = getattr(each, _NAME, None) or _Pulls()
        setattr(each, _NAME, found)
        found.add(pulls)
    return weakref.ref(found)


def _prepare(graph: tf.Graph) -> None:
    """Declares the pulls of the function `graph`, which runs next or is called in the graph under construction."""
    pulls: _Pulls | None = getattr(graph, _NAME, None)
    if pulls is None or pulls.settled:
        return
    if not tf.executing_eagerly():  # a function may have been traced for another caller
        _add(ops.get_default_graph(), pulls.traced)
        return
    needed = {each: graph_ops.needed(each) for each in {one.op.graph for one in pulls.traced}}
    _declare([each for each in pulls.traced if each.op.name in needed[each.op.graph]])
    pulls.settled = True


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
        "tfps: %s is not compressed: the program computes with the sum, or it is no gradient of an optimizer",
        name,
    )


def _declare_late(runtime: Runtime, pulls: _Pulls | None, name: str) -> None:
    """Declares all pulls of a graph when `name`, which seemed unneeded, sends a message. Called by the pump thread.

    Its function is a dataset's, whose runs are invisible, or only a gradient needs its result. Other pulls of the graph
    may follow in a different order on each rank: they are declared together.
    """
    if pulls is None:
        raise TfpsError(f"the graph that reduces {name} is gone")
    _declare([each for each in pulls.traced if each.runtime is runtime])


def _call_flat(original: Function) -> Function:
    def call_flat(self: ConcreteFunction, *arguments: object, **named: object) -> Structure:
        _prepare(self.graph)
        return original(self, *arguments, **named)

    return call_flat


PATCHES = (
    Patch(
        ConcreteFunction,
        "_call_flat",
        _call_flat,
        "declares what a function sends right before it first runs: it is fully traced then, and no public hook lies "
        "between",
        "tests/updates/test_pulls.py",
    ),
)
