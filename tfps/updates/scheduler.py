"""Turns pending updates into ops of the graph under construction, and decides which transfers their sends share.

Tested in tests/strategy/test_strategy.py, tests/strategy/test_overlap.py and tests/integration/test_workers.py.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph import ops as graph_ops
from tfps.graph.tf_private import distribute_lib, ops, outer_graphs
from tfps.graph.timestamps import Note, NotedTimes, Timestamps
from tfps.runtime.remote import RemoteRule
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Argument, Function, Value
from tfps.updates.compressing import Compressing
from tfps.updates.invariants import Invariants
from tfps.updates.pending import GraphState, PendingUpdate, PlannedBucket, Reduced, fuse, group_gates
from tfps.updates.variables import GatedVariable, updating

logger = logging.getLogger("tfps")
_numbers = itertools.count()
_NOTHING = GraphState()  # of a graph that nothing is known of; nobody changes it


class UpdateScheduler:
    """Notes and emits one strategy's updates in graphs under construction. Used by the threads that trace."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        runtime: Runtime,
        replicas: int,  # on this worker
        bucket_limits: tuple[int, int],  # see `Config`
        compared: Invariants | None,  # compares digests of updates, if anything does
        compressing: Compressing,
    ) -> None:
        self._strategy, self._runtime, self._compared = strategy, runtime, compared
        self.compressing = compressing
        self._replicas = replicas
        self._first_bytes, self._most_bytes = bucket_limits
        self._warned: set[str] = set()
        self._state_name = f"_tfps_state_{next(_numbers)}"
        self._touched: list[weakref.ref[tf.Graph]] = []  # graphs that got a state since the last call ended
        # Of the replica functions being traced. A worker's replicas share transfers and groups of them, even if each
        # traces its own tf.cond: the n-th that one reaches is the n-th of the others.
        self._transfers: dict[tuple[Hashable, int], DeferredUpdate] = {}
        self._groups: dict[tuple[int, int], Group] = {}  # by number of emissions before, and of buckets
        self._reached: Counter[tuple[Hashable, int]] = Counter()  # by key of a bucket, or "emission", and replica
        self.graphs: dict[str, weakref.ref[tf.Graph]] = {}  # sending ones by name; last traced last

    # What is known of a graph.

    def _known(self, graph: tf.Graph) -> GraphState:
        found: GraphState = getattr(graph, self._state_name, _NOTHING)
        return found

    def _state(self, graph: tf.Graph) -> GraphState:
        """As `_known`, of a graph that is going to be known."""
        if (state := self._known(graph)) is _NOTHING:
            state = GraphState()
            # On the graph itself: the state holds tensors of the graph, so a table would keep both alive forever.
            setattr(graph, self._state_name, state)
            self._touched.append(weakref.ref(graph))
        return state

    def inputs(self, graph: tf.Graph) -> list[tf.Tensor]:
        """Returns the inputs of the replica function traced in `graph` itself; empty if in an outer graph."""
        return self._known(graph).inputs

    def next_reduction(self, who: Hashable) -> tuple[int, Hashable]:
        """Returns a key for the next reduction by `who` in the graph under construction, the same in every retrace."""
        reductions = self._state(outer_graphs(ops.get_default_graph())[-1]).reductions
        reductions[who] += 1
        return reductions[who], who

    def note_access(self, variable: GatedVariable, graph: tf.Graph) -> list[tf.Tensor]:
        """Notes the forward order and emits what waits, before an access in `graph`; returns what must precede it."""
        chain = outer_graphs(graph)
        if not chain:
            return []
        for each in chain:
            self._emit_all(each)
        if variable.has_own_gates:
            first_use = self._state(chain[-1]).first_use
            first_use.setdefault(variable._unique_id, len(first_use))
        return self.inputs(graph)

    def note_passed(
        self, variables: Sequence[GatedVariable], replica: int, graph: tf.Graph, passed: tf.Operation
    ) -> None:
        gates = self._state(graph).passed.by_variable
        for position, variable in enumerate(variables, 1):
            gates.setdefault((variable._unique_id, replica), (passed, passed.inputs[position]))

    def first_use(self, graph: tf.Graph) -> dict[str, int]:
        """The order in the outermost of the graphs around `graph`, by unique id."""
        return self._state(outer_graphs(graph)[-1]).first_use

    def notes(self, graph: tf.Graph) -> list[Note]:
        """Returns the notes of the clock that this call has made in `graph` itself."""
        return self._known(graph).passed.notes

    def timestamps(self, graph: tf.Graph, replica: int) -> Timestamps:
        """Returns what makes timestamps of the step that `graph` is, as far as it has been traced by now."""
        return Timestamps(graph, lambda each: self._state(each).passed, self.inputs, replica)

    def group_gates(self, variables: Iterable[GatedVariable]) -> None:
        group_gates(variables, self._first_bytes, self.compressing.codec)

    def fuse(self, pending: Iterable[PendingUpdate], order: dict[str, int]) -> list[list[PendingUpdate]]:
        return fuse(pending, order, self._most_bytes, self._first_bytes)

    # Which updates are deferred.

    def note_reduced(self, reduced: Reduced) -> None:
        self._state(ops.get_default_graph()).reduced[id(reduced.result)] = reduced

    def defers(
        self, variable: GatedVariable, function: Function, gradient: Value, arguments: Sequence[Argument]
    ) -> bool:
        """Notes `function(component, gradient, *arguments)` if it can run outside the step; else returns False."""
        reduced = self._find_reduced(gradient)
        if reduced is None or not isinstance(variable, GatedVariable) or not variable.has_own_gates:
            return False
        sparse = isinstance(reduced.gradient, tf.IndexedSlices)
        shape = reduced.gradient.values.shape[1:] if sparse else reduced.gradient.shape
        if not shape.is_compatible_with(variable.shape[1:] if sparse else variable.shape):
            return False
        graph, replica = ops.get_default_graph(), distribute_lib.get_replica_context()._replica_id
        state = self._state(graph)
        if any(each.variable is variable for each in state.pending.get(replica, ())):
            self._emit(graph, replica)  # the second update of a variable comes after its first
        update = PendingUpdate(variable, function, tuple(arguments), reduced, self.compressing.codec(variable))
        state.pending.setdefault(replica, []).append(update)
        pending = reduced.reduction.pending
        pending[id(graph)] += 1
        if pending[id(graph)] == reduced.reduction.size:
            self._emit(graph, replica)
        return True

    def _find_reduced(self, tensor: Value) -> Reduced | None:
        """Returns the reduction that made `tensor`, or None if something was computed in between."""
        if getattr(tensor, "graph", None) is None or tf.executing_eagerly():
            return None
        if isinstance(tensor, tf.IndexedSlices):
            return self._known(tensor.values.graph).reduced.get(id(tensor))
        while True:
            for each in outer_graphs(tensor.graph):
                if (reduced := self._known(each).reduced.get(id(tensor))) is not None:
                    return reduced
            if tensor.op.type not in ("Identity", "IdentityN"):  # `all_reduce` wraps dense results in these
                return None
            tensor = tensor.op.inputs[tensor.value_index]

    # When they are emitted.

    def begin_call(self, graph: tf.Graph, inputs: list[tf.Tensor]) -> None:
        """Prepares for tracing replica functions with `inputs` in `graph`."""
        self._state(graph).inputs = inputs
        self._state(graph).sent.clear()
        self._state(graph).passed.notes.clear()
        self._forget_call()  # left by a call whose trace raised
        self._touched.clear()

    def end_call(self, graph: tf.Graph) -> list[PendingUpdate]:
        """Emits what is still pending after all replicas of a call have been traced; returns all that it has sent."""
        self._emit_all(graph)
        self._forget_call()
        touched, self._touched = self._touched, []
        sent: list[PendingUpdate] = []
        for other in [graph, *(each for ref in touched if (each := ref()) is not None and each is not graph)]:
            sent += (own := self._known(other).sent)
            own.clear()  # else they would live as long as the graph
            left = [update for each in self._state(other).pending.values() for update in each]
            if names := ", ".join(update.variable.name for update in left):
                raise UnsupportedError(
                    f"{other.name}: only some results of one all_reduce were used to update variables inside a tf.cond "
                    f"or tf.while_loop ({names}); reduce them in a separate call"
                )
        return sent

    def _forget_call(self) -> None:
        for each in (self._transfers, self._groups, self._reached):
            each.clear()

    def _emit_all(self, graph: tf.Graph) -> None:
        for replica in sorted(self._known(graph).pending):
            number = self._strategy.extended._get_replica_id_in_sync_group(replica)
            context = distribute_lib.ReplicaContext(self._strategy, number)
            with graph.as_default(), tf.control_dependencies(None), context:
                self._emit(graph, replica)

    def _emit(self, graph: tf.Graph, replica: int) -> None:
        order = self.first_use(graph)
        fused = self.fuse(self._state(graph).pending.pop(replica, []), order)
        rules = [updates[0].function for updates in fused]
        kinds = [rule.bucket if isinstance(rule, RemoteRule) else PlannedBucket for rule in rules]
        buckets = [kind(updates, graph, replica, order) for kind, updates in zip(kinds, fused, strict=True)]
        self.emit(buckets, graph, replica)

    def emit(
        self, buckets: Sequence[PlannedBucket], graph: tf.Graph, replica: int, *, timed: bool = True
    ) -> dict[PlannedBucket, int]:
        """Traces the updates of `buckets` and sends them together in `graph`; returns the numbers of those it sends."""
        reads: dict[int, tf.Tensor] = {}
        for bucket in buckets:
            bucket.reads = reads
            self._trace(bucket)
        traced = [bucket for bucket in buckets if bucket.function is not None]
        with ops.init_scope():
            declared = self._runtime.buckets([(bucket.key, bucket.spec) for bucket in traced])
        numbers = dict(zip(traced, declared, strict=True))
        for bucket, number in numbers.items():
            self.compressing.declared(number, bucket.spec, bucket.trained)
        if numbers:
            self.graphs.pop(graph.name, None)
            self.graphs[graph.name] = weakref.ref(graph)
        group = self._groups.setdefault((self._count("emission", replica), len(numbers)), Group())
        graph_run = graph_ops.graph_run() if replica == 0 else tf.constant(0, tf.int64)
        timestamps = self.timestamps(graph, replica) if timed else None
        last = min((bucket.spec.priority for bucket in numbers), default=0)  # the most urgent is the last to be sent
        for index, bucket in enumerate(buckets):
            self._state(graph).sent += bucket.updates
            if bucket not in numbers:
                for item in bucket.updates:  # here they wait for the result of `all_reduce`
                    component = item.variable._get_replica(replica)
                    with tf.device(component.device), updating():
                        item.function(component, item.reduced.result, *item.arguments)
                continue
            shared = bucket.key, self._count(bucket.key, replica)
            if (transfer := self._transfers.get(shared)) is None:
                transfer = bucket.transfer(numbers[bucket], self._replicas, group, self._runtime)
                self._transfers[shared] = transfer
                transfer.invariants = self._compared if bucket.compared else None
                self._runtime.adopt(transfer, graph)
            transfer.leads = bucket.spec.priority == last
            noted = timestamps.of_bucket(bucket.ids, reports_step=transfer.leads) if timestamps else NotedTimes()
            if replica == 0:
                transfer.read, transfer.reports_step = noted.variable, noted.reports_step
            carries = index % self._replicas == replica
            bucket.send(transfer, self._runtime.queue, graph_run, carries, noted.times)
        if timestamps is not None:
            timestamps.done()
        return numbers

    def _count(self, key: Hashable, replica: int) -> int:
        """Counts that `replica` has reached `key`; returns how often it had before."""
        self._reached[key, replica] += 1
        return self._reached[key, replica] - 1

    def _trace(self, bucket: PlannedBucket) -> None:
        """Traces the update of `bucket`; leaves it without a function if it cannot be deferred."""
        try:
            bucket.trace(compared=self._compared is not None)
        except Exception as error:  # whatever it is: in the graph the update either works or raises again
            if bucket.remote:
                raise
            function = bucket.updates[0].function
            where = getattr(function, "__qualname__", repr(function))
            if where not in self._warned:
                self._warned.add(where)
                logger.warning(
                    "tfps: the update of %s (and others like it) runs inside the step, where it waits for the network: "
                    "%s",
                    bucket.variables[0].name,
                    error,
                )
