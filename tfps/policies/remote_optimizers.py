"""Keras' optimizers whose rule runs on pservers (`update="server"`): their slots stay there, gradients go there.

What differs from step to step goes along as the step's scalars, computed with the same operations as in each
optimizer's `update_step`, for the same bits.

Tested in tests/integration/test_remote_updates.py.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import AVERAGE, SLOTS, UpdateSpec
from tfps.graph import ops as graph_ops
from tfps.graph.patches import Patch, replaced, scope_outside
from tfps.graph.unique_rows import made_unique
from tfps.keras_hooks.keras_private import decays, product_of_momentums, strategy_of_optimizer, trained_variables
from tfps.keras_hooks.variables import RemoteVariable, check_variable, of_tensorflow
from tfps.runtime.remote import RULES, RemoteParameter, RemoteRule, RemoteSlot, RemoteUpdate, bring, pieces_of
from tfps.runtime.runtime import Runtime
from tfps.runtime.transfers import DeferredUpdate, Group
from tfps.types import Argument, Callback, Function, Optimizer, Structure, Value, Variable
from tfps.updates.names import common_name, own_name
from tfps.updates.pending import PendingUpdate, PlannedBucket, split
from tfps.updates.variables import GatedVariable


class RemoteBucket(PlannedBucket):
    """A bucket of variables that pservers update by one rule; the argument of its updates is the step's scalars.

    With a codec it gets changes of the parameters. All ranks add the same, but what one of them had changed by itself
    would stay, so weights are compared; without a codec they are replaced. Trained variables that have a global copy
    then begin from that.
    """

    remote = True

    def __init__(self, updates: Sequence[PendingUpdate], graph: tf.Graph, replica: int, order: dict[str, int]) -> None:
        super().__init__(updates, graph, replica, order)
        self.rule = rule = cast(RemoteRule, updates[0].function)
        self.spec = dataclasses.replace(self.spec, update=rule.spec(self.variables))
        self.held = [each.shared for each in self.variables]  # what pservers keep
        self.key = (*self.key, rule.number, self.spec.update)
        self._policy = self.strategy.extended.policy
        # Whether the reply is a change of the parameters, not the parameters.
        self.comparable = self._changes = self.spec.codec is not None and self._policy.gets_changes

    def transfer(self, number: int, messages: int, group: Group, runtime: Runtime) -> DeferredUpdate:
        pieces, apart = pieces_of(self.held, self.rule), self._policy.hands_out
        brings = functools.partial(bring, runtime.exchange, number, pieces, ahead=self._changes, apart=apart)
        return RemoteUpdate(number, self.spec, messages, group, brings, weakref.WeakMethod(self.rule.replied))

    def _update(self, data: tf.Tensor, indices: tf.Tensor, *weigh: tf.Tensor) -> tf.Tensor:
        written: list[list[tf.Operation]] = []
        for variable, held, value in zip(self.variables, self.held, _values(data, self.held), strict=True):
            component, own = held._values[self.replica], variable._values[self.replica]
            with tf.device(component.device):
                write = component.assign_add if self._changes else component.assign
                operations = [write(value, read_value=False)]
            if own is not component:
                with tf.device(own.device), tf.control_dependencies(operations):
                    operations.append(own.assign(component.read_value(), read_value=False))
            written.append(operations)
        return self._end(written, *weigh)

    def _payload(self, gradients: list[Value]) -> tuple[tf.Tensor, tf.Tensor | None]:
        data, _ = super()._payload(gradients)
        return data, graph_ops.to_bytes(self.updates[0].arguments[0])


def update_eagerly(
    runtime: Runtime,
    rule: RemoteRule,
    variables: Sequence[GatedVariable],
    gradients: Sequence[Value],
    scalars: tf.Tensor,
) -> None:
    """Pushes float32 `gradients`, dense and as they are, waits for the new parameters and assigns them."""
    update = rule.spec(variables)
    nbytes = sum(4 * int(variable.shape.num_elements()) for variable in variables)
    names, alike = tuple(map(own_name, variables)), tuple(map(common_name, variables))
    spec = BucketSpec(names, "sum", nbytes, "float32", 0, alike=alike, update=update)
    key = ("update", "eager", rule.number, update, *(variable._unique_id for variable in variables))
    (bucket,) = runtime.buckets([(key, spec)])
    for variable in variables:
        variable.wait()
    pieces = pieces_of(variables, rule)
    apart = variables[0].distribute_strategy.extended.policy.hands_out
    packed = bring(runtime.exchange, bucket, pieces, scalars.numpy().tolist(), apart=apart)
    payload = np.concatenate([np.asarray(each.numpy(), np.float32).reshape(-1) for each in gradients])
    reply = runtime.exchange_now(bucket, payload, step_scalars=packed)
    for variable, value in zip(variables, _values(graph_ops.tensor_of(reply.sum), variables), strict=True):
        variable._values[0].assign(value)


def _values(data: tf.Tensor, variables: Sequence[GatedVariable]) -> list[tf.Tensor]:
    pieces = split(data, tf.float32, variables)
    return [tf.reshape(piece, variable.shape) for piece, variable in zip(pieces, variables, strict=True)]


_INSTEAD = "use update='worker' (tfps.Config, the default)"
_remote: weakref.WeakKeyDictionary[Optimizer, RemoteOptimizer] = weakref.WeakKeyDictionary()
ops = keras.ops


class Reading(NamedTuple):
    """How pservers update for one class of Keras' optimizers."""

    rule: str  # as in tfps.exchange.update_spec
    constants: dict[str, str]  # name -> the optimizer's attribute
    # Returns a step's scalars from the optimizer and the learning rate, float32.
    scalars: Callable[[Optimizer, tf.Tensor], list[Value]] = lambda optimizer, lr: []


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _power(optimizer: Optimizer, beta: float, ahead: int = 1) -> Value:
    """beta ** (iterations + ahead)"""
    return ops.power(ops.cast(beta, "float32"), ops.cast(optimizer.iterations + ahead, "float32"))


def _of_adam(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    return [lr * ops.sqrt(1 - _power(optimizer, optimizer.beta_2)) / (1 - _power(optimizer, optimizer.beta_1))]


def _of_adamax(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    return [1 - _power(optimizer, optimizer.beta_1)]


def _of_nadam(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    beta_1 = ops.cast(optimizer.beta_1, "float32")
    u_t, u_t_1 = (beta_1 * (1.0 - 0.5 * _power(optimizer, 0.96, ahead)) for ahead in (1, 2))
    u_product_t = ops.cast(product_of_momentums(optimizer), "float32")
    return [u_t_1, 1 - u_product_t * u_t_1, 1 - u_t, 1 - u_product_t, 1 - _power(optimizer, optimizer.beta_2)]


def _of_ftrl(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    return [2 * (optimizer.l2_regularization_strength + optimizer.beta / (2.0 * lr))]


_BETAS = _same("beta_1", "beta_2", "epsilon")
_FTRL = {"l1": "l1_regularization_strength", "l2_shrinkage": "l2_shrinkage_regularization_strength"}
READINGS: dict[type[Optimizer], Reading] = {
    keras.optimizers.SGD: Reading("sgd", _same("momentum", "nesterov")),
    keras.optimizers.Adam: Reading("adam", _BETAS, _of_adam),
    keras.optimizers.AdamW: Reading("adam", _BETAS, _of_adam),
    keras.optimizers.Adamax: Reading("adamax", _BETAS, _of_adamax),
    keras.optimizers.Nadam: Reading("nadam", _BETAS, _of_nadam),
    keras.optimizers.RMSprop: Reading("rmsprop", _same("rho", "momentum", "epsilon")),
    keras.optimizers.Adagrad: Reading("adagrad", _same("epsilon")),
    keras.optimizers.Adadelta: Reading("adadelta", _same("rho", "epsilon")),
    keras.optimizers.Ftrl: Reading("ftrl", _FTRL, _of_ftrl),
    keras.optimizers.Lion: Reading("lion", _same("beta_1", "beta_2")),
}


def reading_of(
    optimizer: Optimizer, readings: Mapping[type[Optimizer], Reading], who_knows: str, instead: str
) -> Reading:
    """How pservers update for `optimizer`, by one of `readings`.

    Raises:
        UnsupportedError: it has no such rule; says what to do `instead`.
    """
    kind = type(optimizer)
    if kind not in readings or "update_step" in vars(optimizer):
        known = ", ".join(each.__name__ for each in readings)
        raise UnsupportedError(
            f"{who_knows} the rules of Keras' {known}, not of {kind.__module__}.{kind.__name__}, nor of classes "
            f"derived from these; {instead}"
        )
    if kind is keras.optimizers.Ftrl and optimizer.learning_rate_power != -0.5:
        raise UnsupportedError(
            f"{who_knows} Ftrl with learning_rate_power=-0.5, its default, got {optimizer.learning_rate_power}; "
            f"{instead}"
        )
    return readings[kind]


def constants_of(optimizer: Optimizer, reading: Reading, *, decays: bool) -> tuple[tuple[str, float], ...]:
    """The constants of its rule, as in `UpdateSpec`; `decays`: with its weight decay."""
    names = {**reading.constants, **(_same("weight_decay") if decays else {})}
    return tuple((name, float(getattr(optimizer, own))) for name, own in names.items())


def step_scalars(optimizer: Optimizer, reading: Reading, learning_rate: Value) -> tf.Tensor:
    """The scalars of a step, in the order of `UpdateSpec.numbers`, float64 [count]; computed where this is called."""
    lr = ops.cast(learning_rate, "float32")
    found = [lr, *reading.scalars(optimizer, lr)]
    if optimizer.use_ema:
        begun = ops.cast(ops.not_equal(optimizer.iterations, 0), "float32")
        found.append(ops.multiply(begun, optimizer.ema_momentum))
        every = optimizer.ema_overwrite_frequency
        found.append(ops.equal((optimizer.iterations + 1) % every, 0) if every else False)
    iteration = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float64)
    return tf.stack([iteration, *(tf.cast(tf.convert_to_tensor(each), tf.float64) for each in found)])


class _Making(threading.local):
    make_slot: Function | None = None  # makes the slot that an optimizer creates on this thread


_making = _Making()


class RemoteOptimizer(RemoteRule):
    """What is known of an optimizer whose rule runs on pservers; `variables` are TensorFlow's."""

    bucket = RemoteBucket

    def __init__(self, optimizer: Optimizer, strategy: tf.distribute.Strategy, variables: Sequence[Variable]) -> None:
        self.number = next(RULES)
        self._optimizer, self.strategy = weakref.ref(optimizer), strategy
        self._reading = READINGS[type(optimizer)]
        self._slots: dict[str, dict[str, RemoteSlot]] = {}  # by variable and name
        for variable in variables:
            variable.remote = variable.remote or RemoteParameter()
            strategy.extended.policy.note_remote(variable)

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer()

    def make_slot(self, variable: Variable, name: str, path: str, shape: tuple[int, ...], initial: float) -> RemoteSlot:
        slot = RemoteSlot(path, self.strategy.extended.exchange, variable.wait, shape, initial)
        self._slots.setdefault(variable._unique_id, {})[name] = slot
        variable.remote.slots.append(slot)
        return slot

    def slots(self, variable: Variable) -> Sequence[RemoteSlot]:
        return list(self._slots.get(variable._unique_id, {}).values())

    def overwrite(self, variables: Sequence[Variable]) -> None:
        """Assigns the moving averages when training ends; within a step pservers do it."""
        context = tf.distribute.get_replica_context()
        if context is not None and context.strategy is self.strategy:
            return
        for variable in variables:
            if (average := self._slots.get(of_tensorflow(variable)._unique_id, {}).get(AVERAGE)) is not None:
                variable.assign(average.read())

    def spec(self, variables: Sequence[Variable]) -> UpdateSpec:
        optimizer = self.optimizer
        decayed = [optimizer.weight_decay is not None and decays(optimizer, variable) for variable in variables]
        slots = self._slots.get(variables[0]._unique_id, {})
        if not slots.keys() >= set(SLOTS.get(self._reading.rule, ())):  # Adagrad and Ftrl of Keras 3.8
            raise UnsupportedError(
                f"update='server' does not know the slots of {type(optimizer).__name__} of Keras {keras.__version__}, "
                f"only {sorted(slots)}; pip install -U keras, or {_INSTEAD}"
            )
        return UpdateSpec(
            self._reading.rule,
            constants_of(optimizer, self._reading, decays=any(decayed)),
            tuple((name, slot.initial) for name, slot in slots.items()),
            tuple(int(variable.shape.num_elements()) for variable in variables),
            tuple(decayed),
        )

    def update(self, gradients: Sequence[Value], variables: Sequence[Variable], learning_rate: Value) -> None:
        """Sends this replica's gradients, in a replica function."""
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self.strategy:
            raise UnsupportedError(
                "with update='server' an optimizer's gradients must be applied in a replica function: call its `apply` "
                f"within strategy.run, or {_INSTEAD}"
            )
        optimizer, variables = self.optimizer, [of_tensorflow(each) for each in variables]
        if optimizer.use_ema and len(variables) < len(trained_variables(optimizer)):
            raise UnsupportedError(
                "use_ema with update='server' needs a gradient for every variable of the optimizer in each step, got "
                f"{len(variables)} for {len(trained_variables(optimizer))}; {_INSTEAD}"
            )
        dense = [self._dense(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
        scalars = step_scalars(optimizer, self._reading, learning_rate)
        if tf.executing_eagerly():
            self.strategy.extended.update_eagerly(self, variables, dense, scalars)
            return
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, dense)
        for variable, gradient in zip(variables, reduced, strict=True):
            self.strategy.extended._replica_ctx_update(variable, self, (gradient, scalars), {}, False)

    def _dense(self, gradient: Value, variable: Variable) -> tf.Tensor:
        """`gradient` as pservers take it: float32, all rows."""
        if isinstance(gradient, tf.IndexedSlices):
            # Else rows may be added up first.
            if self._reading.rule not in ("sgd", "lion") and not made_unique(gradient.indices):
                raise UnsupportedError(
                    f"variable {variable.name!r} has a sparse gradient (IndexedSlices, as of an embedding), whose rows "
                    f"{type(self.optimizer).__name__} of Keras squares one by one: update='server' takes sparse "
                    f"gradients with SGD and Lion only, or where a lookup takes each id once (tf.unique); {_INSTEAD}"
                )
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
        gradient = tf.cast(gradient, tf.float32)
        return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, variable.shape)


def update_on_pservers(optimizer: Optimizer, variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> None:
    """Makes pservers of `strategy` update `variables`, of TensorFlow or Keras, which `optimizer` is built for."""
    if optimizer in _remote or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return  # loss scaling stays here; what it wraps is built by itself
    reading_of(optimizer, READINGS, "update='server' knows", f"take one of them, or {_INSTEAD}")
    if optimizer.use_ema and optimizer.gradient_accumulation_steps:
        raise UnsupportedError(
            "update='server' does not go with both use_ema and gradient_accumulation_steps: Keras averages in steps "
            f"that send nothing, too; leave out one of them, or {_INSTEAD}"
        )
    for variable in variables:
        why = ""
        if getattr(variable, "constraint", None) is not None:
            why = "has a constraint, which only workers apply"
        elif getattr(of_tensorflow(variable), "written_in_graph", False):
            why = "is assigned within a function"
        check_variable(variable, "update='server'", "update", _INSTEAD, why)
    _remote[optimizer] = RemoteOptimizer(optimizer, strategy, [of_tensorflow(each) for each in variables])


def _instead(remote: Function, original: Function) -> Function:
    """Wraps a method of optimizers: those that are remote call `remote`."""

    def method(self: Optimizer, *arguments: object, **options: object) -> Structure:
        known = _remote.get(self)
        if known is None:
            return original(self, *arguments, **options)
        return remote(known, *arguments, **options)

    return method


def _averages(on_values: Function, original: Function) -> Function:
    """Wraps a method of a callback that assigns averages: those on pservers are assigned as `on_values` does."""

    def method(self: Callback, optimizer: Optimizer) -> None:
        (on_values if optimizer in _remote else original)(self, optimizer)

    return method


def _slot_from_reference(original: Function) -> Function:
    def add_variable_from_reference(
        self: Optimizer, reference_variable: Variable, name: str | None = None, *arguments: object, **options: object
    ) -> Variable:
        make, remote = None, _remote.get(self)
        if remote is not None and name != "gradient_accumulator":
            make = functools.partial(remote.make_slot, of_tensorflow(reference_variable), name or "var")
        # In the scope, as TensorFlow wants, wherever `build` is called.
        with scope_outside(strategy_of_optimizer(self)), replaced(_making, "make_slot", make):
            return original(self, reference_variable, name, *arguments, **options)

    return add_variable_from_reference


def _slot(original: Function) -> Function:
    def add_variable(self: Optimizer, *arguments: object, **options: Argument) -> Variable:
        if (make := _making.make_slot) is None:
            return original(self, *arguments, **options)
        settings = {"trainable": False, "aggregation": "none", "initializer": "zeros", **options}
        settings.pop("layout", None)
        with keras.name_scope(self.name, caller=self):
            slot = RemoteVariable(make, **settings)
        self._track_variable(slot)
        return slot

    return add_variable


_OPTIMIZER, _SWAP = keras.optimizers.Optimizer, keras.callbacks.SwapEMAWeights
_UPDATE = functools.partial(_instead, RemoteOptimizer.update)
_OVERWRITE = functools.partial(_instead, RemoteOptimizer.overwrite)
_NOTHING = functools.partial(_instead, lambda *_: None)
_SWAPPED = functools.partial(_averages, _SWAP._backend_swap_variables)
_FINALIZED = functools.partial(_averages, _SWAP._backend_finalize_ema_values)
_SENDS = "sends gradients to pservers, which update (`update='server'`)"
_DONE = "nothing where pservers update: they do it"
_ASSIGN = "assigns averages that live on pservers: Keras would compute with them on each device"
_AT_END = "assigns averages that live on pservers, when training ends"
_IN_SCOPE = "makes slots in the scope, or on pservers where these update"
_TESTS = "tests/integration/test_remote_updates.py"
PATCHES = (
    Patch(_OPTIMIZER, "_backend_update_step", _UPDATE, _SENDS, _TESTS),
    Patch(_OPTIMIZER, "_apply_weight_decay", _NOTHING, _DONE, _TESTS),
    Patch(_OPTIMIZER, "_update_model_variables_moving_average", _NOTHING, _DONE, _TESTS),
    Patch(_OPTIMIZER, "_overwrite_model_variables_with_average_value", _OVERWRITE, _AT_END, _TESTS),
    Patch(_OPTIMIZER, "add_variable_from_reference", _slot_from_reference, _IN_SCOPE, _TESTS),
    Patch(_OPTIMIZER, "add_variable", _slot, "makes these slots", _TESTS),
    Patch(_SWAP, "_tf_swap_variables", _SWAPPED, _ASSIGN, _TESTS),
    Patch(_SWAP, "_tf_finalize_ema_values", _FINALIZED, _ASSIGN, _TESTS),
)
