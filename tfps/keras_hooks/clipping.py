"""Clipping where workers do not step together: by each worker's own gradient (docs/modes.md).

Keras divides a loss by the number of replicas of all workers and clips what that gives. In these modes a gradient is
multiplied by the number of workers only after it: limits would be so many times too loose.

Tested in tests/integration/test_local.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfps.strategy.reductions import divide, times
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
        clipped = original(self, [each if each is None else times(each, workers) for each in grads])
        return [each if each is None else divide(each, workers) for each in clipped]

    keras.optimizers.Optimizer._clip_gradients = clip


def _workers(strategy_class: type[tf.distribute.Strategy]) -> int:
    """By how many a gradient of this thread's replica is multiplied after clipping."""
    context = tf.distribute.get_replica_context()
    if context is None or not isinstance(context.strategy, strategy_class) or not context.strategy.extended.free:
        return 1
    return int(context.strategy.num_workers)
