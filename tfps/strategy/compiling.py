"""Adopts what programs create outside the scope when they compile a model again, as fine-tuning guides do.

`Model.compile` enters its model's scope automatically. Optimizers and metrics created outside get variables of the
strategy as soon as it is known: an optimizer when it is built for variables, a metric when it is compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfps.keras_hooks.error_feedback import carry_held_back
from tfps.keras_hooks.exchanged_variable import of_tensorflow
from tfps.keras_hooks.keras_private import Trainer, adopt_optimizer
from tfps.keras_hooks.remote_variable import RemoteVariable
from tfps.types import Model, Optimizer, Value, Variable
from tfps.updates.variables import GatedVariable, current_replica


@functools.cache
def compile_in_scope(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras compile models of a `strategy_class` in their scope; done once per process."""
    compile_model = Trainer.compile

    @functools.wraps(compile_model)
    def compile_in_own_scope(self: Model, *arguments: object, **options: object) -> object:
        strategy = getattr(self, "distribute_strategy", None)
        if not isinstance(strategy, strategy_class):
            return compile_model(self, *arguments, **options)
        for each in keras.tree.flatten((arguments, options)):
            if isinstance(each, keras.Metric):
                _adopt(each.variables, strategy)
        with strategy.scope():
            return compile_model(self, *arguments, **options)

    Trainer.compile = compile_in_own_scope
    build_optimizer, build_scaling = keras.optimizers.Optimizer.build, keras.optimizers.LossScaleOptimizer.build

    def prepare(self: Optimizer, variables: Sequence[Variable]) -> None:
        gated = [each for each in map(of_tensorflow, variables) if isinstance(each, GatedVariable)]
        strategies = {each.distribute_strategy for each in gated}
        if len(strategies) == 1:
            (strategy,) = strategies
            if not all(map(_distributed, self.variables)):
                _adopt(self.variables, strategy)
                adopt_optimizer(self, strategy)
            strategy.extended.group_gates(gated)
            if isinstance(self, keras.optimizers.LossScaleOptimizer):
                for variable in (self.dynamic_scale, self.step_counter):  # no statistics of rows
                    variable.value.never_combined = True
        _update_elsewhere_if_asked(self, variables)
        if len(strategies) == 1:  # what a checkpoint has of it may be restored now
            carry_held_back(self, strategy, gated)

    @functools.wraps(build_optimizer)
    def build(self: Optimizer, variables: Sequence[Variable]) -> object:
        prepare(self, variables)
        return build_optimizer(self, variables)

    @functools.wraps(build_scaling)
    def build_with_scaling(self: Optimizer, variables: Sequence[Variable]) -> object:
        with _scope_of(variables):
            built = build_scaling(self, variables)
            prepare(self, variables)  # with Keras 3.8 it is not built as other optimizers are
        return built

    apply_gradients = keras.optimizers.Optimizer.apply

    @functools.wraps(apply_gradients)
    def apply(self: Optimizer, grads: Sequence[Value], trainable_variables: Iterable[Variable] | None = None) -> object:
        if trainable_variables is not None and not self.built:
            trainable_variables = list(trainable_variables)
            with _scope_of(trainable_variables), keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
        return apply_gradients(self, grads, trainable_variables)

    keras.optimizers.Optimizer.apply = apply
    keras.optimizers.Optimizer.build, keras.optimizers.LossScaleOptimizer.build = build, build_with_scaling


def _scope_of(variables: Sequence[Variable]) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to create slots in: that of `variables` for a program outside of any, as in an eager loop."""
    gated = [each for each in map(of_tensorflow, variables) if isinstance(each, GatedVariable)]
    strategies = {each.distribute_strategy for each in gated}
    if len(strategies) != 1 or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[object] = strategies.pop().scope()
    return scope


def _update_elsewhere_if_asked(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Makes pservers update `variables`, or workers exchange them between many steps, if their strategy asks for it.

    Raises:
        UnsupportedError: what `optimizer` or a variable does forbids it, or the variables are not all of one strategy.
    """
    updated = list(map(of_tensorflow, variables))
    strategies = {each.distribute_strategy if isinstance(each, GatedVariable) else None for each in updated}
    for strategy in filter(None, strategies):
        strategy.extended.policy.prepare(optimizer, variables, alone=len(strategies) == 1)


def _distributed(variable: Variable) -> bool:
    return isinstance(variable, RemoteVariable) or isinstance(variable.value, tf.distribute.DistributedValues)


def _adopt(variables: Iterable[Variable], strategy: tf.distribute.Strategy) -> None:
    """Recreates those of `variables` that belong to no strategy under `strategy`; they keep their values."""
    with tf.init_scope(), contextlib.ExitStack() as scope:
        if current_replica(strategy) is None:
            scope.enter_context(strategy.scope())
        for variable in variables:
            if not _distributed(variable):
                value = variable.numpy()
                variable._initialize(value)
                variable.assign(value)  # else each replica of a SUM variable would hold the whole
