"""Turns pending updates into ops of the graph under construction, and decides which transfers their sends share.

Tested in tests/strategy/test_strategy.py, tests/strategy/test_overlap.py and tests/integration/test_workers.py.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph import ops as graph_ops
from tfps.graph.tf_private import distribute_lib, ops, outer_graphs
from tfps.graph.timestamps import NotedTimes, Timestamps
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Argument, Function, Value
from tfps.updates.compressing import Compressing
from tfps.updates.invariants import Invariants
from tfps.updates.pending import GraphState, PendingUpdate, Reduced, deferrable, find_reduced, fuse, group_gates
from tfps.updates.planned_bucket import PlannedBucket
from tfps.updates.variables import GatedVariable

logger = logging.getLogger("tfps")
_FIRST_BUCKET_BYTES = 64 * 1024
_numbers = itertools.count()
Plan = Callable[[Sequence[PendingUpdate], tf.Graph, int, dict[str, int]], PlannedBucket]


class UpdateScheduler:
    """Notes and emits one strategy's updates in graphs under construction. Used by the threads that trace.

    Args:
        replicas: on this worker.
        compared: compares digests of updates, if anything does.
        plan: makes the bucket of updates that travel together.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        runtime: Runtime,
        replicas: int,
        slice_bytes: int,
        compared: Invariants | None,
        compressing: Compressing,
        plan: Plan,
    ) -> None:
        self._plan = plan
        self._strategy, self._runtime, self._compared = strategy, runtime, compared
        self.compressing = compressing
        self._replicas, self._slice_bytes = replicas, slice_bytes
        # Without a network there is no wait to hide: the fewer buckets the better.
        self._first_bytes = slice_bytes if runtime.alone else _FIRST_BUCKET_BYTES
        self._warned: set[str] = set()
        self._state_name = f"_tfps_state_{next(_numbers)}"
        self._touched: list[weakref.ref[tf.Graph]] = []  # graphs that got a state since the last call ended
        # Of the replica functions being traced: transfers by bucket and how often its replica has reached it. A
        # worker's replicas share a transfer, even if each traces its own tf.cond.
        self._transfers: dict[tuple[Hashable, int], DeferredUpdate] = {}
        self._occurrences: Counter[tuple[Hashable, int]] = Counter()
        self._groups: dict[tuple[int, int], Group] = {}  # by emission number in its replica, and number of buckets
        self._emissions: Counter[int] = Counter()
        self.graphs: dict[str, weakref.ref[tf.Graph]] = {}  # sending ones by name; last traced last

    # What is known of a graph.

    def state_of(self, graph: tf.Graph) -> GraphState | None:
        """Returns the state of `graph`, if it has one."""
        return getattr(graph, self._state_name, None)

    def state(self, graph: tf.Graph) -> GraphState:
        """Returns the state of `graph`; creates it if needed."""
        state = self.state_of(graph)
        if state is None:
            state = GraphState()
            # On the graph itself: the state holds tensors of the graph, so a table would keep both alive forever.
            setattr(graph, self._state_name, state)
            self._touched.append(weakref.ref(graph))
        return state

    def inputs(self, graph: tf.Graph) -> list[tf.Tensor]:
        """Returns the inputs of the replica function traced in `graph` itself; empty if in an outer graph."""
        state = self.state_of(graph)
        return state.inputs if state is not None else []

    def next_reduction(self, who: Hashable) -> tuple[int, Hashable]:
        """Returns a key for the next reduction by `who` in the graph under construction, the same in every retrace."""
        reductions = self.state(outer_graphs(ops.get_default_graph())[-1]).reductions
        reductions[who] += 1
        return reductions[who], who

    def note_access(self, variable: GatedVariable, graph: tf.Graph) -> list[tf.Tensor]:
        """Notes the forward order and emits what waits, before any access in a graph under construction.

        Returns what the access must come after: the step's inputs if they are in `graph`.
        """
        chain = outer_graphs(graph)
        if not chain:
            return []
        for each in chain:
            state = self.state_of(each)
            if state is not None and any(state.pending.values()):
                self._emit_all(each)
        if variable.has_own_gates:
            first_use = self.state(chain[-1]).first_use
            first_use.setdefault(variable._unique_id, len(first_use))
        return self.inputs(graph)

    def note_passed(
        self, variables: Sequence[GatedVariable], replica: int, graph: tf.Graph, passed: tf.Operation
    ) -> None:
        """Notes that the op `passed` passes the gate of `variables` in `graph`."""
        gates = self.state(graph).passed.by_variable
        for position, variable in enumerate(variables, 1):
            gates.setdefault((variable._unique_id, replica), (passed, passed.inputs[position]))

    def group_gates(self, variables: Iterable[GatedVariable]) -> None:
        """Groups small ones of `variables`, which one optimizer updates; see pending.py."""
        group_gates(variables, min(self._first_bytes, self._slice_bytes), self.compressing.codec)

    def note_reduced(self, reduced: Reduced) -> None:
        """Notes the result of an `all_reduce` in the graph under construction."""
        self.state(ops.get_default_graph()).reduced[id(reduced.result)] = reduced

    def defers(
        self, variable: GatedVariable, function: Function, gradient: Value, arguments: Sequence[Argument]
    ) -> bool:
        """Notes `function(component, gradient, *arguments)` if it can run outside the step; else returns False."""
        reduced = find_reduced(self.state_of, gradient)
        if reduced is None or not deferrable(variable, reduced.gradient):
            return False
        graph, replica = ops.get_default_graph(), distribute_lib.get_replica_context()._replica_id
        state = self.state(graph)
        if any(each.variable is variable for each in state.pending.get(replica, ())):
            self._emit(graph, replica)  # the second update of a variable comes after its first
        update = PendingUpdate(variable, function, tuple(arguments), reduced, self.compressing.codec(variable))
        state.pending.setdefault(replica, []).append(update)
        pending = reduced.reduction.pending
        pending[id(graph)] += 1
        if pending[id(graph)] == reduced.reduction.size:
            self._emit(graph, replica)
        return True

    # When it is emitted.

    def begin_call(self, graph: tf.Graph, inputs: list[tf.Tensor]) -> None:
        """Prepares for tracing replica functions with `inputs` in `graph`."""
        self.state(graph).inputs = inputs
        self._forget_call()  # left by a call whose trace raised
        self._touched.clear()

    def end_call(self, graph: tf.Graph) -> None:
        """Emits what is still pending after all replicas of a call have been traced."""
        self._emit_all(graph)
        self._forget_call()
        touched, self._touched = self._touched, []
        for other in [graph, *(each for ref in touched if (each := ref()) is not None)]:
            left = [update for each in self.state(other).pending.values() for update in each]
            if left:
                names = ", ".join(update.variable.name for update in left)
                raise UnsupportedError(
                    f"{other.name}: only some results of one all_reduce were used to update variables inside a tf.cond "
                    f"or tf.while_loop ({names}); reduce them in a separate call"
                )

    def _forget_call(self) -> None:
        self._transfers.clear()
        self._occurrences.clear()
        self._groups.clear()
        self._emissions.clear()

    def _emit_all(self, graph: tf.Graph) -> None:
        state = self.state_of(graph)
        if state is None:
            return
        for replica in sorted(state.pending):
            number = self._strategy.extended._get_replica_id_in_sync_group(replica)
            context = distribute_lib.ReplicaContext(self._strategy, number)
            with graph.as_default(), tf.control_dependencies(None), context:
                self._emit(graph, replica)

    def _emit(self, graph: tf.Graph, replica: int) -> None:
        order = self.first_use(graph)
        fused = self.fuse(self.state(graph).pending.pop(replica, []), order)
        self.emit([self._plan(each, graph, replica, order) for each in fused], graph, replica)

    def first_use(self, graph: tf.Graph) -> dict[str, int]:
        """Returns the order of first use in the outermost of the graphs around `graph`, by unique id."""
        return self.state(outer_graphs(graph)[-1]).first_use

    def fuse(self, pending: Iterable[PendingUpdate], order: dict[str, int]) -> list[list[PendingUpdate]]:
        """See `pending.fuse`."""
        return fuse(pending, order, self._slice_bytes, self._first_bytes)

    def timestamps(self, graph: tf.Graph, replica: int) -> Timestamps:
        """Returns what makes timestamps of the step that `graph` is, as far as it has been traced by now."""
        return Timestamps(graph, lambda each: self.state(each).passed, self.inputs, replica)

    def emit(self, buckets: Sequence[PlannedBucket], graph: tf.Graph, replica: int, *, timed: bool = True) -> None:
        """Traces the updates of `buckets` and sends them in `graph`, together; `timed`: with timestamps."""
        for bucket in buckets:
            self._trace(bucket)
        numbers = self._declare([bucket for bucket in buckets if bucket.function is not None], graph)
        group = self._groups.setdefault((self._emissions[replica], len(numbers)), Group())
        self._emissions[replica] += 1
        graph_run = graph_ops.graph_run() if replica == 0 else tf.constant(0, tf.int64)
        timestamps = self.timestamps(graph, replica) if timed else None
        last = min((bucket.spec.priority for bucket in numbers), default=0)  # the most urgent is the last to be sent
        for index, bucket in enumerate(buckets):
            if bucket not in numbers:
                bucket.update_in_graph()
                continue
            transfer = self._transfer(bucket, numbers[bucket], group)
            transfer.leads = bucket.spec.priority == last
            noted = timestamps.of_bucket(bucket.ids, whole=transfer.leads) if timestamps else NotedTimes()
            if replica == 0:
                transfer.read, transfer.whole = noted.variable, noted.whole
            carries = index % self._replicas == replica
            bucket.send(transfer, self._runtime.queue, graph_run, carries, noted.times)
        if timestamps is not None:
            timestamps.done()

    def _trace(self, bucket: PlannedBucket) -> None:
        """Traces the update of `bucket`; leaves it without a function if it cannot be deferred."""
        try:
            bucket.trace(self._strategy, compared=self._compared is not None)
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

    def _declare(self, buckets: list[PlannedBucket], graph: tf.Graph) -> dict[PlannedBucket, int]:
        """Declares `buckets`, which `graph` sends, and returns their numbers."""
        with ops.init_scope():
            numbers = self._runtime.buckets([(bucket.key, bucket.spec) for bucket in buckets])
        for bucket, number in zip(buckets, numbers, strict=True):
            self.compressing.declared(number, bucket.spec, bucket.trained)
        if buckets:
            self.graphs.pop(graph.name, None)
            self.graphs[graph.name] = weakref.ref(graph)
        return dict(zip(buckets, numbers, strict=True))

    def _transfer(self, bucket: PlannedBucket, number: int, group: Group) -> DeferredUpdate:
        """Returns the transfer of `bucket`, declared as `number`; local replicas share it."""
        occurrence = bucket.key, self._occurrences[bucket.key, bucket.replica]
        self._occurrences[bucket.key, bucket.replica] += 1
        if occurrence not in self._transfers:
            transfer = bucket.transfer(number, self._replicas, group, self._runtime)
            self._transfers[occurrence] = transfer
            transfer.invariants = self._compared if bucket.compared else None
            self._runtime.adopt(transfer, bucket.graph)
        return self._transfers[occurrence]
