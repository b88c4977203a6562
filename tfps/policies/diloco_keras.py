"""Modes in which workers train alone: Keras counts their steps, and evaluates and saves global parameters.

Tested in tests/policies/test_outer.py, tests/policies/test_outer_refusals.py and tests/integration/test_local.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.keras_hooks.exchanged_variable import check_variable, of_tensorflow
from tfps.keras_hooks.keras_private import legacy_h5_format, saving_lib, trained_variables
from tfps.policies.diloco_state import OuterState, back_up_outer_state
from tfps.policies.outer_optimizer import OuterOptimizer
from tfps.types import Argument, Callback, Function, Logs, Model, Optimizer, Structure, Variable

_INSTEAD = "use mode='sync' (tfps.Config, the default)"
# They compute weights anew from slots. Not all versions of Keras have all of them.
_WEIGHTS_IN_SLOTS = ("Ftrl", "ScheduleFreeAdamW")

_known: weakref.WeakKeyDictionary[Optimizer, OuterOptimizer] = weakref.WeakKeyDictionary()


class Builds(Protocol):
    """The policy that workers train alone by; see diloco.py."""

    setting: str

    def build(self, variables: Sequence[Variable], optimizer: str) -> OuterOptimizer:
        """Returns the outer optimizer of an optimizer with this name."""


class _Applying(threading.local):
    """How many calls of `apply` this thread is in: an optimizer may wrap another."""

    depth = 0


_applying = _Applying()


def train_alone(optimizer: Optimizer, variables: Sequence[Variable], policy: Builds) -> None:
    """Makes workers exchange `variables`, of TensorFlow or Keras, which `optimizer` is built for.

    Raises:
        UnsupportedError: that is impossible; the message says why and what to do.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _known[optimizer] = _known[optimizer.inner_optimizer]  # built before
        return
    _check_optimizer(optimizer, policy.setting)
    for variable in variables:
        constrained = getattr(variable, "constraint", None) is not None
        why = "has a constraint, which the mean of workers' parameters need not fulfil" if constrained else ""
        check_variable(variable, policy.setting, "average", _INSTEAD, why)
    known = _known.get(optimizer)
    updated = [of_tensorflow(variable) for variable in variables]
    if known is None or list(map(id, known.variables)) != list(map(id, updated)):
        _known[optimizer] = policy.build(updated, type(optimizer).__name__)
        optimizer.tfps_outer = OuterState(_known[optimizer])  # Keras tracks it as it tracks variables


def _check_optimizer(optimizer: Optimizer, setting: str) -> None:
    name = type(optimizer).__name__
    if optimizer.use_ema:
        raise UnsupportedError(
            f"use_ema with {setting} would average each worker's own parameters, not the global ones that are "
            f"evaluated and saved; leave it out, or {_INSTEAD}"
        )
    if _is_a(optimizer, *_WEIGHTS_IN_SLOTS):
        raise UnsupportedError(
            f"{name} with {setting}: it computes weights anew from its slots, which workers do not exchange, and so "
            f"would undo each exchange; take another optimizer, such as Adam, or {_INSTEAD}"
        )
    if _is_a(optimizer, "MultiOptimizer"):
        raise UnsupportedError(
            f"{name} with {setting}: backups and checkpoints would lack the outer state of the optimizers within; "
            f"compile the model with one optimizer, or {_INSTEAD}"
        )


def _is_a(optimizer: Optimizer, *names: str) -> bool:
    """Whether `optimizer` is of one of Keras' classes with these names, as far as this Keras has them."""
    kinds = (getattr(keras.optimizers, name, None) for name in names)
    return any(kind is not None and isinstance(optimizer, kind) for kind in kinds)


@functools.cache
def exchange_between_steps(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Wraps methods of Keras, for models of a `strategy_class` in these modes; done once per process."""

    def strategy_of(model: Model) -> tf.distribute.Strategy | None:
        """The strategy of `model` if its workers train alone, else None."""
        strategy = getattr(model, "distribute_strategy", None)
        return strategy if isinstance(strategy, strategy_class) and strategy.extended.policy.keeps_global else None

    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        kind.apply = _counted(kind.apply)
    epoch_logs = keras.Model._get_metrics_result_or_logs

    @functools.wraps(epoch_logs)
    def get_metrics_result_or_logs(self: Model, logs: Logs) -> Logs:
        if (strategy := strategy_of(self)) is not None and not strategy.extended.policy.shows_global:
            strategy.extended.policy.meet()  # before all else that ranks do together at the end of an epoch
        return epoch_logs(self, logs)

    keras.Model._get_metrics_result_or_logs = get_metrics_result_or_logs
    callbacks = keras.callbacks.CallbackList
    end = callbacks.on_train_end

    @functools.wraps(end)
    def on_train_end(self: Callback, logs: Logs | None = None) -> None:
        if (strategy := strategy_of(self.model)) is not None:
            strategy.extended.policy.synchronize()
            strategy.extended.compressing.collect()  # ending the round has sent more: one rank may save from here on
        end(self, logs)

    callbacks.on_train_end = on_train_end

    def with_global(original: Function) -> Function:
        @functools.wraps(original)
        def method(self: Model, *arguments: object, **options: object) -> Structure:
            strategy = strategy_of(self)
            if strategy is None:
                return original(self, *arguments, **options)
            if original.__name__ == "evaluate" and not options.get("_use_cached_eval_dataset"):  # not in `fit`
                strategy.extended.policy.meet()
            with strategy.extended.policy.shown_parameters():
                return original(self, *arguments, **options)

        return method

    model = keras.Model
    model.evaluate, model.test_on_batch = with_global(model.evaluate), with_global(model.test_on_batch)
    model.predict, model.predict_on_batch = with_global(model.predict), with_global(model.predict_on_batch)
    model.save, model.save_weights = with_global(model.save), with_global(model.save_weights)
    model.export = with_global(model.export)
    # What `keras.saving.save_model`, `save_weights` and pickling call, however the program has imported them.
    saving_lib.save_model = with_global(saving_lib.save_model)
    saving_lib.save_weights_only = with_global(saving_lib.save_weights_only)
    saving_lib._save_model_to_fileobj = with_global(saving_lib._save_model_to_fileobj)
    legacy_h5_format.save_model_to_hdf5 = with_global(legacy_h5_format.save_model_to_hdf5)
    serialize = keras.Variable._serialize_to_tensors

    @functools.wraps(serialize)
    def serialize_to_tensors(self: Variable) -> dict[str, tf.Tensor]:
        shared = getattr(self.value, "global_copy", None)  # what a checkpoint has in its place
        return serialize(self) if shared is None else {"VARIABLE_VALUE": shared.read_value()}

    keras.Variable._serialize_to_tensors = serialize_to_tensors
    _save_at_epochs(strategy_of)
    _keep_global_weights(strategy_of)
    back_up_outer_state(strategy_of, _known.get)


def _counted(original: Function) -> Function:
    """Makes `apply` of an optimizer whose variables are exchanged count a step, if no other optimizer has called it."""

    @functools.wraps(original)
    def apply(
        self: Optimizer, grads: Structure, trainable_variables: Sequence[Variable] | None = None, **options: Argument
    ) -> Structure:
        if not _applying.depth:
            _check_place(self, trainable_variables or ())
            if (known := _known.get(self)) is not None:  # before anything is updated
                known.check_trained(_with_gradients(self, grads, trainable_variables))
        _applying.depth += 1
        try:
            result = original(self, grads, trainable_variables, **options)
        finally:
            _applying.depth -= 1
        if not _applying.depth and (known := _known.get(self)) is not None and len(grads):
            known.check_trained(_with_gradients(self, grads, trainable_variables))  # maybe built only now
            known.after_step()
        return result

    return apply


def _with_gradients(optimizer: Optimizer, gradients: Structure, variables: Sequence[Variable] | None) -> list[Variable]:
    """The variables of TensorFlow that a call of `apply` updates."""
    given = trained_variables(optimizer) if variables is None else variables
    return [of_tensorflow(each) for each, gradient in zip(given, gradients, strict=False) if gradient is not None]


def _check_place(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    known = _known.get(optimizer)
    first = next(iter(known.variables if known is not None else map(of_tensorflow, variables)), None)
    strategy: Argument = getattr(first, "distribute_strategy", None)
    policy = getattr(getattr(strategy, "extended", None), "policy", None)
    if policy is None or not policy.keeps_global:
        return
    context = tf.distribute.get_replica_context()
    if context is None or context.strategy is not strategy:
        raise UnsupportedError(
            f"with {strategy.extended.policy.setting} an optimizer's gradients must be applied in a replica function, "
            f"where its steps are counted: call its `apply` within strategy.run, or {_INSTEAD}"
        )


def _keep_global_weights(strategy_of: Function) -> None:
    """Makes EarlyStopping keep the weights that were evaluated: it restores them on every rank."""
    callback = keras.callbacks.EarlyStopping
    original = callback.on_epoch_end

    @functools.wraps(original)
    def on_epoch_end(self: Callback, epoch: int, logs: Logs | None = None) -> None:
        if (strategy := strategy_of(self.model)) is None:
            original(self, epoch, logs)
            return
        with strategy.extended.policy.shown_parameters():
            original(self, epoch, logs)

    callback.on_epoch_end = on_epoch_end


def _save_at_epochs(strategy_of: Function) -> None:
    """Refuses callbacks that save within an epoch, where other ranks may be at another step."""
    names = ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint")  # the last one is new in Keras 3.14
    for callback in (getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name)):
        callback.set_model = _at_epochs(callback.set_model, strategy_of)


def _at_epochs(original: Function, strategy_of: Function) -> Function:
    @functools.wraps(original)
    def set_model(self: Callback, model: Model) -> None:
        strategy = strategy_of(model)
        if strategy is not None and strategy.num_workers > 1 and self.save_freq != "epoch":
            raise UnsupportedError(
                f"{type(self).__name__}(save_freq={self.save_freq!r}) with {strategy.extended.policy.setting}: within "
                f"an epoch workers are at different steps; use save_freq='epoch', or {_INSTEAD}"
            )
        original(self, model)

    return set_model
