"""Keras' optimizers whose rule runs on pservers (`update="server"`): their slots stay there, gradients go there.

An optimizer is looked at when it is built. From then on its methods that would update variables here send instead, and
those that pservers do with the update (weight decay, moving average) do nothing.

Tested in tests/integration/test_remote_updates.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.exchange.update_spec import AVERAGE, SLOTS, UpdateSpec
from tfps.graph.patches import Patch
from tfps.keras_hooks.keras_private import decays, trained_variables
from tfps.keras_hooks.variables import RemoteVariable, check_variable, of_tensorflow
from tfps.policies.update_rules import READINGS, step_numbers
from tfps.runtime.remote import RULES, RemoteParameter, RemoteRule, RemoteSlot
from tfps.types import Argument, Callback, Function, Optimizer, Structure, Value, Variable

_INSTEAD = "use update='worker' (tfps.Config, the default)"
_remote: weakref.WeakKeyDictionary[Optimizer, RemoteOptimizer] = weakref.WeakKeyDictionary()


class _Making(threading.local):
    """The optimizer that creates slots on this thread, the variable they are for, and their name."""

    current: tuple[RemoteOptimizer, Variable, str] | None = None


_making = _Making()


class RemoteOptimizer(RemoteRule):
    """What is known of an optimizer whose rule runs on pservers.

    Args:
        variables: of TensorFlow, which it updates.

    Raises:
        UnsupportedError: pservers cannot do what it does; the message says what and what to do.
    """

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
        """Makes the slot `name` of `variable`."""
        slot = RemoteSlot(path, self.strategy.extended.exchange, variable.wait, shape, initial)
        self._slots.setdefault(variable._unique_id, {})[name] = slot
        return slot

    def slots(self, variable: Variable) -> Sequence[RemoteSlot]:
        return list(self._slots.get(variable._unique_id, {}).values())

    def average(self, variable: Variable) -> RemoteSlot | None:
        """The moving average of `variable`, if it is one of this optimizer's."""
        return self._slots.get(variable._unique_id, {}).get(AVERAGE)

    def spec(self, variables: Sequence[Variable]) -> UpdateSpec:
        optimizer = self.optimizer
        constants = {name: float(getattr(optimizer, own)) for name, own in self._reading.constants.items()}
        decayed = [optimizer.weight_decay is not None and decays(optimizer, variable) for variable in variables]
        if any(decayed):
            constants["weight_decay"] = float(optimizer.weight_decay)
        slots = self._slots.get(variables[0]._unique_id, {})
        if not slots.keys() >= set(SLOTS.get(self._reading.rule, ())):  # Adagrad and Ftrl of Keras 3.8
            raise UnsupportedError(
                f"update='server' does not know the slots of {type(optimizer).__name__} of Keras {keras.__version__}, "
                f"only {sorted(slots)}; pip install -U keras, or {_INSTEAD}"
            )
        return UpdateSpec(
            self._reading.rule,
            tuple(constants.items()),
            tuple((name, slot.initial) for name, slot in slots.items()),
            tuple(int(variable.shape.num_elements()) for variable in variables),
            tuple(decayed),
        )

    def update(self, gradients: Sequence[Value], variables: Sequence[Variable], learning_rate: Value) -> None:
        """Sends this replica's gradients, in a replica function.

        Raises:
            UnsupportedError: it is none, or something does not go together.
        """
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
        numbers = step_numbers(optimizer, self._reading, learning_rate)
        if tf.executing_eagerly():
            self.strategy.extended.update_eagerly(self, variables, dense, numbers)
            return
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, dense)
        for variable, gradient in zip(variables, reduced, strict=True):
            self.strategy.extended._replica_ctx_update(variable, self, (gradient, numbers), {}, False)

    def _dense(self, gradient: Value, variable: Variable) -> tf.Tensor:
        """`gradient` as pservers take it: float32, all rows.

        Raises:
            UnsupportedError: it is sparse, and the rule would see sums of rows where in Keras it sees each row.
        """
        if isinstance(gradient, tf.IndexedSlices):
            if not self._reading.linear:
                raise UnsupportedError(
                    f"variable {variable.name!r} has a sparse gradient (IndexedSlices, as of an embedding), whose rows "
                    f"{type(self.optimizer).__name__} of Keras squares one by one: update='server' takes sparse "
                    f"gradients with SGD and Lion only; {_INSTEAD}"
                )
            gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
        gradient = tf.cast(gradient, tf.float32)
        return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, variable.shape)


def update_on_pservers(optimizer: Optimizer, variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> None:
    """Makes pservers of `strategy` update `variables`, of TensorFlow or Keras, when it is built for them.

    Raises:
        UnsupportedError: pservers cannot do what it does; the message says what and what to do.
    """
    if optimizer in _remote or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return  # loss scaling stays here; what it wraps is built by itself
    _check(optimizer)
    for variable in variables:
        _check_variable(variable)
    _remote[optimizer] = RemoteOptimizer(optimizer, strategy, [of_tensorflow(each) for each in variables])


def _check(optimizer: Optimizer) -> None:
    known = ", ".join(kind.__name__ for kind in READINGS)
    kind = type(optimizer)
    if kind not in READINGS or "update_step" in vars(optimizer):
        raise UnsupportedError(
            f"update='server' knows the rules of Keras' {known}, not of {kind.__module__}.{kind.__name__}, nor of "
            f"classes derived from these; take one of them, or {_INSTEAD}"
        )
    if kind is keras.optimizers.Ftrl and optimizer.learning_rate_power != -0.5:
        raise UnsupportedError(
            "update='server' knows Ftrl with learning_rate_power=-0.5, its default, got "
            f"{optimizer.learning_rate_power}; {_INSTEAD}"
        )
    if optimizer.use_ema and optimizer.gradient_accumulation_steps:
        raise UnsupportedError(
            "update='server' does not go with both use_ema and gradient_accumulation_steps: Keras averages in steps "
            f"that send nothing, too; leave out one of them, or {_INSTEAD}"
        )


def _check_variable(variable: Variable) -> None:
    why = ""
    if getattr(variable, "constraint", None) is not None:
        why = "has a constraint, which only workers apply"
    elif getattr(of_tensorflow(variable), "written_in_graph", False):
        why = "is assigned within a function"
    check_variable(variable, "update='server'", "update", _INSTEAD, why)


def _instead(remote: Function, original: Function) -> Function:
    """Wraps a method of optimizers: those that are remote call `remote`."""

    def method(self: Optimizer, *arguments: object, **options: object) -> Structure:
        known = _remote.get(self)
        if known is None:
            return original(self, *arguments, **options)
        return remote(known, *arguments, **options)

    return method


def _nothing(remote: RemoteOptimizer, *_: object) -> None:
    """Pservers do it."""


def _overwrite(remote: RemoteOptimizer, variables: Sequence[Variable]) -> None:
    """Assigns the averages when training ends; within a step pservers do it."""
    context = tf.distribute.get_replica_context()
    if context is not None and context.strategy is remote.strategy:
        return
    for variable in variables:
        if (average := remote.average(of_tensorflow(variable))) is not None:
            variable.assign(average.read())


def _swap(original: Function) -> Function:
    def swap_variables(self: Callback, optimizer: Optimizer) -> None:
        (self._backend_swap_variables if optimizer in _remote else functools.partial(original, self))(optimizer)

    return swap_variables


def _finalize(original: Function) -> Function:
    def finalize_values(self: Callback, optimizer: Optimizer) -> None:
        (self._backend_finalize_ema_values if optimizer in _remote else functools.partial(original, self))(optimizer)

    return finalize_values


def _slot_from_reference(original: Function) -> Function:
    def add_variable_from_reference(
        self: Optimizer, reference_variable: Variable, name: str | None = None, *arguments: object, **options: object
    ) -> Variable:
        remote = _remote.get(self)
        if remote is None or name == "gradient_accumulator":
            return original(self, reference_variable, name, *arguments, **options)
        _making.current = remote, of_tensorflow(reference_variable), name or "var"
        try:
            return original(self, reference_variable, name, *arguments, **options)
        finally:
            _making.current = None

    return add_variable_from_reference


def _slot(original: Function) -> Function:
    def add_variable(self: Optimizer, *arguments: object, **options: Argument) -> Variable:
        if _making.current is None:
            return original(self, *arguments, **options)
        remote, variable, name = _making.current
        wanted = {"trainable": False, "aggregation": "none", "initializer": "zeros", **options}
        wanted.pop("layout", None)
        with keras.name_scope(self.name, caller=self):
            slot = RemoteVariable(functools.partial(remote.make_slot, variable, name), **wanted)
        self._track_variable(slot)
        return slot

    return add_variable


_REMOTE = "tests/integration/test_remote_updates.py"
_OPTIMIZER, _SWAP = keras.optimizers.Optimizer, keras.callbacks.SwapEMAWeights
_ASSIGN = "assigns averages that live on pservers: Keras would compute with them on each device"
PATCHES = (
    Patch(
        _OPTIMIZER,
        "_backend_update_step",
        functools.partial(_instead, RemoteOptimizer.update),
        "sends gradients to pservers, which update (`update='server'`)",
        _REMOTE,
    ),
    Patch(
        _OPTIMIZER,
        "_apply_weight_decay",
        functools.partial(_instead, _nothing),
        "nothing where pservers update: they do it",
        _REMOTE,
    ),
    Patch(
        _OPTIMIZER,
        "_update_model_variables_moving_average",
        functools.partial(_instead, _nothing),
        "nothing where pservers update: they do it",
        _REMOTE,
    ),
    Patch(
        _OPTIMIZER,
        "_overwrite_model_variables_with_average_value",
        functools.partial(_instead, _overwrite),
        "assigns averages that live on pservers, when training ends",
        _REMOTE,
    ),
    Patch(
        _OPTIMIZER,
        "add_variable_from_reference",
        _slot_from_reference,
        "makes slots that live on pservers where these update",
        _REMOTE,
    ),
    Patch(_OPTIMIZER, "add_variable", _slot, "makes these slots", _REMOTE),
    Patch(_SWAP, "_tf_swap_variables", _swap, _ASSIGN, _REMOTE),
    Patch(_SWAP, "_tf_finalize_ema_values", _finalize, _ASSIGN, _REMOTE),
)
