"""Custom training loops without `strategy.run`, as Keras' guides have them: gradients are averaged over the workers.

Such a loop runs on every worker by itself, each with a loss that is the whole of what that worker has read. Where it
applies gradients, outside of replica functions, they are exchanged: each counts 1 / workers. If all workers read the
same, as programs do that know nothing of workers, the result is that of one process.

Tested in tests/strategy/test_outside_run.py, tests/integration/programs_loops.py and tests/programs/test_taught.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.shares import keras_step
from tfps.keras_hooks.exchanged_variable import of_tensorflow
from tfps.keras_hooks.keras_private import in_symbolic_scope, strategy_of_optimizer, trained_variables
from tfps.types import Function, Optimizer, Value, Variable
from tfps.updates.variables import GatedVariable


@functools.cache
def exchange_outside_run(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras' optimizers exchange what they apply outside of replica functions; done once per process."""

    def exchanging(original: Function) -> Function:
        @functools.wraps(original)
        def apply(
            self: Optimizer, grads: Sequence[Value], trainable_variables: Iterable[Variable] | None = None
        ) -> object:
            variables = None if trainable_variables is None else list(trainable_variables)
            strategy = _alone(self, strategy_class, variables)
            if strategy is None:
                return original(self, grads, variables)
            strategy.extended.policy.check_outside_run(len(strategy.extended.worker_devices))
            if not self.built and variables is not None:
                with strategy.scope():
                    self.build(variables)
            strategy.extended.agree_outside_run()
            with keras_step(trains=True):
                return strategy.run(lambda: original(self, grads, variables))

        return apply

    keras.optimizers.Optimizer.apply = exchanging(keras.optimizers.Optimizer.apply)
    keras.optimizers.LossScaleOptimizer.apply = exchanging(keras.optimizers.LossScaleOptimizer.apply)


def _alone(
    optimizer: Optimizer, strategy_class: type[tf.distribute.Strategy], variables: list[Variable] | None
) -> tf.distribute.Strategy | None:
    """Returns the strategy of what is updated, if it has several replicas and none of them runs this thread.

    Raises:
        UnsupportedError: a variable is outside of the strategy.
    """
    trained = trained_variables(optimizer) if variables is None else variables
    gated = (each for each in map(of_tensorflow, trained) if isinstance(each, GatedVariable))
    first = next(gated, None)
    strategy = strategy_of_optimizer(optimizer) if first is None else first.distribute_strategy
    if not isinstance(strategy, strategy_class) or in_symbolic_scope():
        return None
    context = tf.distribute.get_replica_context()
    if context is not None and context.strategy is strategy:
        return None
    for variable in trained:
        if not isinstance(of_tensorflow(variable), tf.distribute.DistributedValues):
            raise UnsupportedError(
                f"optimizer {optimizer.name!r} trains variable {getattr(variable, 'path', variable.name)!r}, which was "
                "created outside of the scope of the strategy of this optimizer or of other variables; create models "
                "within `with strategy.scope():`, and those whose layers get their variables in the first call also "
                "build or call there (model.build(shape), or keras.Input as the first layer) before the loop"
            )
    if first is None or strategy.extended._num_replicas_in_sync == 1:
        return None
    return strategy if strategy.extended.policy.exchanges_gradients else None  # others refuse by themselves
