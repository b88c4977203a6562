"""Pending updates, which share buckets and gates, and one bucket of them on its way into a graph.

An `update` with an untouched result of `all_reduce` becomes a `PendingUpdate`. When they are emitted (scheduler.py),
small variables fuse in forward order into a `PlannedBucket`, whose update is traced as a function of the reduced bytes.

Tested in tests/updates/test_pending.py, tests/updates/test_gate_groups.py and tests/strategy/test_exactness.py.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tfps.compression import LEAST_BYTES, NONE
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketSpec
from tfps.exchange.kinds import BucketKind
from tfps.exchange.layout import bucket_limit
from tfps.graph import common_rows
from tfps.graph import ops as graph_ops
from tfps.graph.ops import Gate
from tfps.graph.shares import Counted
from tfps.graph.tf_private import ConcreteFunction, distribute_lib, flat_call, ops, outer_graphs
from tfps.graph.timestamps import PassedGates
from tfps.runtime.remote import RemoteRule
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Argument, Function, Value, Variable
from tfps.updates import invariants
from tfps.updates.names import common_name, own_name
from tfps.updates.variables import Deferral, GatedVariable, deferring

_groups_made = itertools.count(1)


@dataclass(eq=False)
class Reduction:
    """One `all_reduce` call of one replica, with a count of its results that became pending updates."""

    size: int
    counted: Counted = field(default_factory=Counted)
    # By graph id: each branch of a tf.cond counts separately.
    pending: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Reduced:
    """One result of an `all_reduce`: the gradient that went in and the tensor (or IndexedSlices) that came out."""

    gradient: Value
    result: Value
    reduction: Reduction
    marks: common_rows.Marks | None = None  # of slices of the gradient that are to be summed

    @property
    def common(self) -> bool:
        """Whether some slices are those of all replicas."""
        return self.marks is not None and self.marks.common


@dataclass(eq=False)
class PendingUpdate:
    """An update call that waits to be emitted: `function(component, gradient, *arguments)`."""

    variable: GatedVariable
    function: Function
    arguments: tuple[Argument, ...]
    reduced: Reduced
    requested_codec: str = NONE  # of the variable's gradient, if it can be compressed
    trained: GatedVariable | None = None  # what the gradient is of, if not of the variable

    @property
    def sparse(self) -> bool:
        return isinstance(self.reduced.gradient, tf.IndexedSlices)

    @property
    def dtype(self) -> tf.DType:
        return graph_ops.wire_dtype(self.reduced.gradient.dtype)

    @property
    def nbytes(self) -> int:
        return int(math.prod(self.variable.shape)) * int(self.dtype.size)

    @property
    def codec(self) -> str:
        """The codec of the gradient; none if it is sparse or not of single or half precision."""
        return NONE if self.sparse or self.dtype != tf.float32 else self.requested_codec

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """What updates that share a bucket have in common; of those by pservers also the rule and step's scalars."""
        kind = (self.function.number, id(self.arguments[0])) if isinstance(self.function, RemoteRule) else ()
        counted = self.reduced.reduction.counted
        return self.dtype, counted.has_rows is None, counted.weight is None, self.codec, *kind


@dataclass(eq=False)
class GraphState:
    """What one strategy knows about one graph under construction."""

    first_use: dict[str, int] = field(default_factory=dict)  # by unique id of the variable; of the outermost graph only
    reduced: dict[int, Reduced] = field(default_factory=dict)  # by id of the result
    pending: dict[int, list[PendingUpdate]] = field(default_factory=dict)  # by replica
    inputs: list[tf.Tensor] = field(default_factory=list)  # of the replica function
    passed: PassedGates = field(default_factory=PassedGates)
    sent: list[PendingUpdate] = field(default_factory=list)  # whose gradients this call has sent
    reductions: Counter[Hashable] = field(default_factory=Counter)  # so far, by replica; of the outermost graph only


def fuse(
    pending: Iterable[PendingUpdate], order: dict[str, int], slice_bytes: int, first_bytes: int
) -> list[list[PendingUpdate]]:
    """Groups `pending` into buckets in forward order: those of one kind up to `bucket_limit`, sparse ones alone."""
    buckets: list[list[PendingUpdate]] = []
    # By kind: one that has room for so many more bytes. Each bucket costs a call, so large ones do not part small ones.
    open_: dict[Hashable, tuple[list[PendingUpdate], int]] = {}
    before = 0
    units: dict[Hashable, list[PendingUpdate]] = {}  # variables that may share a gate stay together
    for item in sorted(pending, key=lambda item: order.get(item.variable._unique_id, len(order))):
        together = item.variable.group and not item.sparse
        units.setdefault((item.variable.group, item.kind) if together else id(item), []).append(item)
    for unit in units.values():
        if unit[0].sparse:
            buckets.append(unit)
            continue
        kind, nbytes = unit[0].kind, sum(item.nbytes for item in unit)
        last, left = open_.get(kind, ([], -1))
        room = bucket_limit(before, slice_bytes, first_bytes) - nbytes
        if nbytes <= left:
            last += unit
            open_[kind] = last, left - nbytes
        else:
            buckets.append(unit)
            if room > left:
                open_[kind] = unit, room
        before += nbytes
    return buckets


def group_gates(
    variables: Iterable[GatedVariable], limit: int, codec: Callable[[GatedVariable], str] = lambda _: NONE
) -> None:
    """Groups neighbors among `variables` (of an optimizer, in its order) up to `limit` bytes, alike on all ranks."""
    groups: list[list[GatedVariable]] = [[]]
    filled, kind = 0, None
    for variable in variables:
        nbytes = int(variable.dtype.size) * int(variable.shape.num_elements() or 0)
        own = variable.dtype, variable._devices, codec(variable)
        # A sparse gradient, as embeddings presumably have, gets a bucket of its own.
        embeds = "embeddings" in str(variable.name)
        joins = variable.has_own_gates and not variable.group and not embeds and nbytes <= limit
        if not joins or filled + nbytes > limit or own != kind:
            groups.append([])
            filled, kind = 0, own
        if joins:
            groups[-1].append(variable)
            filled += nbytes
    for group in filter(None, groups):
        number = next(_groups_made)
        for variable in group:
            variable.group = number
        # Else a graph may hold the gate of one: buckets depend on groups, and only this worker on what shares a gate.
        if not any(variable.is_gate_in_use() for variable in group):
            group[0].share_gates_with(group[1:])


class PlannedBucket(Deferral):
    """Updates of one kind that travel and run together on a local replica; in forward order (`order`: of first use)."""

    remote = False  # whether pservers update its variables
    comparable = True  # whether its update may return a digest

    def __init__(self, updates: Sequence[PendingUpdate], graph: tf.Graph, replica: int, order: dict[str, int]) -> None:
        super().__init__([item.variable for item in updates], graph)
        self.strategy = self.variables[0].distribute_strategy
        first, self.updates, self.replica = updates[0], updates, replica
        # Whose gradients travel.
        self.trained = [item.variable if item.trained is None else item.trained for item in updates]
        self.ids = [variable._unique_id for variable in self.variables]  # TensorFlow's
        kind: BucketKind = "gather" if first.sparse else "sum"
        nbytes = 0 if first.sparse else sum(item.nbytes for item in updates)
        self.spec = BucketSpec(
            names=tuple(map(own_name, self.trained)),
            alike=tuple(map(common_name, self.trained)),
            kind=kind,
            nbytes=nbytes,
            dtype="uint8" if first.sparse else first.dtype.name,
            priority=min(order.get(each, len(order)) for each in self.ids),
            codec=codec_of(first.codec) if nbytes >= LEAST_BYTES else None,
        )
        self.key = ("update", kind, first.dtype, *self.ids)
        self.compared = False  # whether its update returns a digest
        self.function: ConcreteFunction | None = None  # the update of the reduced bytes, once it has been traced
        self._handles: list[tf.Tensor] = []  # of all variables that it may write

    def transfer(self, number: int, messages: int, group: Group, runtime: Runtime) -> DeferredUpdate:
        return DeferredUpdate(number, self.spec, messages, group)

    def trace(self, compared: bool) -> None:
        """Traces the update, which returns a digest if it is to be `compared`."""
        self.compared = compared and self.comparable
        planned = weakref.ref(self)  # TensorFlow keeps traced functions, and this bucket holds graph tensors
        signature = [tf.TensorSpec([None], tf.uint8)] * 2 + [tf.TensorSpec([], tf.bool)] * self.compared

        @tf.function(autograph=False, input_signature=signature)
        def tfps_update(data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor) -> tf.Tensor:
            bucket = planned()
            if bucket is None:
                raise RuntimeError("a deferred update is traced once only")
            return bucket._update(data, indices, *weigh)

        with deferring(self), ops.init_scope():
            function = tfps_update.get_concrete_function()
        self._handles = self._own_handles(function)
        self.function = function

    def _update(self, data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor) -> tf.Tensor:
        number = self.strategy.extended._get_replica_id_in_sync_group(self.replica)
        context = distribute_lib.ReplicaContext(self.strategy, number)
        components = [variable._values[self.replica] for variable in self.variables]
        data = graph_ops.for_devices(data, [component.device for component in components])
        pieces = split(data, self.updates[0].dtype, self.variables)
        written: list[list[tf.Operation]] = []
        for item, component, piece in zip(self.updates, components, pieces, strict=True):
            before = len(ops.get_default_graph().get_operations())
            with tf.device(component.device), context:
                gradient = _gradient(item, piece, indices)
                if (marks := item.reduced.marks) is not None:
                    gradient = common_rows.merge(gradient, self.strategy.extended._num_replicas_in_sync, marks)
                arguments = [self.keep(a) if tf.is_tensor(a) else a for a in item.arguments]
                item.function(component, gradient, *arguments)
            written.append(ops.get_default_graph().get_operations()[before:])
        return self._end(written, *weigh)

    def _end(self, written: list[list[tf.Operation]], *weigh: tf.Tensor) -> tf.Tensor:
        """Builds the digest, and opens each gate after the ops that have `written` its variables."""
        # Returns something, as plain Keras functions do: otherwise TensorFlow folds fewer constants.
        result = tf.constant(True)
        if weigh:
            kept = [holder.read_value() for holder, _, what in self._digestible()]
            components = [variable._values[self.replica] for variable in self.variables]
            with tf.device(components[0].device):
                result = invariants.digest(components, kept, *weigh)
        last: dict[Gate, list[tf.Operation]] = {}
        for variable, operations in zip(self.variables, written, strict=True):
            last.setdefault(variable.gates[self.replica], []).extend(operations)
        for gate, operations in last.items():
            with tf.control_dependencies([*operations, *([result] if weigh else [])]):
                graph_ops.open_gate(gate)
        return result

    def _own_handles(self, function: ConcreteFunction) -> list[tf.Tensor]:
        slots = [slot for variable in self.variables for slot in variable.with_slots()]
        own = {id(slot._values[self.replica].handle) for slot in slots}
        known = {id(holder.handle) for holder, _, _ in self.kept.values()}
        known |= {id(variable.gates[self.replica].handle) for variable in self.variables}
        for captured in function.captured_inputs:
            if captured.dtype == tf.resource and id(captured) not in own | known:
                container = getattr(captured, "_distributed_container", lambda: None)()
                raise ValueError(
                    f"it uses {container.name if container else 'a resource'}, which is not a slot of the variable"
                )
        used = [captured for captured in function.captured_inputs if id(captured) in own]
        return used or [variable._values[self.replica].handle for variable in self.variables]

    def send(
        self, transfer: DeferredUpdate, queue: tf.Tensor, graph_run: tf.Tensor, carries: bool, times: tuple[Value, ...]
    ) -> None:
        """Closes the gates, keeps what the update reads and sends, in the graph; one replica `carries` gradients."""
        transfer.functions.append(flat_call(self.function))
        transfer.kept = tuple(own_name(what) for _, _, what in self.kept.values())
        transfer.labels = self._labels()
        gates = {variable.gates[self.replica]: variable for variable in self.variables}  # with one that waits at it
        transfer.gates += gates
        gradients = [item.reduced.gradient for item in self.updates]
        data, indices = self._payload(gradients) if carries else (tf.constant([], tf.uint8), None)
        # After what is sent: of a gradient that is multiplied by a constant TensorFlow makes another constant, and a
        # gate would be closed before what the gradient still reads behind it (an accumulator).
        sent = [each for each in (data, indices) if each is not None]
        after = sent if carries else tf.nest.flatten(gradients, expand_composites=True)
        after = [graph_ops.check_open(queue, after)]
        # What the graph has not used by now, as slots, it will use behind the gate.
        used = {id(outside) for graph in outer_graphs(self.graph) for outside, _ in graph.captures}
        handles = [handle for handle in self._handles if id(handle) in used]
        closed = graph_ops.close_gates(list(gates), handles, after)
        with tf.control_dependencies([closed]):
            kept = [holder.assign(tensor).op for holder, tensor, _ in self.kept.values()]
        with tf.control_dependencies([closed.op, *kept]):
            graph_ops.send(queue, transfer.id, graph_run, data, indices, times)
        for variable in gates.values():
            variable.forget_passes(self.replica, self.graph)

    def _payload(self, gradients: list[Value]) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the bytes of `gradients`, and of the indices if sparse."""
        first, indices = self.updates[0], None
        counted = first.reduced.reduction.counted
        if first.sparse:
            gradient = counted.part(gradients[0]) if first.reduced.common else counted.weighted(gradients[0])
            data = graph_ops.to_bytes(gradient.values)
            indices = graph_ops.to_bytes(tf.cast(gradient.indices, tf.int64))
        else:
            flat = [tf.reshape(tf.cast(gradient, first.dtype), [-1]) for gradient in gradients]
            data = graph_ops.to_bytes(counted.weighted(flat[0] if len(flat) == 1 else tf.concat(flat, 0)))
        # Of slices that are summed, all replicas must send as many.
        if (has_rows := counted.has_rows) is not None and not first.reduced.common:
            # Empty data contributes nothing. A slice from the front shares memory: this copies nothing.
            data = _if_rows(data, has_rows)
            indices = None if indices is None else _if_rows(indices, has_rows)
        return data, indices

    def _digestible(self) -> list[tuple[Variable, tf.Tensor, Value]]:
        return [each for each in self.kept.values() if tf.as_dtype(each[1].dtype) != tf.string]

    def _labels(self) -> tuple[tuple[str, ...], tuple[bool | None, ...]]:
        """Returns the names of the values in the update's digest, and which of them are floats."""
        named = {}
        for item in self.updates:
            named.update(invariants.names_of(item.function, item.arguments))
        kept = self._digestible()
        labels = [named.get(id(what), own_name(what)) for _, _, what in kept]
        floating = [invariants.floating(tensor) for _, tensor, _ in kept]
        if len(kept) > invariants.KEPT:  # the last column is a checksum of several
            last = invariants.KEPT - 1
            labels[last:], floating[last:] = ["one of " + ", ".join(labels[last:])], [None]
        return tuple(labels), tuple(floating)


def _if_rows(data: tf.Tensor, has_rows: tf.Tensor) -> tf.Tensor:
    """Returns `data`, or nothing of it. A slice needs its end on the host, so no device should compute it."""
    size = tf.size(data)
    with tf.device(graph_ops.HOST):
        end = tf.where(has_rows, size, 0)
    return data[:end]


def split(data: tf.Tensor, dtype: tf.DType, variables: Sequence[GatedVariable]) -> list[tf.Tensor]:
    flat = graph_ops.from_bytes(data, dtype)
    sizes = [int(math.prod(variable.shape)) for variable in variables]
    return [flat] if len(sizes) == 1 else list(tf.split(flat, sizes))


def _gradient(item: PendingUpdate, piece: tf.Tensor, indices: tf.Tensor) -> Value:
    """Returns the reduced gradient of `item` in the shape and dtype that the optimizer was called with."""
    sent = item.reduced.gradient
    if not item.sparse:
        return tf.cast(tf.reshape(piece, item.variable.shape), sent.dtype)
    values = tf.cast(tf.reshape(piece, [-1, *item.variable.shape[1:]]), sent.dtype)
    rows = tf.cast(graph_ops.from_bytes(indices, tf.int64), sent.indices.dtype)
    shape = None if sent.dense_shape is None else tf.constant(item.variable.shape.as_list(), sent.dense_shape.dtype)
    return tf.IndexedSlices(values, rows, shape)
