"""The outer optimizer of one optimizer of Keras (DiLoCo, https://arxiv.org/abs/2311.08105), which pservers run.

The model is cut into fragments that are exchanged in turn, in the strided pattern of Streaming DiLoCo
(https://arxiv.org/abs/2501.18512). Fragment p of P is due at steps with (step + p * H / P) % H == 0, H being
`Config.inner_steps`: in a traced step that is decided in the graph, else on the host.

Tested in tests/policies/test_outer.py, tests/policies/test_outer_refusals.py and tests/policies/test_fragments.py.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfps.compression import NONE
from tfps.config import Config
from tfps.errors import ConfigError, UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.rules import Floats
from tfps.exchange.update_spec import MEAN, UpdateSpec
from tfps.graph import ops as graph_ops
from tfps.graph.ops import HOST, Gate
from tfps.graph.tf_private import ResourceVariable, control_flow_free, distribute_lib, ops
from tfps.graph.timestamps import Timestamps, now_after
from tfps.policies.quorum import Latecomer
from tfps.policies.remote_optimizers import RemoteBucket
from tfps.runtime.remote import RULES, RemoteParameter, RemoteRule, RemoteSlot
from tfps.runtime.runtime import Runtime
from tfps.runtime.step_spans import InnerStep
from tfps.types import Function, Value
from tfps.updates.names import own_name
from tfps.updates.pending import PendingUpdate, Reduced, Reduction
from tfps.updates.reductions import check_one_device
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.variables import GatedVariable, current_replica


class OuterOptimizer(RemoteRule):
    """SGD with Nesterov momentum, by which pservers update global copies. Used by threads that trace or run eagerly."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        variables: Sequence[GatedVariable],  # what the optimizer updates, in its order; each has a global copy
        apart: set[str],  # unique ids of those whose own values were not the global ones before any step
        optimizer: str,  # the name of its class, for messages
        numbers: Iterator[int],  # for `job_number`
    ) -> None:
        self.number = next(RULES)
        self.variables, self.apart, self.optimizer, self._numbers = list(variables), apart, optimizer, numbers
        self._strategy, self._setting = strategy, strategy.extended.policy.setting
        self._learning_rate, momentum = strategy.extended.policy.outer_settings()
        self._momentum: float = momentum
        self._runtime: Runtime = strategy.extended._runtime
        self._scheduler: UpdateScheduler = strategy.extended.scheduler
        self._trained: set[str] = set()  # unique ids of those that steps have updated
        self.job_number: int | None = None  # the same on all ranks; None until the first exchange is traced
        self.last_barrier = 0  # the step at which all ranks have last been together
        self._graphs: list[weakref.ref[tf.Graph]] = []  # of training steps
        config: Config = strategy.config
        self._every, self._overlap, self._own_share = config.inner_steps, config.overlap_steps, config.own_share
        self._slots: dict[str, RemoteSlot] = {}  # the momentum, by unique id of the global copy
        for copy in map(copy_of, variables) if momentum else ():
            shape = copy.shape.as_list()
            self._slots[copy._unique_id] = RemoteSlot(own_name(copy), self._runtime.exchange, copy.wait, shape, 0.0)
        sizes = [4 * int(variable.shape.num_elements()) for variable in variables]
        places = cut(list(map(own_name, variables)), sizes, config.fragments)
        self._fragments = [[self.variables[place] for place in fragment] for fragment in places]
        self._offsets = [number * self._every // config.fragments for number in range(config.fragments)]
        for fragment in self._fragments:
            self._scheduler.group_gates(map(self._gated, fragment))
        # Of each fragment, once it was traced: number, declaration and variables (unique ids) of its buckets.
        self._buckets: list[list[tuple[int, BucketSpec, list[str]]]] = [[] for _ in self._fragments]
        self._functions: dict[tuple[str, int], Function] = {}
        self._ended = 0  # after how many steps a round has last been ended, by all ranks
        self._latecomer: Latecomer | None = None
        self._pushed_early: set[int] = set()  # fragments, where workers meet
        self._unfinished: set[int] = set()  # fragments of which some worker then has steps that are in no exchange
        if config.quorum < 1 and self._runtime.exchange.view.workers > 1:
            count = len(self._fragments)
            self._latecomer = Latecomer(self._runtime.exchange, config.grace_s, count, self._settled, self._base)
        with tf.init_scope(), tf.device(HOST):
            # For each replica: its inner steps so far, and after how many of them the last round has been ended.
            self._states = [
                ResourceVariable(tf.zeros([2], tf.int64), trainable=False, name="tfps_inner_steps")
                for _ in range(len(strategy.extended.worker_devices))
            ]
            # With a quorum, for each replica and fragment: its steps since it has last pushed, and how often it has.
            self._counts = [
                ResourceVariable(tf.zeros([2, len(self._fragments)], tf.int64), trainable=False, name="tfps_pushes")
                for _ in self._states
                if self._latecomer is not None
            ]

    # The rule.

    def spec(self, variables: Sequence[GatedVariable]) -> UpdateSpec:
        return UpdateSpec(
            "sgd",
            (("momentum", self._momentum), ("nesterov", 1.0), (MEAN, 1.0)),
            (("momentum", 0.0),) if self._momentum else (),
            tuple(int(variable.shape.num_elements()) for variable in variables),
            (False,) * len(variables),
        )

    def slots(self, variable: GatedVariable) -> Sequence[RemoteSlot]:
        return [self._slots[variable._unique_id]] if self._momentum else []

    def _gated(self, variable: GatedVariable) -> GatedVariable:
        """The variable whose gates are closed during an exchange of `variable`."""
        return copy_of(variable) if self._overlap else variable

    # What has happened.

    @property
    def steps(self) -> int:
        """Inner steps of this worker so far."""
        return int(self._states[0].numpy()[0])

    def begin_round(self, steps: int) -> None:
        """Notes that all ranks have made so many `steps` and have the global parameters."""
        self.last_barrier = self._ended = steps
        for state in self._states:
            state.assign([steps, steps])

    def momenta(self) -> dict[str, RemoteSlot]:
        """The momentum of each variable, by its place among `variables`."""
        slots = [(place, self.slots(copy_of(variable))) for place, variable in enumerate(self.variables)]
        return {str(place): slot for place, found in slots for slot in found}

    # In a step.

    def note_trained(self) -> None:
        """Notes which variables have been trained before, by the momentum that was restored."""
        trained = [place for place, slot in self.momenta().items() if slot.offered().any()]
        self._trained |= {self.variables[int(place)]._unique_id for place in trained}

    def check_trained(self, updated: Sequence[GatedVariable]) -> None:
        """Checks that a step updates what earlier ones have updated, and notes what it updates."""
        ids = {variable._unique_id for variable in updated}
        for variable in self.variables:
            if variable._unique_id not in self._trained - ids:
                continue
            if self._momentum or self._scheduler.compressing.codec(variable) != NONE:
                what = "the outer momentum" if self._momentum else "the residual of compression"
                raise UnsupportedError(
                    f"{self._setting}: variable {own_name(variable)!r} has no gradient in this step of "
                    f"{self.optimizer}, but had one in earlier steps, and {what} would move it on; to freeze it, "
                    "compile the model again with a new optimizer; to train variables in turns, give each set of them "
                    "an optimizer of its own; or use mode='sync' (tfps.Config, the default)"
                )
        self._trained |= ids

    def after_step(self) -> None:
        """Counts an inner step and exchanges what is due; called in each replica function."""
        replica = distribute_lib.get_replica_context()._replica_id
        if tf.executing_eagerly():
            check_one_device(self._setting, len(self._states))
            if self.job_number is None:  # all ranks declare at their first step, not when the first exchange is due
                with tf.init_scope():
                    for fragment in range(len(self._fragments)):
                        self._function("push", fragment)
            self.advance(self.steps + 1)
            return
        state, graph = self._states[replica], ops.get_default_graph()
        timestamps = self._scheduler.timestamps(graph, replica)
        self._graphs.append(weakref.ref(control_flow_free(graph)))
        with tf.device(HOST):
            # A step that finds the end of the data does not count.
            with tf.control_dependencies(self._scheduler.inputs(graph)):
                state.assign_add([1, 0], read_value=False)
                if self._counts:
                    more = [[1] * len(self._fragments), [0] * len(self._fragments)]
                    self._counts[replica].assign_add(more, read_value=False)
            step, ended = tf.unstack(state.read_value())
        mixed: list[tf.Tensor] = []
        for fragment in range(len(self._fragments)):
            with tf.device(HOST):
                mixes, due = self._due(fragment, step, ended)
            if self._overlap:
                mix = functools.partial(self._mix, fragment, replica, self._own_share)
                mixed += tf.unstack(_only_if(mixes, mix, [0.0, 0.0]))
            _only_if(due, functools.partial(self._push, fragment, replica, step), [])
        if replica == 0:
            self._note(timestamps, step, mixed)

    def _due(self, fragment: int, step: Value, ended: Value) -> tuple[Value, Value]:
        """Whether a fragment is mixed in, and exchanged, at `step`: a number on the host or a tensor."""
        offset, back = self._offsets[fragment], step - self._overlap
        return (back > ended) & ((back + offset) % self._every == 0), (step + offset) % self._every == 0

    def _note(self, timestamps: Timestamps, step: tf.Tensor, mixed: Sequence[tf.Tensor]) -> None:
        """Sends the timestamps of a step, which may send nothing else; `mixed`: two per fragment, with overlap."""
        transfer, graph = InnerStep(self._runtime.spans), ops.get_default_graph()
        times = [tf.cast(step, tf.float64), *(timestamps.of_bucket([], reports_step=True).times[:2] or (0.0, 0.0))]
        for buckets in self._buckets:
            if self._overlap:
                number, spec, _ = min(buckets, key=lambda each: each[1].priority)
                transfer.awaited.append((number, spec, 0))
                continue
            for number, spec, ids in buckets:
                noted = timestamps.of_bucket(ids, reports_step=False)
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
            weight = tf.constant(1.0, tf.float64)
            if self._counts:
                counts, this = self._counts[replica], tf.one_hot(fragment, len(self._fragments), dtype=tf.int64)
                since, pushes = tf.unstack(counts.read_value())
                # Who has none where workers meet counts as without a quorum, or one that still trains would move all.
                weight = tf.cast(tf.maximum(since[fragment], self._every), tf.float64) / self._every
                counts.assign(tf.stack([since * (1 - this), pushes + this]))
                number = tf.zeros([], tf.float64)  # ranks count their steps apart
            scalars = tf.stack([number, tf.constant(self._learning_rate, tf.float64), weight])
        if self.job_number is None:
            self.job_number = next(self._numbers)
        reduction = Reduction(len(self._fragments[fragment]))
        pending: dict[str, PendingUpdate] = {}
        first_use, order = self._scheduler.first_use(graph), {}
        for variable in self._fragments[fragment]:
            own, shared = variable._get_replica(replica), copy_of(variable)._get_replica(replica)
            with tf.device(own.device):
                change = (shared.read_value() - own.read_value()) / tf.cast(exchange.view.workers, own.dtype)
                if self._counts:
                    change *= tf.cast(weight, own.dtype)
            gated, codec = self._gated(variable), self._scheduler.compressing.codec(variable)
            order[gated._unique_id] = first_use.get(variable._unique_id, len(first_use))
            reduced = Reduced(change, change, reduction)
            pending[gated._unique_id] = PendingUpdate(gated, self, (scalars,), reduced, codec, variable)
        # Buckets are the same whenever and wherever a fragment is traced again.
        fused = [[pending[each] for each in ids] for _, _, ids in self._buckets[fragment]]
        fused = fused or self._scheduler.fuse(pending.values(), order)
        buckets = [RemoteBucket(updates, graph, replica, order) for updates in fused]
        numbers = self._scheduler.emit(buckets, graph, replica, timed=False)
        self._buckets[fragment] = [(number, bucket.spec, bucket.ids) for bucket, number in numbers.items()]
        for bucket in numbers.values():
            self._strategy.extended.policy.exchanged[bucket] = weakref.ref(self), fragment

    def _mix(self, fragment: int, replica: int, own_share: float) -> list[tf.Tensor]:
        """Emits the mixture of own and global parameters; returns when the wait for these begins and ends."""
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
            steps, ended = self._states[0].numpy().tolist()
            for step in range(steps + 1, target + 1):
                for state in self._states:
                    state.assign([step, ended])
                for fragment in range(len(self._fragments)):
                    mixes, due = self._due(fragment, step, ended)
                    if self._overlap and mixes:
                        self._run("mix", fragment, step)
                    if due:
                        self._run("push", fragment, step)

    def position(self) -> list[int]:
        """What ranks compare where they meet: steps; with a quorum, of each fragment exchanges and steps since."""
        if self._latecomer is None:
            return [self.steps]
        exchanges = [self._exchanges(fragment) for fragment in range(len(self._fragments))]
        return [self.steps, *exchanges, *self._counts[0].numpy()[0].tolist()]

    def catch_up(self, positions: Sequence[Sequence[int]], *, trained: bool) -> None:
        """Goes on to the step of the rank that has made most; `trained`: whether this one has made any."""
        target = max(steps for steps, *_ in positions)
        if target > self.last_barrier and not trained:
            for graph in (ref() for ref in self._graphs):
                if graph is not None:
                    self._strategy.extended.combiner.run_elsewhere(graph)
        if self._latecomer is None:
            self.advance(target)
        else:
            self._join_others(self._latecomer, target, positions)
        self.last_barrier = target

    def make_up(self) -> bool:
        """Makes this worker's part of its next exchange if another rank waits for it; returns whether it did."""
        if self.job_number is None:
            return False
        if self._latecomer is not None:
            pushed = False
            for fragment in range(len(self._fragments)):
                if not self._latecomer.busy and self._is_awaited(fragment):
                    self._push_early(fragment)
                    pushed = True
            return pushed
        steps = self.steps
        wait, fragment = min((-(steps + 1 + offset) % self._every, n) for n, offset in enumerate(self._offsets))
        if not self._is_awaited(fragment):
            return False
        self.advance(steps + 1 + wait)
        return True

    def end_round(self) -> None:
        """Exchanges what was trained since the last exchange; all ranks must have the same `steps`."""
        steps, ended = self._states[0].numpy().tolist()
        if steps == self._ended:
            return
        end = -(-steps // self._every) * self._every
        with tf.init_scope():
            for fragment, offset in enumerate(self._offsets):
                since = (steps + offset) % self._every  # its last exchange
                if self._overlap and since < self._overlap and steps - since > ended:
                    self._run("mix", fragment, steps)
                if (self._overlap or since) if self._latecomer is None else fragment in self._unfinished:
                    self._run("push", fragment, end)
            for fragment in range(len(self._fragments)) if self._overlap or self._latecomer else ():
                self._run("take", fragment, end)
            self.begin_round(end)

    # With a quorum.

    def _gates(self, fragment: int) -> list[Gate]:
        return [gate for variable in self._fragments[fragment] for gate in self._gated(variable).gates]

    def _exchanges(self, fragment: int) -> int:
        """In how many exchanges of a fragment this worker has taken part, maybe with nothing."""
        skipped = self._latecomer.skipped[fragment] if self._latecomer else 0
        return int(self._counts[0].numpy()[1, fragment]) + skipped

    def _settled(self, fragment: int) -> bool:
        return not any(gate.wait() for gate in self._gates(fragment))

    def _held(self, bucket: int) -> tuple[BucketSpec, list[GatedVariable]]:
        """The declaration and the variables of a bucket."""
        gated = {self._gated(variable)._unique_id: variable for variable in self.variables}
        return next(
            (spec, [gated[each] for each in ids])
            for buckets in self._buckets
            for number, spec, ids in buckets
            if number == bucket
        )

    def _base(self, bucket: int) -> Floats | None:
        spec, variables = self._held(bucket)
        if spec.codec is None:
            return None
        return np.concatenate([copy_of(each)._values[0].numpy().reshape(-1) for each in variables])

    def note_awaited(self, fragment: int, step: int) -> None:
        """Notes that a quorum waits for this worker's push of a fragment; must be short."""
        if self._latecomer is not None:
            self._latecomer.note_awaited(fragment, [number for number, _, _ in self._buckets[fragment]], step)

    def replied(self, bucket: int) -> None:
        if self._latecomer is not None and (latest := self._latecomer.latest(bucket)) is not None:
            spec, _ = self._held(bucket)
            if spec.codec is not None:  # a change comes, of what the others have
                self._renew(bucket, latest, moves=False)

    def _renew(self, bucket: int, latest: Floats, *, moves: bool) -> None:
        """Assigns global parameters; `moves`: the worker's own ones keep their distance from them."""
        begin = 0
        for variable in self._held(bucket)[1]:
            shape = variable.shape.as_list()
            end = begin + int(np.prod(shape, dtype=np.int64))
            value, begin = latest[begin:end].reshape(shape), end
            for own, shared in zip(variable._values, copy_of(variable)._values, strict=True):
                if moves:
                    own.assign_add(value - shared.numpy())
                shared.assign(value)

    def meeting(self) -> contextlib.AbstractContextManager[None]:
        """In the block this worker takes part in all exchanges that others begin."""
        return contextlib.nullcontext() if self._latecomer is None else self._latecomer.meeting()

    def _is_awaited(self, fragment: int) -> bool:
        """Whether others wait for its next exchange; while its last one is under way they may still wait for that."""
        under_way = any(gate.closed for gate in self._gates(fragment))
        return not under_way and self._runtime.exchange.peers.is_awaited(self._buckets[fragment][0][0])

    def _push_early(self, fragment: int) -> None:
        """Pushes what there is of a fragment that is not due yet."""
        self._run("push", fragment, self.steps)
        self._pushed_early.add(fragment)

    def _join_others(self, latecomer: Latecomer, target: int, positions: Sequence[Sequence[int]]) -> None:
        """Takes part in as many exchanges as the rank that has in most, and goes on to step `target`."""
        self._unfinished.clear()
        with tf.init_scope():
            for fragment in range(len(self._fragments)):
                said = [(each[1 + fragment], each[1 + fragment + len(self._fragments)]) for each in positions]
                count = max(said)[0]
                if any(exchanges == count and since for exchanges, since in said):
                    self._unfinished.add(fragment)
                for _ in range(self._exchanges(fragment), count):
                    self._push_early(fragment)
            steps, ended = self._states[0].numpy().tolist()
            for fragment, buckets in enumerate(self._buckets):
                since = (steps + self._offsets[fragment]) % self._every
                if self._overlap and fragment in self._pushed_early:
                    self._run("take", fragment, steps)
                elif since < self._overlap and steps - since > ended:
                    self._run("mix", fragment, steps)
                self._settled(fragment)
                for bucket, _, _ in buckets:
                    if (latest := latecomer.latest(bucket)) is not None:
                        self._renew(bucket, latest, moves=True)
            self._pushed_early.clear()
            for state in self._states:
                state.assign([target, target])  # nothing of before is due any more

    def _run(self, what: str, fragment: int, step: int) -> None:
        self._function(what, fragment)(tf.constant(step, tf.int64))

    def _function(self, what: str, fragment: int) -> Function:
        """Returns a function of the step that does `what` on all local replicas."""
        if (known := self._functions.get((what, fragment))) is not None:
            return known
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

        self._functions[what, fragment] = function = tfps_outer.get_concrete_function()
        return function


def _only_if(
    condition: tf.Tensor, emit: Callable[[], Sequence[tf.Tensor] | None], otherwise: Sequence[float]
) -> tf.Tensor:
    """Emits ops that run if `condition` holds, into the graph under construction; returns their float64 results."""

    def then() -> tf.Tensor:
        return tf.stack(found) if (found := emit()) else tf.constant([], tf.float64)

    with tf.device(None):
        return tf.cond(condition, then, lambda: tf.constant(otherwise, tf.float64))


def copy_of(variable: GatedVariable) -> GatedVariable:
    """Returns the global copy of `variable`, which an optimizer updates that has been built."""
    if variable.global_copy is None:
        raise RuntimeError(f"{variable.name} has no global copy")
    return variable.global_copy


def make_copy(variable: GatedVariable, own_gates: bool) -> GatedVariable:
    """Returns the global copy of `variable`, made if it has none; `own_gates`: its reads wait, not `variable`'s."""
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
    """Returns the places of the variables of each fragment, in order; `names` are in order of creation.

    A layer stays whole, unless there are fewer layers than fragments. Its variables have its name before the last `/`.
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
