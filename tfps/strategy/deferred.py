"""Deferred updates: from the optimizer's calls in one graph to buckets that are sent now and updated later.

`all_reduce` marks gradients (`Reduction`); `update` on an untouched reduced gradient is only noted (`Noted`); when
every gradient of the reduction has been noted, or the program touches a variable before that, the noted updates are
emitted: neighbours in forward order fuse into buckets up to one slice, each bucket closes its gates, keeps what its
update will read besides its own variables, and is sent. The update itself is traced once into a function of the
reduced bytes.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfps.exchange.interface import BucketKind, BucketSpec
from tfps.exchange.slicing import bucket_limit
from tfps.graph import ops as graph_ops
from tfps.graph.tf_private import distribute_lib, flat_call, ops, outer_graphs
from tfps.graph.timestamps import PassedGates, Timestamps
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.strategy import invariants
from tfps.strategy.invariants import Invariants
from tfps.strategy.names import common_name, own_name
from tfps.strategy.variables import Deferral, GatedVariable, deferring, updating

logger = logging.getLogger("tfps")
_FIRST_BUCKET_BYTES = 64 * 1024


@dataclass(eq=False)
class Reduction:
    """One `all_reduce` call of one replica: how many of its results have become noted updates.

    `has_rows`: bool scalar, whether the replica contributes at all; None: for certain.
    """

    size: int
    has_rows: tf.Tensor | None = None
    # By id of the graph: each branch of a tf.cond counts by itself.
    noted: Counter[int] = field(default_factory=Counter)


@dataclass(eq=False)
class Reduced:
    """One result of an `all_reduce`: the gradient that went in and the tensor (or IndexedSlices) that came out."""

    gradient: Any
    result: Any
    reduction: Reduction


@dataclass(eq=False)
class Noted:
    """An update call that waits to be emitted: `function(component, gradient, *arguments)`."""

    variable: GatedVariable
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    reduced: Reduced

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
    def kind(self) -> tuple[tf.DType, bool]:
        """Those of one kind may share a bucket: the dtype, and whether a replica without rows contributes."""
        return self.dtype, self.reduced.reduction.has_rows is None


@dataclass(eq=False)
class GraphState:
    """What one strategy knows about one graph under construction."""

    first_use: dict[str, int] = field(default_factory=dict)  # by unique id of the variable; of the outermost graph only
    reduced: dict[int, Reduced] = field(default_factory=dict)  # by id of the result
    noted: dict[int, list[Noted]] = field(default_factory=dict)  # by replica
    inputs: list[tf.Tensor] = field(default_factory=list)  # what the replica function got
    passed: PassedGates = field(default_factory=PassedGates)
    reductions: Counter[Any] = field(default_factory=Counter)  # so far, by replica; of the outermost graph only


def fuse(noted: Iterable[Noted], order: dict[str, int], slice_bytes: int, first_bytes: int) -> list[list[Noted]]:
    """Buckets of `noted` in forward order: neighbours of one kind up to `bucket_limit`, sparse ones alone."""
    buckets: list[list[Noted]] = []
    filled: dict[Any, int] = {}  # bytes in the open bucket of a kind, which is the last one of that kind
    last: dict[Any, list[Noted]] = {}
    before = 0
    for item in sorted(noted, key=lambda item: order.get(item.variable._unique_id, len(order))):
        if item.sparse:
            buckets.append([item])
            continue
        limit = bucket_limit(before - filled.get(item.kind, 0), slice_bytes, first_bytes)
        before += item.nbytes
        if item.kind in last and filled[item.kind] + item.nbytes <= limit:
            last[item.kind].append(item)
            filled[item.kind] += item.nbytes
        else:
            buckets.append([item])
            last[item.kind], filled[item.kind] = buckets[-1], item.nbytes
    return buckets


class Emitter:
    """Turns noted updates into ops of the graph under construction. Used by the threads that trace."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        runtime: Runtime,
        replicas: int,
        slice_bytes: int,
        compared: Invariants | None,
    ) -> None:
        self._strategy, self._runtime, self._compared = strategy, runtime, compared
        self._replicas, self._slice_bytes = replicas, slice_bytes
        # Without a network there is nothing to expose, and the fewer buckets the better.
        self._first_bytes = slice_bytes if runtime.alone else _FIRST_BUCKET_BYTES
        self._warned: set[str] = set()
        # Of the replica functions being traced: transfers by bucket and how often its replica has come to it. The
        # replicas of one worker share a transfer, also where each traces a tf.cond of its own.
        self._transfers: dict[tuple[Any, int], DeferredUpdate] = {}
        self._occurrences: Counter[tuple[Any, int]] = Counter()
        self._groups: dict[tuple[int, int], Group] = {}  # by number of the emission in its replica
        self._emissions: Counter[int] = Counter()
        self.graphs: dict[
            str, weakref.ref[tf.Graph]
        ] = {}  # that send, by name, the one that was traced last at the end

    def end_of_call(self) -> None:
        """All replicas of one call have been traced."""
        self._transfers.clear()
        self._occurrences.clear()
        self._groups.clear()
        self._emissions.clear()

    def emit(
        self,
        state: GraphState,
        graph: tf.Graph,
        replica: int,
        order: dict[str, int],
        states: Callable[[tf.Graph], GraphState],
    ) -> None:
        """Emits all noted updates of `replica`."""
        buckets = fuse(state.noted.pop(replica, []), order, self._slice_bytes, self._first_bytes)
        keys, specs = [], []
        for bucket in buckets:
            variables = [item.variable for item in bucket]
            kind: BucketKind = "gather" if bucket[0].sparse else "sum"
            specs.append(
                BucketSpec(
                    name=", ".join(map(own_name, variables)),
                    alike=", ".join(map(common_name, variables)),
                    kind=kind,
                    nbytes=0 if bucket[0].sparse else sum(item.nbytes for item in bucket),
                    dtype="uint8" if bucket[0].sparse else bucket[0].dtype.name,
                    priority=min(order.get(item.variable._unique_id, len(order)) for item in bucket),
                )
            )
            keys.append(("update", kind, bucket[0].dtype, *(item.variable._unique_id for item in bucket)))
        traced = [self._trace(bucket, graph, replica) for bucket in buckets]
        wanted = [(key, spec) for key, spec, trace in zip(keys, specs, traced, strict=True) if trace is not None]
        with ops.init_scope():
            ids = iter(self._runtime.buckets(wanted))
        if wanted:
            self.graphs.pop(graph.name, None)
            self.graphs[graph.name] = weakref.ref(graph)
        group = self._groups.setdefault((self._emissions[replica], len(wanted)), Group())
        self._emissions[replica] += 1
        ticket = graph_ops.ticket() if replica == 0 else tf.constant(0, tf.int64)
        timestamps = Timestamps(graph, lambda graph: states(graph).passed, lambda graph: states(graph).inputs, replica)
        most_urgent = min((spec.priority for _, spec in wanted), default=0)  # the last to be sent
        for index, (bucket, key, spec, trace) in enumerate(zip(buckets, keys, specs, traced, strict=True)):
            if trace is None:
                self._update_in_graph(bucket, replica)
                continue
            number = next(ids)
            occurrence = key, self._occurrences[key, replica]
            self._occurrences[key, replica] += 1
            if occurrence not in self._transfers:
                self._transfers[occurrence] = DeferredUpdate(number, spec, self._replicas, group)
                self._runtime.adopt(self._transfers[occurrence], graph)
            transfer = self._transfers[occurrence]
            transfer.functions.append(flat_call(trace.function))
            transfer.kept = trace.deferral.kept_names()
            transfer.invariants, transfer.leads = self._compared, spec.priority == most_urgent
            transfer.labels = _labels(bucket, trace.deferral)
            transfer.gates += [item.variable.gates[replica] for item in bucket]
            ids_of = [item.variable._unique_id for item in bucket]
            noted = timestamps.of_bucket(ids_of, whole=spec.priority == most_urgent)
            if replica == 0:
                transfer.read, transfer.whole = noted.variable, noted.whole
            carries = index % self._replicas == replica
            self._send(bucket, trace, transfer, ticket, graph, replica, carries, noted.times)
            bucket.clear()  # the update's function holds this list: without this the graph would keep itself alive
            trace.deferral.release()
        timestamps.done()

    def _trace(self, bucket: list[Noted], graph: tf.Graph, replica: int) -> Traced | None:
        """The update of `bucket` as a function of the reduced bytes, None if it cannot run later."""
        deferral = Deferral([item.variable for item in bucket], graph)
        context = distribute_lib.ReplicaContext(
            self._strategy, self._strategy.extended._get_replica_id_in_sync_group(replica)
        )

        signature = [tf.TensorSpec([None], tf.uint8)] * 2
        if self._compared is not None:
            signature = [*signature, tf.TensorSpec([], tf.bool)]

        @tf.function(autograph=False, input_signature=signature)
        def tfps_update(data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor) -> tf.Tensor:
            flat = graph_ops.from_bytes(data, bucket[0].dtype)
            sizes = [int(math.prod(item.variable.shape)) for item in bucket]
            pieces = [flat] if len(bucket) == 1 else tf.split(flat, sizes)
            components = [item.variable._values[replica] for item in bucket]
            written: list[list[tf.Operation]] = []
            for item, component, piece in zip(bucket, components, pieces, strict=True):
                before = len(ops.get_default_graph().get_operations())
                with tf.device(component.device), context:
                    gradient = _gradient(item, piece, indices)
                    arguments = [deferral.keep_tensor(a) if tf.is_tensor(a) else a for a in item.arguments]
                    item.function(component, gradient, *arguments)
                written.append(ops.get_default_graph().get_operations()[before:])
            # With a result, as the functions of plain Keras have one: without, TensorFlow folds fewer constants.
            result = tf.constant(True)
            if weigh:
                kept = [holder.read_value() for holder, _, what in _digestible(deferral)]
                with tf.device(components[0].device):
                    result = invariants.digest(components, kept, *weigh)
            for item, operations in zip(bucket, written, strict=True):
                with tf.control_dependencies([*operations, *([result] if weigh else [])]):
                    graph_ops.open_gate(item.variable.gates[replica])
            return result

        try:
            with deferring(deferral), ops.init_scope():
                function = tfps_update.get_concrete_function()
            handles = _own_handles(function, deferral, replica)
        except Exception as error:  # whatever it is: in the graph it either works or raises again
            self._warn_once(bucket, error)
            return None
        return Traced(function, deferral, handles)

    def _warn_once(self, bucket: list[Noted], error: Exception) -> None:
        where = getattr(bucket[0].function, "__qualname__", repr(bucket[0].function))
        if where not in self._warned:
            self._warned.add(where)
            logger.warning(
                "tfps: the update of %s (and others like it) runs inside the step, where it waits for the network: %s",
                bucket[0].variable.name,
                error,
            )

    def _update_in_graph(self, bucket: list[Noted], replica: int) -> None:
        for item in bucket:
            component = item.variable._get_replica(replica)
            with tf.device(component.device), updating():
                item.function(component, item.reduced.result, *item.arguments)

    def _send(
        self,
        bucket: list[Noted],
        trace: Traced,
        transfer: DeferredUpdate,
        ticket: tf.Tensor,
        graph: tf.Graph,
        replica: int,
        carries: bool,
        times: tuple[Any, ...],
    ) -> None:
        gradients = [item.reduced.gradient for item in bucket]
        data, indices = tf.constant([], tf.uint8), None
        if carries and bucket[0].sparse:
            data = graph_ops.to_bytes(gradients[0].values)
            indices = graph_ops.to_bytes(tf.cast(gradients[0].indices, tf.int64))
        elif carries:
            flat = [tf.reshape(tf.cast(gradient, bucket[0].dtype), [-1]) for gradient in gradients]
            data = graph_ops.to_bytes(flat[0] if len(flat) == 1 else tf.concat(flat, 0))
        if carries and (has_rows := bucket[0].reduced.reduction.has_rows) is not None:
            # No data contributes nothing. A part from the front shares the memory of the whole: this copies nothing.
            data = data[: tf.where(has_rows, tf.size(data), 0)]
            indices = None if indices is None else indices[: tf.where(has_rows, tf.size(indices), 0)]
        gates = [item.variable.gates[replica] for item in bucket]
        after = tf.nest.flatten(gradients, expand_composites=True)
        after = [graph_ops.check_open(self._runtime.queue, after)]
        closed = graph_ops.close_gates(gates, trace.handles, after)
        with tf.control_dependencies([closed]):
            kept = [holder.assign(tensor).op for holder, tensor, _ in trace.deferral.kept.values()]
        with tf.control_dependencies([closed.op, *kept]):
            graph_ops.send(self._runtime.queue, transfer.id, ticket, data, indices, times)
        for item in bucket:
            for variable in item.variable.with_slots():
                variable.forget_passes(replica, graph)


@dataclass(eq=False)
class Traced:
    """A traced deferred update: the function, what it keeps, and the handles of all variables that it may write."""

    function: Any
    deferral: Deferral
    handles: list[tf.Tensor]


def _digestible(deferral: Deferral) -> list[tuple[Any, tf.Tensor, Any]]:
    """What `deferral` keeps, as far as it has bits."""
    return [each for each in deferral.kept.values() if tf.as_dtype(each[1].dtype) != tf.string]


def _labels(bucket: list[Noted], deferral: Deferral) -> tuple[tuple[str, ...], tuple[bool | None, ...]]:
    """Names of the values in a digest of the update of `bucket`, and which of them are floating numbers."""
    named = {}
    for item in bucket:
        named.update(invariants.names_of(item.function, item.arguments))
    kept = _digestible(deferral)
    labels = [named.get(id(what), str(what.name).removesuffix(":0")) for _, _, what in kept]
    floating = [invariants.floating(tensor) for _, tensor, _ in kept]
    if len(kept) > invariants.KEPT:
        last = invariants.KEPT - 1
        labels, floating = [*labels[:last], "one of " + ", ".join(labels[last:])], [*floating[:last], None]
    return tuple(labels), tuple(floating)


def _gradient(item: Noted, piece: tf.Tensor, indices: tf.Tensor) -> Any:
    """The reduced gradient of `item` in the shape and dtype that the optimizer was called with."""
    sent = item.reduced.gradient
    if not item.sparse:
        return tf.cast(tf.reshape(piece, item.variable.shape), sent.dtype)
    values = tf.cast(tf.reshape(piece, [-1, *item.variable.shape[1:]]), sent.dtype)
    rows = tf.cast(graph_ops.from_bytes(indices, tf.int64), sent.indices.dtype)
    shape = None if sent.dense_shape is None else tf.constant(item.variable.shape.as_list(), sent.dense_shape.dtype)
    return tf.IndexedSlices(values, rows, shape)


def _own_handles(function: Any, deferral: Deferral, replica: int) -> list[tf.Tensor]:
    """Handles of the update's own variables.

    Raises:
        ValueError: it uses a variable that is neither its own nor kept, so that it must see it as of the step.
    """
    own = {}
    for variable in deferral.variables:
        for each in variable.with_slots():
            own[id(each._values[replica].handle)] = each._values[replica].handle
    known = {id(holder.handle) for holder, _, _ in deferral.kept.values()}
    known |= {id(variable.gates[replica].handle) for variable in deferral.variables}
    used = []
    for captured in function.captured_inputs:
        if id(captured) in own:
            used.append(captured)
        elif captured.dtype == tf.resource and id(captured) not in known:
            container = getattr(captured, "_distributed_container", lambda: None)()
            raise ValueError(
                f"it uses {container.name if container else 'a resource'}, which is no slot of the variable"
            )
    return used or [variable._values[replica].handle for variable in deferral.variables]


def deferrable(variable: Any, gradient: Any) -> bool:
    """Whether an update of `variable` with `gradient` can run behind the step."""
    if not isinstance(variable, GatedVariable) or not variable.gates or variable.owner is not None:
        return False
    if isinstance(gradient, tf.IndexedSlices):
        return bool(gradient.values.shape[1:].is_compatible_with(variable.shape[1:]))
    return bool(gradient.shape.is_compatible_with(variable.shape))


def find_reduced(states: Callable[[tf.Graph], GraphState | None], tensor: Any) -> Reduced | None:
    """The reduction behind `tensor` if nothing was computed with it since.

    `all_reduce` wraps dense results in IdentityN (custom_gradient), so identities are followed back.
    """
    graph = getattr(tensor, "graph", None)
    if graph is None or tf.executing_eagerly():
        return None
    if isinstance(tensor, tf.IndexedSlices):
        state = states(tensor.values.graph)
        return state.reduced.get(id(tensor)) if state else None
    while True:
        for each in outer_graphs(tensor.graph):
            state = states(each)
            if state is not None and id(tensor) in state.reduced:
                return state.reduced[id(tensor)]
        if tensor.op.type not in ("Identity", "IdentityN"):
            return None
        tensor = tensor.op.inputs[tensor.value_index]
