"""The outer optimizer of one optimizer of Keras (DiLoCo, https://arxiv.org/abs/2311.08105), which pservers run.

A worker pushes its pseudo-gradient, (global - own) / workers, when it is due; pservers keep the global parameters and
the momentum, and reply with the new global parameters. The model is cut into fragments that are exchanged in turn, as
in the strided pattern of Streaming DiLoCo (https://arxiv.org/abs/2501.18512): fragment p of P has layers p, p + P,
p + 2 P and so on, in order of creation. Layers of different sizes go to the fragment with the fewest bytes so far,
which is the same for equal ones.

Fragment p is due at steps with (step + p * H / P) % H == 0, H being `Config.inner_steps`. In a traced step that is
decided in the graph; eagerly, and where ranks meet, on the host. With overlap_steps, parameters that come back are
mixed in that many steps later.

Tested in tests/policies/test_outer.py, tests/policies/test_outer_refusals.py and tests/policies/test_fragments.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfps.compression import NONE
from tfps.config import Config
from tfps.errors import ConfigError, UnsupportedError
from tfps.exchange.interface import BucketSpec, Exchange
from tfps.exchange.update_spec import UpdateSpec
from tfps.graph import ops as graph_ops
from tfps.graph.ops import HOST
from tfps.graph.tf_private import ResourceVariable, control_flow_free, distribute_lib, ops
from tfps.graph.timestamps import Timestamps, now_after
from tfps.policies.remote_optimizers import RemoteBucket
from tfps.runtime.remote import RULES, RemoteParameter, RemoteRule, RemoteSlot
from tfps.runtime.runtime import Runtime
from tfps.runtime.step_spans import InnerStep
from tfps.types import Function
from tfps.updates.names import common_name, own_name
from tfps.updates.pending import PendingUpdate, Reduced, Reduction
from tfps.updates.reductions import check_one_device
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.variables import GatedVariable, current_replica


class OuterOptimizer:
    """Used by the threads that trace or run eagerly.

    Args:
        setting: what asks for it, for messages.
        rule: of the global copies of `variables`.
        variables: what the optimizer updates, in its order; each has a global copy.
        optimizer: the name of its class, for messages.
        exchanged: called once, before the first exchange; returns this object's number, the same on all ranks.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        runtime: Runtime,
        scheduler: UpdateScheduler,
        config: Config,
        setting: str,
        rule: OuterRule,
        variables: Sequence[GatedVariable],
        optimizer: str,
        exchanged: Callable[[], int],
    ) -> None:
        self.variables, self.optimizer, self._setting = list(variables), optimizer, setting
        self._trained: set[str] = set()  # unique ids of those that steps have updated
        self.apart: set[str] = set()  # of those whose own values were not the global ones before any step
        self.number: int | None = None  # None until the first exchange is traced
        self.last_barrier = 0  # the step at which all ranks have last been together
        self._graphs: list[weakref.ref[tf.Graph]] = []  # of training steps
        self._strategy, self._runtime, self._scheduler, self._exchanged = strategy, runtime, scheduler, exchanged
        self._every, self._overlap, self._own_share = config.inner_steps, config.overlap_steps, config.own_share
        self.rule = rule
        names = [own_name(variable) for variable in variables]
        sizes = [4 * int(variable.shape.num_elements()) for variable in variables]
        places = cut(names, sizes, config.fragments)
        self._fragments = [[self.variables[place] for place in fragment] for fragment in places]
        self._offsets = [number * self._every // config.fragments for number in range(config.fragments)]
        for fragment in self._fragments:
            scheduler.group_gates(map(self._gated, fragment))
        self._plans: list[list[list[str]]] = [[] for _ in self._fragments]  # unique ids of the variables of each bucket
        # Of each fragment: number, declaration and variables (unique ids) of its buckets.
        self._buckets: list[list[tuple[int, BucketSpec, list[str]]]] = [[] for _ in self._fragments]
        self._functions: dict[tuple[str, int], Function] = {}
        with tf.init_scope(), tf.device(HOST):
            # For each replica: its inner steps so far, and after how many of them the last round has been ended.
            self._states = [
                ResourceVariable(tf.zeros([2], tf.int64), trainable=False, name="tfps_inner_steps")
                for _ in range(len(strategy.extended.worker_devices))
            ]

    def _gated(self, variable: GatedVariable) -> GatedVariable:
        """The variable whose gates are closed during an exchange of `variable`."""
        return copy_of(variable) if self._overlap else variable

    # What has happened.

    @property
    def steps(self) -> int:
        """Inner steps of this worker so far."""
        return int(self._states[0].numpy()[0])

    @property
    def _ended(self) -> int:
        return int(self._states[0].numpy()[1])

    def set_steps(self, steps: int, ended: int | None = None) -> None:
        """Sets how many steps have been made, and after how many of them the last round was ended, if not as before."""
        if ended is None:
            ended = self._ended
        else:
            self.last_barrier = steps
        for state in self._states:
            state.assign([steps, ended])

    def slots(self) -> dict[str, RemoteSlot]:
        """The momentum of each variable, by its place among `variables`."""
        found = [(str(place), self.rule.slots(copy_of(variable))) for place, variable in enumerate(self.variables)]
        return {place: slots[0] for place, slots in found if slots}

    # In a step.

    def note_trained(self, places: Sequence[int]) -> None:
        """Notes that earlier steps have updated the variables at these places, as before they were restored."""
        self._trained |= {self.variables[place]._unique_id for place in places}

    def check_trained(self, updated: Sequence[GatedVariable]) -> None:
        """Checks that a step updates what earlier ones have updated, and notes what it updates."""
        ids = {variable._unique_id for variable in updated}
        for variable in self.variables:
            if variable._unique_id in self._trained - ids and (what := self._moves(variable)):
                raise UnsupportedError(
                    f"{self._setting}: variable {own_name(variable)!r} has no gradient in this step of "
                    f"{self.optimizer}, but had one in earlier steps, and {what} would move it on; to freeze it, "
                    "compile the model again with a new optimizer; to train variables in turns, give each set of them "
                    "an optimizer of its own; or use mode='sync' (tfps.Config, the default)"
                )
        self._trained |= ids

    def _moves(self, variable: GatedVariable) -> str:
        """What moves `variable` on in exchanges where workers have not changed it; "" if nothing does."""
        if self.rule.slots(copy_of(variable)):
            return "the outer momentum"
        return "the residual of compression" if self._scheduler.compressing.codec(variable) != NONE else ""

    def after_step(self) -> None:
        """Counts an inner step and exchanges what is due; called in each replica function."""
        replica = distribute_lib.get_replica_context()._replica_id
        if tf.executing_eagerly():
            check_one_device(self._setting, len(self._states))
            if self.number is None:  # all ranks declare at their first step, not when the first exchange is due
                with tf.init_scope():
                    for fragment in range(len(self._fragments)):
                        self._functions["push", fragment] = self._function("push", fragment)
            self.advance(self.steps + 1)
            return
        state, graph = self._states[replica], ops.get_default_graph()
        timestamps = self._scheduler.timestamps(graph, replica)
        self._graphs.append(weakref.ref(control_flow_free(graph)))
        with tf.device(HOST):
            # A step that finds the end of the data does not count.
            with tf.control_dependencies(self._scheduler.inputs(graph)):
                state.assign_add([1, 0], read_value=False)
            step, ended = tf.unstack(state.read_value())
        mixed: list[tf.Tensor] = []
        for fragment, offset in enumerate(self._offsets):
            with tf.device(HOST):
                back = step - self._overlap
                mixes = tf.logical_and(back > ended, tf.equal((back + offset) % self._every, 0))
                due = tf.equal((step + offset) % self._every, 0)
            if self._overlap:
                mix = functools.partial(self._mix, fragment, replica, self._own_share)
                mixed += tf.unstack(_only_if(mixes, mix, [0.0, 0.0]))
            _only_if(due, functools.partial(self._push, fragment, replica, step), [])
        if replica == 0:
            self._note(timestamps, step, mixed)

    def _note(self, timestamps: Timestamps, step: tf.Tensor, mixed: Sequence[tf.Tensor]) -> None:
        """Sends the timestamps of a step, which may send nothing else; `mixed`: two per fragment, with overlap."""
        transfer, graph = InnerStep(self._runtime.spans), ops.get_default_graph()
        times = [tf.cast(step, tf.float64), *(timestamps.of_bucket([], whole=True).times[:2] or (0.0, 0.0))]
        for buckets in self._buckets:
            if self._overlap:
                number, spec, _ = min(buckets, key=lambda each: each[1].priority)
                transfer.awaited.append((number, spec, 0))
                continue
            for number, spec, ids in buckets:
                noted = timestamps.of_bucket(ids, whole=False)
                transfer.awaited.append((number, spec, noted.variable))
                times += noted.times[2:] or (0.0, 0.0)
        timestamps.done()
        self._runtime.adopt(transfer, graph)
        order = self._scheduler.first_use(graph)
        # The step ends about when this one has been updated; its component is read behind no gate.
        last = min(self.variables, key=lambda each: order.get(each._unique_id, len(order)))._values[0]
        with tf.device(last.device):
            updated = last.read_value()
        with tf.control_dependencies([updated.op]):
            nothing = tf.constant([], tf.uint8)
            graph_ops.send(self._runtime.queue, transfer.id, graph_ops.graph_run(), nothing, None, [*times, *mixed])

    def _push(self, fragment: int, replica: int, step: tf.Tensor) -> None:
        """Emits the exchange of a fragment at `step` into the graph under construction."""
        graph, exchange = ops.get_default_graph(), self._runtime.exchange
        with tf.device(HOST):
            number = tf.cast((step + self._offsets[fragment]) // self._every, tf.float64)
            scalars = tf.stack([number, tf.constant(self.rule.learning_rate, tf.float64)])
        variables = self._fragments[fragment]
        reduction = Reduction(len(variables))
        pending: list[PendingUpdate] = []
        trained: dict[str, GatedVariable] = {}
        first_use, order = self._scheduler.first_use(graph), {}
        for variable in variables:
            own, shared = variable._get_replica(replica), copy_of(variable)._get_replica(replica)
            with tf.device(own.device):
                change = (shared.read_value() - own.read_value()) / tf.cast(exchange.view.workers, own.dtype)
            gated = self._gated(variable)
            trained[gated._unique_id] = variable
            order[gated._unique_id] = first_use.get(variable._unique_id, len(first_use))
            codec = self._scheduler.compressing.codec(variable)
            pending.append(PendingUpdate(gated, self.rule, (scalars,), Reduced(change, change, reduction), codec))
        planned = self._planned(fragment, pending, order)
        buckets = [
            OuterBucket(
                self.rule, [trained[each.variable._unique_id] for each in bucket], bucket, graph, replica, order
            )
            for bucket in planned
        ]
        self._scheduler.emit(buckets, graph, replica, timed=False)
        numbers = self._runtime.buckets([(bucket.key, bucket.spec) for bucket in buckets])
        self._buckets[fragment] = [(n, bucket.spec, bucket.ids) for n, bucket in zip(numbers, buckets, strict=True)]

    def _planned(
        self, fragment: int, pending: Sequence[PendingUpdate], order: dict[str, int]
    ) -> list[list[PendingUpdate]]:
        """Cuts a fragment into buckets: the same whenever and wherever it is traced again."""
        if self.number is None:
            self.number = self._exchanged()
        if not self._plans[fragment]:
            fused = self._scheduler.fuse(pending, order)
            self._plans[fragment] = [[each.variable._unique_id for each in bucket] for bucket in fused]
        by_id = {each.variable._unique_id: each for each in pending}
        return [[by_id[each] for each in bucket] for bucket in self._plans[fragment]]

    def _mix(self, fragment: int, replica: int, own_share: float) -> list[tf.Tensor]:
        """Emits the mixture of own and global parameters, which waits for these, into the graph under construction.

        Returns when that wait begins and ends.
        """
        begun, read = now_after([]), []
        for variable in self._fragments[fragment]:
            own, shared = variable._get_replica(replica), copy_of(variable)._get_replica(replica)
            with tf.device(own.device):
                new = shared.read_value()
                read.append(new)
                if own_share:
                    new = own_share * own.read_value() + (1 - own_share) * new
                own.assign(new, read_value=False)
        return [begun, now_after(read)]

    # On the host.

    def advance(self, target: int) -> None:
        """Goes on to step `target`, without training but with all exchanges that are due until then."""
        with tf.init_scope():
            ended = self._ended
            for step in range(self.steps + 1, target + 1):
                self.set_steps(step)
                for fragment, offset in enumerate(self._offsets):
                    back = step - self._overlap
                    if self._overlap and back > ended and (back + offset) % self._every == 0:
                        self._run("mix", fragment, step)
                    if (step + offset) % self._every == 0:
                        self._run("push", fragment, step)

    def catch_up(self, target: int, *, trained: bool) -> None:
        """Goes on to the step of the rank that has made most; `trained`: whether this one has made any."""
        if target > self.last_barrier and not trained:
            for graph in (ref() for ref in self._graphs):
                if graph is not None:
                    self._strategy.extended.combiner.run_elsewhere(graph)
        self.advance(target)
        self.last_barrier = target

    def make_up(self) -> bool:
        """Makes this worker's part of its next exchange if another rank waits for it; returns whether it did."""
        if self.number is None:
            return False
        steps = self.steps
        wait, fragment = min((-(steps + 1 + offset) % self._every, n) for n, offset in enumerate(self._offsets))
        gates = [gate for variable in self._fragments[fragment] for gate in self._gated(variable).gates]
        if any(gate.closed for gate in gates):
            return False  # its last exchange is under way: others may still wait for that one
        if not self._runtime.exchange.peers.is_awaited(self._buckets[fragment][0][0]):
            return False
        self.advance(steps + 1 + wait)
        return True

    def end_round(self) -> None:
        """Exchanges what was trained since the last exchange, so that all ranks have the global parameters.

        All ranks must have the same `steps`.
        """
        steps, ended = self.steps, self._ended
        if steps == ended:
            return
        end = -(-steps // self._every) * self._every
        with tf.init_scope():
            for fragment, offset in enumerate(self._offsets):
                since = (steps + offset) % self._every  # its last exchange
                if self._overlap and since < self._overlap and steps - since > ended:
                    self._run("mix", fragment, steps)
                if self._overlap or since:
                    self._run("push", fragment, end)
            for fragment in range(len(self._fragments)) if self._overlap else ():
                self._run("take", fragment, end)
            self.set_steps(end, end)

    def _run(self, what: str, fragment: int, step: int) -> None:
        if (what, fragment) not in self._functions:
            self._functions[what, fragment] = self._function(what, fragment)
        self._functions[what, fragment](tf.constant(step, tf.int64))

    def _function(self, what: str, fragment: int) -> Function:
        """Returns a function of the step that does `what` on all local replicas."""
        extended = self._strategy.extended

        @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int64)])
        def tfps_outer(step: tf.Tensor) -> tf.Tensor:
            graph = ops.get_default_graph()
            self._scheduler.begin_call(graph, [])
            for replica, device in enumerate(extended.worker_devices):
                number = extended._get_replica_id_in_sync_group(replica)
                with distribute_lib.ReplicaContext(self._strategy, number), tf.device(device):
                    if what == "push":
                        self._push(fragment, replica, step)
                    else:
                        self._mix(fragment, replica, self._own_share if what == "mix" else 0.0)
            self._scheduler.end_call(graph)
            return step

        return tfps_outer.get_concrete_function()


def _only_if(
    condition: tf.Tensor, emit: Callable[[], Sequence[tf.Tensor] | None], otherwise: Sequence[float]
) -> tf.Tensor:
    """Emits ops that run if `condition` holds, into the graph under construction; returns their float64 results."""

    def then() -> tf.Tensor:
        return tf.stack(found) if (found := emit()) else tf.constant([], tf.float64)

    with tf.device(None):
        return tf.cond(condition, then, lambda: tf.constant(otherwise, tf.float64))


class OuterRule(RemoteRule):
    """SGD with Nesterov momentum, by which pservers update the global parameters `copies`."""

    def __init__(
        self, exchange: Exchange, copies: Sequence[GatedVariable], learning_rate: float, momentum: float
    ) -> None:
        self.number = next(RULES)
        self.learning_rate, self._momentum = learning_rate, momentum
        self._slots: dict[str, list[RemoteSlot]] = {}
        for copy in copies:
            slot = RemoteSlot(own_name(copy), exchange, copy.wait, copy.shape.as_list(), 0.0)
            self._slots[copy._unique_id] = [slot] if self._momentum else []

    def spec(self, variables: Sequence[GatedVariable]) -> UpdateSpec:
        return UpdateSpec(
            "sgd",
            (("momentum", self._momentum), ("nesterov", 1.0)),
            (("momentum", 0.0),) if self._momentum else (),
            tuple(int(variable.shape.num_elements()) for variable in variables),
            (False,) * len(variables),
        )

    def slots(self, variable: GatedVariable) -> Sequence[RemoteSlot]:
        return self._slots[variable._unique_id]


class OuterBucket(RemoteBucket):
    """A bucket of global parameters. `updates` has the variables whose gates are closed until it has come back: the
    trained ones, which then begin from the new global parameters, or only their global copies.
    """

    def __init__(
        self,
        rule: OuterRule,
        trained: Sequence[GatedVariable],
        updates: Sequence[PendingUpdate],
        graph: tf.Graph,
        replica: int,
        order: dict[str, int],
    ) -> None:
        super().__init__(rule, updates, graph, replica, order)
        self.trained = list(trained)
        self.kept = list(map(copy_of, trained))
        names, alike = tuple(map(own_name, trained)), tuple(map(common_name, trained))
        self.spec = dataclasses.replace(self.spec, names=names, alike=alike)

    def _follow(self, written: list[list[tf.Operation]]) -> list[list[tf.Operation]]:
        if self.variables[0] is self.kept[0]:
            return written
        for variable, copy, operations in zip(self.trained, self.kept, written, strict=True):
            component, new = variable._values[self.replica], copy._values[self.replica]
            with tf.device(component.device), tf.control_dependencies(operations):
                operations.append(component.assign(new.read_value(), read_value=False))
        return written


def copy_of(variable: GatedVariable) -> GatedVariable:
    """Returns the global copy of `variable`, which an optimizer updates that has been built."""
    if variable.global_copy is None:
        raise RuntimeError(f"{variable.name} has no global copy")
    return variable.global_copy


def make_copy(variable: GatedVariable, own_gates: bool) -> GatedVariable:
    """Returns the global copy of `variable`, made if it has none.

    Args:
        own_gates: whether reads of the copy wait for exchanges by themselves, and those of `variable` do not.
    """
    if variable.global_copy is not None:
        return variable.global_copy
    strategy = variable.distribute_strategy
    with tf.init_scope(), contextlib.ExitStack() as scopes:
        if current_replica(strategy) is None:
            scopes.enter_context(strategy.scope())
        if not own_gates:
            scopes.enter_context(strategy.extended.colocate_vars_with(variable))
        zeros, name = tf.zeros(variable.shape, variable.dtype), f"{own_name(variable)}/global"
        copy = tf.Variable(zeros, trainable=False, dtype=variable.dtype, name=name)
        if own_gates:
            copy.make_gates()
        copy.remote, variable.global_copy = RemoteParameter(), copy
        variable.note_assigned()
    return copy


def cut(names: Sequence[str], sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Returns the places of the variables of each fragment, in order.

    Args:
        names: of all variables in order of creation; those of a layer have its name before the last `/`. A layer stays
            whole, unless there are fewer layers than fragments.
        sizes: in bytes.
    """
    if parts > len(names):
        raise ConfigError(
            f"fragments must be at most the number of variables that an optimizer updates, {len(names)}, got {parts}"
        )
    places = range(len(names))
    units = [list(unit) for _, unit in itertools.groupby(places, key=lambda place: names[place].rpartition("/")[0])]
    if len(units) < parts:
        units = [[place] for place in places]
    fragments: list[list[int]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for position, unit in enumerate(units):
        empty = parts - sum(map(bool, fragments))
        last = len(units) - position == empty  # each fragment gets something, also beside a very large layer
        choice = min(range(parts), key=lambda part: (last and bool(fragments[part]), filled[part], part))
        fragments[choice] += unit
        filled[choice] += sum(sizes[place] for place in unit)
    return fragments
