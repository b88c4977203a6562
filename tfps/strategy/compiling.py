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

from tfps.errors import UnsupportedError
from tfps.keras_hooks.error_feedback import carry_held_back
from tfps.keras_hooks.keras_private import Trainer, adopt_optimizer
from tfps.keras_hooks.outer_steps import train_alone
from tfps.keras_hooks.served_optimizers import serve
from tfps.keras_hooks.served_variable import ServedVariable
from tfps.strategy.variables import GatedVariable, current_replica
from tfps.types import Model, Optimizer, Variable


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
    build_optimizer = keras.optimizers.Optimizer.build

    @functools.wraps(build_optimizer)
    def build(self: Optimizer, variables: Sequence[Variable]) -> object:
        updated = [getattr(variable, "value", variable) for variable in variables]  # of Keras or of TensorFlow
        gated = [each for each in updated if isinstance(each, GatedVariable)]
        strategies = {each.distribute_strategy for each in gated}
        if len(strategies) == 1:
            (strategy,) = strategies
            if not all(map(_distributed, self.variables)):
                _adopt(self.variables, strategy)
                adopt_optimizer(self, strategy)
            if strategy.extended.outer is None:
                strategy.extended.group_gates(gated)
            if strategy.extended.free and isinstance(self, keras.optimizers.LossScaleOptimizer):
                for variable in (self.dynamic_scale, self.step_counter):  # workers skip steps by themselves
                    variable.value.of_worker = True
        serve_if_asked(self, variables)
        train_alone_if_asked(self, variables)
        if len(strategies) == 1:  # what a checkpoint has of it may be restored now
            carry_held_back(self, strategy, gated)
        return build_optimizer(self, variables)

    keras.optimizers.Optimizer.build = build


def serve_if_asked(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Makes pservers update `variables` if their strategy has `update="server"`.

    Raises:
        UnsupportedError: pservers cannot do what `optimizer` does, or the variables are not all of one strategy.
    """
    updated = [each.value if isinstance(each, keras.Variable) else each for each in variables]
    strategies = {each.distribute_strategy if isinstance(each, GatedVariable) else None for each in updated}
    serving = [each for each in strategies if each is not None and each.extended.serves]
    if serving and len(strategies) > 1:
        raise UnsupportedError(
            "with update='server' all variables of an optimizer must be trainable ones of one strategy; build the "
            "model within its scope, or use update='worker' (tfps.Config)"
        )
    if serving:
        serve(optimizer, variables, serving[0])


def train_alone_if_asked(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Makes workers exchange `variables` between many steps if their strategy has mode "diloco" or "local".

    Raises:
        UnsupportedError: what `optimizer` or a variable does cannot be exchanged, or not all are of one strategy.
    """
    updated = [each.value if isinstance(each, keras.Variable) else each for each in variables]
    strategies = {each.distribute_strategy if isinstance(each, GatedVariable) else None for each in updated}
    alone = [each for each in strategies if each is not None and each.extended.outer is not None]
    if alone and len(strategies) > 1:
        raise UnsupportedError(
            f"with mode={alone[0].extended.mode!r} all variables of an optimizer must be trainable ones of one "
            "strategy; build the model within its scope, or use mode='sync' (tfps.Config)"
        )
    if alone:
        train_alone(optimizer, variables, alone[0])


def _distributed(variable: Variable) -> bool:
    return isinstance(variable, ServedVariable) or isinstance(variable.value, tf.distribute.DistributedValues)


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
