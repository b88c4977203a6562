"""Clipping where workers do not step together: by each worker's own gradient (docs/modes.md).

In replica functions of `strategy.run`, Keras divides a loss by the number of replicas of all workers and clips what
that gives. In these modes a gradient is multiplied by the number of workers only after it: limits would be so many
times too loose.

Tested in tests/integration/test_local.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfps.graph.shares import in_keras_step, with_values
from tfps.types import Optimizer, Value


@functools.cache
def clip_own_gradients(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras' optimizers clip so, in replicas of a `strategy_class`; done once per process."""
    original = keras.optimizers.Optimizer._clip_gradients

    @functools.wraps(original)
    def clip(self: Optimizer, grads: list[Value]) -> list[Value]:
        workers = _workers(strategy_class) if self.clipnorm or self.global_clipnorm or self.clipvalue else 1
        if workers == 1:
            return original(self, grads)
        clipped = original(self, _changed(grads, lambda values: values * tf.cast(workers, values.dtype)))
        return _changed(clipped, lambda values: values / tf.cast(workers, values.dtype))

    keras.optimizers.Optimizer._clip_gradients = clip


def _changed(gradients: Sequence[Value], change: Callable[[tf.Tensor], tf.Tensor]) -> list[Value]:
    """`gradients`, some of which may be None or IndexedSlices, with changed values."""
    return [None if each is None else with_values(each, change) for each in gradients]


def _workers(strategy_class: type[tf.distribute.Strategy]) -> int:
    """By how many a gradient of this thread's replica is multiplied after clipping."""
    context = tf.distribute.get_replica_context()
    if context is None or in_keras_step() or not isinstance(context.strategy, strategy_class):
        return 1
    return int(context.strategy.extended.policy.gradient_factor)
