"""One bucket of deferred updates on its way into a graph: planned, traced, sent.

Planned: its name and priority. Traced: its update as a function of the reduced bytes. Sent: ops in the graph under
construction close its gates, keep what the update reads besides its own variables, and send its gradients.

Tested in tests/strategy/test_strategy.py and tests/strategy/test_exactness.py.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfps import compression
from tfps.exchange.codecs import codec_of
from tfps.exchange.interface import BucketKind, BucketSpec
from tfps.graph import common_rows
from tfps.graph import ops as graph_ops
from tfps.graph.ops import Gate
from tfps.graph.tf_private import ConcreteFunction, distribute_lib, flat_call, ops
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Value, Variable
from tfps.updates import invariants
from tfps.updates.names import common_name, own_name
from tfps.updates.pending import PendingUpdate
from tfps.updates.variables import Deferral, GatedVariable, deferring, updating


class PlannedBucket:
    """Updates that travel and run together, on one local replica. Used by the thread that traces.

    Args:
        updates: in forward order; all of one kind.
        graph: where they were requested.
        order: of first use, by unique id of the variable.
    """

    remote = False  # whether pservers update its variables

    def __init__(self, updates: Sequence[PendingUpdate], graph: tf.Graph, replica: int, order: dict[str, int]) -> None:
        first = updates[0]
        self.updates, self.graph, self.replica = updates, graph, replica
        self.variables = [item.variable for item in updates]
        self.trained = self.variables  # whose gradients travel
        self.ids = [variable._unique_id for variable in self.variables]  # TensorFlow's
        kind: BucketKind = "gather" if first.sparse else "sum"
        nbytes = 0 if first.sparse else sum(item.nbytes for item in updates)
        self.spec = BucketSpec(
            names=tuple(map(own_name, self.variables)),
            alike=tuple(map(common_name, self.variables)),
            kind=kind,
            nbytes=nbytes,
            dtype="uint8" if first.sparse else first.dtype.name,
            priority=min(order.get(each, len(order)) for each in self.ids),
            codec=codec_of(first.codec) if nbytes >= compression.LEAST_BYTES else None,
        )
        self.key = ("update", kind, first.dtype, *self.ids)
        self.deferral = Deferral(self.variables, graph)
        self.compared = False  # whether its update returns a digest
        self.function: ConcreteFunction | None = None  # the update of the reduced bytes, once it has been traced
        self._handles: list[tf.Tensor] = []  # of all variables that it may write

    def transfer(self, number: int, messages: int, group: Group, runtime: Runtime) -> DeferredUpdate:
        """Returns what handles its messages; `number` is the bucket's."""
        return DeferredUpdate(number, self.spec, messages, group)

    def trace(self, strategy: tf.distribute.Strategy, compared: bool) -> None:
        """Traces the update.

        Args:
            compared: whether it returns a digest.
        """
        self.compared = compared
        planned = weakref.ref(self)  # TensorFlow keeps traced functions, and this bucket holds graph tensors
        signature = [tf.TensorSpec([None], tf.uint8)] * 2
        if compared:
            signature = [*signature, tf.TensorSpec([], tf.bool)]

        @tf.function(autograph=False, input_signature=signature)
        def tfps_update(data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor) -> tf.Tensor:
            bucket = planned()
            if bucket is None:
                raise RuntimeError("a deferred update is traced once only")
            return bucket._update(strategy, data, indices, *weigh)

        with deferring(self.deferral), ops.init_scope():
            function = tfps_update.get_concrete_function()
        self._handles = self._own_handles(function)
        self.function = function

    def _update(
        self, strategy: tf.distribute.Strategy, data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor
    ) -> tf.Tensor:
        context = distribute_lib.ReplicaContext(strategy, strategy.extended._get_replica_id_in_sync_group(self.replica))
        pieces = split(data, self.updates[0].dtype, self.variables)
        components = [variable._values[self.replica] for variable in self.variables]
        written: list[list[tf.Operation]] = []
        for item, component, piece in zip(self.updates, components, pieces, strict=True):
            before = len(ops.get_default_graph().get_operations())
            with tf.device(component.device), context:
                gradient = _gradient(item, piece, indices)
                if item.reduced.common:
                    gradient = common_rows.merge(gradient, strategy.num_replicas_in_sync)
                arguments = [self.deferral.keep_tensor(a) if tf.is_tensor(a) else a for a in item.arguments]
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
        """Returns the handles of the update's own variables."""
        own = {}
        for variable in self.variables:
            for each in variable.with_slots():
                own[id(each._values[self.replica].handle)] = each._values[self.replica].handle
        known = {id(holder.handle) for holder, _, _ in self.deferral.kept.values()}
        known |= {id(variable.gates[self.replica].handle) for variable in self.variables}
        used = []
        for captured in function.captured_inputs:
            if id(captured) in own:
                used.append(captured)
            elif captured.dtype == tf.resource and id(captured) not in known:
                container = getattr(captured, "_distributed_container", lambda: None)()
                raise ValueError(
                    f"it uses {container.name if container else 'a resource'}, which is not a slot of the variable"
                )
        return used or [variable._values[self.replica].handle for variable in self.variables]

    def update_in_graph(self) -> None:
        """Builds the updates in the graph instead of sending them: they wait for the result of `all_reduce`."""
        for item in self.updates:
            component = item.variable._get_replica(self.replica)
            with tf.device(component.device), updating():
                item.function(component, item.reduced.result, *item.arguments)

    def send(
        self, transfer: DeferredUpdate, queue: tf.Tensor, graph_run: tf.Tensor, carries: bool, times: tuple[Value, ...]
    ) -> None:
        """Builds the ops that close the gates, keep what the update reads and send the message of this replica.

        Args:
            queue: of the runtime.
            carries: whether the message has the gradients: only one local replica sends their local sum.
            times: timestamps (see timestamps.py).
        """
        transfer.functions.append(flat_call(self.function))
        transfer.kept = self.deferral.kept_names()
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
        closed = graph_ops.close_gates(list(gates), self._handles, after)
        with tf.control_dependencies([closed]):
            kept = [holder.assign(tensor).op for holder, tensor, _ in self.deferral.kept.values()]
        with tf.control_dependencies([closed.op, *kept]):
            graph_ops.send(queue, transfer.id, graph_run, data, indices, times)
        for variable in gates.values():
            for sharing in variable.sharing():
                for each in sharing.with_slots():
                    each.forget_passes(self.replica, self.graph)

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
            data = data[: tf.where(has_rows, tf.size(data), 0)]
            indices = None if indices is None else indices[: tf.where(has_rows, tf.size(indices), 0)]
        return data, indices

    def _digestible(self) -> list[tuple[Variable, tf.Tensor, Value]]:
        """Returns the kept values except strings."""
        return [each for each in self.deferral.kept.values() if tf.as_dtype(each[1].dtype) != tf.string]

    def _labels(self) -> tuple[tuple[str, ...], tuple[bool | None, ...]]:
        """Returns the names of the values in the update's digest, and which of them are floats."""
        named = {}
        for item in self.updates:
            named.update(invariants.names_of(item.function, item.arguments))
        kept = self._digestible()
        labels = [named.get(id(what), str(what.name).removesuffix(":0")) for _, _, what in kept]
        floating = [invariants.floating(tensor) for _, tensor, _ in kept]
        if len(kept) > invariants.KEPT:
            last = invariants.KEPT - 1
            labels, floating = [*labels[:last], "one of " + ", ".join(labels[last:])], [*floating[:last], None]
        return tuple(labels), tuple(floating)


def split(data: tf.Tensor, dtype: tf.DType, variables: Sequence[GatedVariable]) -> list[tf.Tensor]:
    """Returns the flat values of `variables` in the bytes of their bucket."""
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
