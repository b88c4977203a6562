"""What tf.distribute asks of a strategy: variables, reductions, updates, datasets, replica count.

Tested in tests/integration/test_semantics.py and tests/strategy/test_tape_errors.py.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator, Sequence

import tensorflow as tf

from tfps.collectives import AllGather
from tfps.compression import NONE
from tfps.config import Config
from tfps.embeddings.variable import all_tables, prefetch
from tfps.errors import JoinError, TfpsError, UnsupportedError, from_text
from tfps.exchange.interface import Exchange
from tfps.graph import common_rows
from tfps.graph.ops import HOST
from tfps.graph.patches import replaced
from tfps.graph.prefetch import noting_inputs
from tfps.graph.shares import Counted, LastBatch, counted, current_share, is_reducing_gradients, with_share
from tfps.graph.tf_private import (
    METRICS_ARE_MIRRORED,
    control_flow_free,
    distribute_lib,
    distribute_utils,
    in_xla,
    mirrored_strategy,
    ops,
    values,
)
from tfps.input import datasets
from tfps.input.staging import Staging
from tfps.keras_hooks.batch_numbers import BatchNumbers
from tfps.keras_hooks.captured import Captured
from tfps.keras_hooks.layers import own_losses
from tfps.keras_hooks.loops import Sharding
from tfps.keras_hooks.position import Position
from tfps.keras_hooks.random_numbers import stateful_apart
from tfps.policies import POLICIES
from tfps.policies.remote_optimizers import update_eagerly
from tfps.runtime.remote import RemoteRule
from tfps.runtime.runtime import Runtime
from tfps.types import Argument, Function, Options, Structure, Value, Variable
from tfps.updates.combined import Combiner
from tfps.updates.compiled import CompiledSteps
from tfps.updates.compressing import Compressing
from tfps.updates.graph_view import Picture, picture
from tfps.updates.initial_values import InitialValues
from tfps.updates.invariants import Invariants
from tfps.updates.nonfinite import Guard
from tfps.updates.on_read_variable import OnReadVariable
from tfps.updates.pending import Reduced, Reduction
from tfps.updates.reductions import LocalGather, as_tensor, check_one_device, divide, identity, sum_locally
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.states import States
from tfps.updates.variables import GatedVariable, container_of, updating

_FLOATING = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
_VARIABLE_CLASSES = {
    **distribute_utils.VARIABLE_CLASS_MAPPING,
    tf.VariableSynchronization.ON_WRITE: GatedVariable,
    tf.VariableSynchronization.ON_READ: OnReadVariable,
}
_SUM, _MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


class Extended(mirrored_strategy.MirroredExtended):
    """Mirrors over local devices like MirroredStrategy, and connects workers through pservers.

    Avoids `merge_call`, which is impossible inside a `tf.cond`: under MirroredStrategy, gradient accumulation and loss
    scaling fail because of it.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, devices: Sequence[str], runtime: Runtime, config: Config
    ) -> None:
        self.exchange, workers = runtime.exchange, runtime.exchange.view.workers
        self.policy = POLICIES[config.mode](runtime, config)
        self._runtime = runtime  # before the base class, which reads the number of replicas
        super().__init__(strategy, devices=list(devices))
        self.sharding = Sharding()
        depth = self.policy.staging_depth(config.staging_depth)
        self.changes = config.elastic and workers > 1  # whether the number of workers may change
        self.grows = self.changes and config.max_workers is not None  # whether there may be more than at the start
        several = self._num_replicas_in_sync > 1
        self.last_batch = LastBatch(len(self._devices), changes=self.changes) if several else None
        self.numbers = BatchNumbers(len(self._devices), together=self.policy.together) if several else None
        self.staging = None
        if depth:
            together = self.policy.together
            every = config.check_every if workers > 1 and together else 0
            self.staging = Staging(runtime, self._devices, depth, self.last_batch, together=together, check_every=every)
        self._reductions = self.policy.reductions()
        self.runtime = runtime
        self.training = Position(admits=self.changes and self.policy.together)
        self._present = AllGather(runtime, "ranks that are present")
        self._local_gather = LocalGather(self._devices)
        self.initial_values = InitialValues(runtime)
        self.combiner = Combiner(runtime, len(self._devices))
        self._invariants = Invariants.of(runtime, config.check_every) if self.policy.together else None
        self.states: States | None = None
        if self._invariants is not None and self.staging is not None:
            self.states = States(runtime, self.combiner, self.initial_values, self.staging)
        self.compressing = Compressing(config.compression_rules, runtime, self.policy.remote_parameters)
        replicas, limits = len(self._devices), config.bucket_limits(runtime.exchange.info.one_host)
        self.scheduler = UpdateScheduler(strategy, runtime, replicas, limits, self._invariants, self.compressing)
        self.compiled = CompiledSteps(self.scheduler, runtime, config, self._devices)
        self.guard: Guard | None = None  # of updates, if not all gradients are applied
        if config.on_nonfinite != "pass":
            codec = self.compressing.codec if self.policy.exchanges_gradients else lambda _: NONE
            factor = self.policy.gradient_factor if self._reductions.estimates else 1
            self.guard = Guard(runtime, replicas, factor, codec, config.on_nonfinite)
        self.policy.attach(strategy)
        if self.staging is not None:
            self.staging.prefetch = functools.partial(prefetch, weakref.ref(strategy))
        self._in_eager_step = False  # whether replica functions run eagerly
        self._replica_graph: tf.Graph | None = None  # in which replica functions are being traced
        self._lifted: weakref.WeakKeyDictionary[Variable, Variable] = weakref.WeakKeyDictionary()

    def _use_merge_call(self) -> bool:
        return False

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._devices) * self._runtime.exchange.view.workers

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return self._runtime.exchange.rank * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self._runtime.exchange.rank * len(self._devices)

    def draws_as(self, context: tf.distribute.ReplicaContext) -> int:
        """Returns the replica id by which `context` draws random numbers; in `predict` it is local to the worker."""
        replica = context._replica_id
        return self._get_replica_id_in_sync_group(replica) if self.shards else replica

    @property
    def should_checkpoint(self) -> bool:
        return self._runtime.exchange.view.place(self._runtime.exchange.rank) == 0

    should_save_summary = should_checkpoint
    experimental_between_graph = True

    # Datasets: each worker reads its shard, as under MultiWorkerMirroredStrategy.

    @property
    def hands_out(self) -> bool:
        """Whether batches that this thread asks for now are handed out between workers, not divided beforehand."""
        return self.policy.hands_out and self.shards and not self.sharding.evaluates

    @property
    def shards(self) -> bool:
        """Whether this worker reads only its shard of a dataset that this thread distributes now."""
        return self.sharding.on

    def _make_input_context(self) -> tf.distribute.InputContext:
        if not self.shards:
            return tf.distribute.InputContext(num_replicas_in_sync=len(self._devices))
        return tf.distribute.InputContext(
            num_input_pipelines=self._runtime.exchange.view.workers,
            input_pipeline_id=self._runtime.exchange.rank,
            num_replicas_in_sync=self._num_replicas_in_sync,
        )

    @contextlib.contextmanager
    def aligned(self, others: Sequence[int]) -> Iterator[None]:
        """Makes this worker's counts those of all who join or are joined; nothing is under way.

        In the block values come from the `others`, who took part before.
        """
        self._runtime.align()
        self.combiner.align()
        for variable in all_tables(self._container_strategy()):
            variable.table.align()
        if self._invariants is not None:
            self._invariants.reset()
        with replaced(self._runtime, "sources", tuple(others)):
            yield

    def agreed_ranks(self, *, known: bool = False) -> tuple[int, ...]:
        """The ranks that take part now, the same on all; every rank must call it, unless they are `known`."""
        if known:
            return tuple(self.exchange.view.ranks)
        return tuple(self._present(b""))

    def own_part(self, batch: Structure, ranks: Sequence[int]) -> list[Structure]:
        """What the local replicas take of a global batch that these ranks divide."""
        own, rank = len(self._devices), self._runtime.exchange.rank
        first = own * ranks.index(rank)
        with tf.device(HOST):
            return [datasets.part_of(first + each, own * len(ranks), batch) for each in range(own)]

    _experimental_distribute_dataset = datasets.distribute_dataset
    _distribute_datasets_from_function = datasets.distribute_datasets_from_function

    def _experimental_distribute_values_from_function(self, value_fn: Function) -> Structure:
        replicas = map(self._get_replica_id_in_sync_group, range(len(self._devices)))
        make = tf.distribute.experimental.ValueContext
        found = [value_fn(make(replica, self._num_replicas_in_sync)) for replica in replicas]
        return distribute_utils.regroup(found, always_wrap=True)

    def _create_variable(self, next_creator: Function, **kwargs: object) -> Variable:
        colocate_with = kwargs.pop("colocate_with", None)
        if colocate_with is not None and not isinstance(colocate_with, values.DistributedVariable):
            return super()._create_variable(next_creator, colocate_with=colocate_with, **kwargs)
        devices = self._devices if colocate_with is None else colocate_with._devices
        if METRICS_ARE_MIRRORED and kwargs.get("aggregation") == tf.VariableAggregation.SUM:
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ

        def components(**kwargs: object) -> list[Variable]:
            made: list[Variable] = []
            # A traced function would initialize them in its first run, which fails with several devices.
            lifted = tf.init_scope() if callable(kwargs["initial_value"]) else contextlib.nullcontext()
            with lifted:
                for replica, device in enumerate(devices):
                    with tf.device(device):
                        kwargs["initial_value"] = self._get_variable_creator_initial_value(
                            replica_id=replica, device=device, primary_var=made[0] if made else None, **kwargs
                        )
                        if replica > 0:
                            kwargs["name"] = f"{made[0].name.split(':')[0]}/replica_{replica}/"
                        made.append(next_creator(**kwargs))
            return made

        policies = distribute_utils.VARIABLE_POLICY_MAPPING
        variable = distribute_utils.create_mirrored_variable(
            self._container_strategy(), components, _VARIABLE_CLASSES, policies, **kwargs
        )
        if isinstance(variable, GatedVariable):
            if isinstance(colocate_with, GatedVariable) and colocate_with.gates and colocate_with.owner is None:
                variable.share_gates(colocate_with)
            elif variable.trainable and variable.dtype in _FLOATING and variable.shape.is_fully_defined():
                variable.make_gates()
                self._runtime.gate_watch.add(variable.gates)
        self.initial_values.created(variable)
        if self._in_eager_step and isinstance(variable, GatedVariable) and tf.executing_eagerly() and self.shards:
            self.initial_values.share_now(variable)  # this very step reads it
        return variable

    def captured(self, constants: Sequence[Captured]) -> None:
        """Gives constants of a model rank 0's values with the variables'."""
        for each in constants:
            self.initial_values.created(each)

    def take_from_first_rank(self, variables: Sequence[Variable]) -> None:
        """Copies rank 0's values of `variables` of this strategy to all ranks; every rank must call it."""
        self.initial_values.share(list(variables))

    def agree_outside_run(self) -> None:
        """Gives new variables rank 0's values where a loop without `run` applies gradients."""
        self._runtime.used = True
        self.initial_values.agree(used=tf.executing_eagerly(), written=self.combiner.written_eagerly())

    @property
    def combines_apart(self) -> bool:
        """Whether replicas' numbers are not combined within a step."""
        return self._reductions.estimates

    def note_local_write(self, variable: Variable) -> None:
        """Notes that a replica writes its component of `variable` without an exchange."""
        graph = ops.get_default_graph()
        # Free: a branch may run on some workers only; what they combine must be the same.
        graph = graph if self.policy.together else control_flow_free(graph)
        inputs = [] if tf.executing_eagerly() else self.scheduler.inputs(graph)
        self.combiner.note_write(variable, graph, inputs)

    def of_first_replica(self, variable: GatedVariable, value: tf.Tensor) -> tf.Tensor:
        """Returns, in a replica function, the first local replica's `value` for `variable`."""
        if len(self._devices) == 1:
            return value
        context = distribute_lib.get_replica_context()
        if not tf.executing_eagerly() and ops.get_default_graph() is not self._replica_graph:
            # In a tf.cond or tf.while_loop, where merge_call is impossible.
            mine = value if context._replica_id == 0 else tf.zeros_like(value)
            return super()._replica_ctx_all_reduce(_SUM, [mine])[0]

        def of_first(strategy: tf.distribute.Strategy, value: Value) -> Value:
            return self._broadcast_to(strategy.experimental_local_results(value)[0], variable)

        with own_losses():
            return context.merge_call(of_first, args=(value,))

    def check(self, token: str) -> None:
        """Raises the error that a gate's token carries, if any."""
        if token:
            raise self._runtime.exchange.failure or from_text(token) or TfpsError(token)

    def picture(self, function: str | None) -> Picture:
        """Returns the picture of the traced function of this name, by default of the last one traced."""
        return picture(self.scheduler.graphs, function, self._runtime)

    def _call_for_each_replica(self, fn: Function, args: Argument, kwargs: Argument) -> Structure:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            if fn not in self._lifted:  # as in MirroredStrategy, the loop over replicas moves inside the function
                python_function = fn.python_function

                def in_replicas(*args: object, **kwargs: object) -> Structure:
                    return self._call_for_each_replica(python_function, args, kwargs)

                self._lifted[fn] = fn._clone(python_function=in_replicas)
            return self._lifted[fn](*args, **kwargs)
        if not self.shards:
            fn = self.sharding.kept_off(fn)
        self._runtime.used = True
        self.initial_values.agree()
        fn = noting_inputs(fn)
        if self.last_batch is not None:
            sum_up = functools.partial(self._replica_ctx_all_reduce, _SUM)
            fn = with_share(fn, self._num_replicas_in_sync, self.last_batch, sum_up)
        if tf.executing_eagerly():
            self._in_eager_step = True
            try:
                with self._runtime.spans.eager_step(), told(self.exchange):
                    result = super()._call_for_each_replica(fn, args, kwargs)
            finally:
                self._in_eager_step = False  # whatever other threads have set
        else:
            graph = ops.get_default_graph()
            if in_xla(graph):
                raise UnsupportedError(
                    "a function that calls strategy.run is compiled by XLA (jit_compile=True): gradients could leave "
                    "only after the whole step; use jit_compile=False for it, and tfps.Config(xla='on'), which has the "
                    "step compiled in parts (docs/xla.md)"
                )
            compiles, begin = self.compiled.wanted(eagerly=False), len(graph.get_operations())
            given = filter(tf.is_symbolic_tensor, tf.nest.flatten((args, kwargs), expand_composites=True))
            self.scheduler.begin_call(graph, [each for each in given if each.graph is graph])
            apart = stateful_apart(graph, self._runtime.exchange.rank if self.shards else 0)
            with replaced(self, "_replica_graph", graph), apart:
                result = super()._call_for_each_replica(fn, args, kwargs)
            sent = self.scheduler.end_call(graph)
            if compiles:
                sends = self.policy.exchanges_gradients
                result = self.compiled.compile(graph, begin, (args, kwargs), sent, result, sends=sends)
        self.initial_values.agree()
        return result

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: Value, options: object = None
    ) -> Structure:
        flat, count = tf.nest.flatten(value), counted()
        if tf.executing_eagerly() and not self.exchange.joining.tries_out:
            self._check_joined("takes a step, or reduces values of all ranks,")
        if len(self._devices) > 1 and tf.executing_eagerly():
            check_one_device(self.policy.setting, 1 if self.policy.together else len(self._devices))
            # In eager mode replica functions run one after the other: only merge_call joins them. It would count an
            # object that all of them share once; copies make each replica contribute it, as in graphs.
            value = tf.nest.pack_sequence_as(value, [identity(count.part(each)) for each in flat])
            reduce = super(mirrored_strategy.MirroredExtended, self)._replica_ctx_all_reduce
            with own_losses():
                return reduce(reduce_op, value, options)
        flat, marks = self._with_marks(flat)
        local, own = flat, [count.part(each) for each in flat]
        replica = distribute_lib.get_replica_context()._replica_id
        key = () if tf.executing_eagerly() else self.scheduler.next_reduction(replica)
        if len(self._devices) > 1:
            local = own = self._sum_locally(own, replica, key, options)
            count = Counted()
        mean = reduce_op == _MEAN and self.changes and not self._reductions.estimates
        if mean:
            summed = self._reductions.means(own, [len(self._devices)] * len(own), key)
        elif self._reductions.estimates:
            local = own = self._reductions.estimated(own)
            summed, count = [identity(each) for each in own], Counted()
        else:
            summed = self._reductions.sum_all(own, key)
            for number, each in enumerate(summed):
                if number in marks:
                    summed[number] = common_rows.merge(each, self._num_replicas_in_sync, marks[number])
                elif is_reducing_gradients() and tf.executing_eagerly() and isinstance(each, tf.IndexedSlices):
                    common_rows.say_if_common(own[number], each, self._num_replicas_in_sync)
        if key and reduce_op == _SUM:
            reduction = Reduction(len(flat), count)
            for number, (gradient, result) in enumerate(zip(local, summed, strict=True)):
                self.scheduler.note_reduced(Reduced(gradient, result, reduction, marks.get(number)))
        if reduce_op == _MEAN and not mean:
            summed = [divide(each, self._num_replicas_in_sync) for each in summed]
        return tf.nest.pack_sequence_as(value, summed)

    def _with_marks(self, gradients: list[Value]) -> tuple[list[Value], dict[int, common_rows.Marks]]:
        """Returns `gradients`, and by place what is marked of them: slices that are to be summed."""
        marks = not self._reductions.estimates and self._num_replicas_in_sync > 1 and is_reducing_gradients()
        share = current_share() if marks else None
        marked = {
            place: found
            for place, each in enumerate(gradients)
            if marks and isinstance(each, tf.IndexedSlices) and (found := common_rows.mark(each, share)) is not None
        }
        flat = [marked[place][0] if place in marked else each for place, each in enumerate(gradients)]
        return flat, {place: found for place, (_, found) in marked.items()}

    def _sum_locally(self, own: list[Value], replica: int, key: tuple[Hashable, ...], options: object) -> list[Value]:
        """Sums `own` over the local replicas, in a graph; IndexedSlices are concatenated."""
        dense = {number: each for number, each in enumerate(own) if not isinstance(each, tf.IndexedSlices)}
        sums = super()._replica_ctx_all_reduce(_SUM, list(dense.values()), options) if dense else []
        summed = dict(zip(dense, sums, strict=True))
        return [
            summed[number] if number in dense else self._local_gather.gather(each, replica, (key[0], number))
            for number, each in enumerate(own)
        ]

    def _replica_ctx_update(
        self, var: Variable, fn: Function, args: tuple[Argument, ...], kwargs: Options, group: bool
    ) -> Structure:
        variable = var if isinstance(var, values.DistributedVariable) else container_of(var)
        if variable is None or variable._distribute_strategy is not self._container_strategy():
            raise UnsupportedError(
                f"variable {getattr(var, 'name', var)!r} was not created under this strategy; build and compile the "
                "model inside `with strategy.scope():`"
            )
        if isinstance(fn, RemoteRule):
            if tf.executing_eagerly() or not self.scheduler.defers(variable, fn, args[0], args[1:]):
                raise UnsupportedError(f"variable {variable.name!r} is updated by pservers: only in a traced step")
            return tf.no_op() if group else None
        if isinstance(variable, GatedVariable):
            variable.note_write()
        may_defer = bool(args) and not kwargs and self.policy.exchanges_gradients
        if may_defer and self.scheduler.defers(variable, fn, args[0], args[1:]):
            return tf.no_op() if group else None
        with updating():
            result = super()._replica_ctx_update(variable, fn, args, kwargs or {}, group)
        if self._invariants is not None and tf.executing_eagerly():
            self._invariants.note_eager(variable, fn, args[1:])
        return result

    def _update(self, var: Variable, fn: Function, args: Argument, kwargs: Argument, group: bool) -> Structure:
        if isinstance(var, GatedVariable):
            var.note_write()
        result = super()._update(var, fn, args, kwargs, group)
        if isinstance(var, GatedVariable):
            var.note_assigned()
        return result

    def update_eagerly(
        self, rule: RemoteRule, variables: Sequence[GatedVariable], gradients: Sequence[Value], scalars: tf.Tensor
    ) -> None:
        """Has pservers update `variables` in eager mode."""
        check_one_device("update='server'", len(self._devices))
        own = [counted().part(each) for each in gradients]
        own = self._reductions.estimated(own) if self._reductions.estimates else own  # as in graphs
        update_eagerly(self._runtime, rule, variables, own, scalars)

    # Reductions and gathers in cross-replica context, outside of replica functions.

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: Value, destinations: Value, options: object
    ) -> Value:
        if distribute_utils.is_mirrored(value):
            if reduce_op == _MEAN:
                return value
            raise ValueError(f"a sum over replicas needs one value per replica, got {value!r}, which all share")
        flat = tf.nest.flatten(value)
        local, counts = [], []  # local sums, and how many values each has
        for each in flat:
            if each is None and reduce_op == _MEAN:
                continue  # kept as is, like in MirroredStrategy
            if isinstance(each, values.DistributedValues):
                local.append(sum_locally(each.values))
                counts.append(len(self._devices))
            elif len(self._devices) == 1 or reduce_op == _MEAN:  # all local replicas have it
                local.append(as_tensor(each))
                counts.append(1)
            else:
                raise ValueError(f"a sum over replicas needs one value per replica, got {each!r}")
        with tf.device(None):
            if reduce_op == _MEAN:
                summed = self._reductions.means(local, counts, self._cross_replica_key())
            else:
                summed = self._reductions.sum_all(local, self._cross_replica_key())
        reduced = iter(summed)
        return tf.nest.pack_sequence_as(
            value, [each if each is None else self._to(next(reduced), destinations) for each in flat]
        )

    def _to(self, value: Value, destinations: Value) -> Value:
        """Copies `value` to every local device if `destinations` has several, as `update` and `all_reduce` expect."""
        if not isinstance(destinations, values.DistributedValues) or len(destinations._values) == 1:
            return value
        copies = []
        for device in self._devices:
            with tf.device(device):
                copies.append(identity(value))
        return distribute_utils.regroup(copies, wrap_class=values.Mirrored)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, pairs: Sequence[tuple[Value, Value]], options: object
    ) -> list[Value]:
        return [self._reduce_to(reduce_op, value, to, options) for value, to in pairs]

    def _gather_to_implementation(self, value: Value, destinations: Value, axis: Value, options: object) -> Value:
        components = value.values if isinstance(value, values.DistributedValues) else [value]
        with tf.device(None):
            local = [as_tensor(each) for each in components]
            gathered = self._reductions.gather(local, axis, self._cross_replica_key())
        return self._to(gathered, destinations)

    def _cross_replica_key(self) -> tuple[Hashable, ...]:
        self._runtime.used = True
        self._check_joined("reduces or gathers values of all ranks")
        return () if tf.executing_eagerly() else self.scheduler.next_reduction("cross-replica")

    def _check_joined(self, does: str) -> None:
        if self.exchange.joining.pending:
            raise JoinError.because(
                f"the program {does} before the fit that the others are in, and they have done so without it"
            )

    def _local_results(self, val: Value) -> tuple[Value, ...]:
        return val.values if isinstance(val, GatedVariable) else super()._local_results(val)


@contextlib.contextmanager
def told(exchange: Exchange) -> Iterator[None]:
    """Raises in a `SystemError`'s place why `exchange` has failed.

    A tape asks in C for the handle of a variable that is read. What is raised there becomes "SystemError:
    TFE_Py_TapeVariableAccessed returned a result with an exception set", and Keras' layers drop its cause.
    """
    try:
        yield
    except SystemError as error:
        if exchange.failure is None:
            raise
        raise exchange.failure from error
