"""Loss scaling: a non-finite gradient on one rank skips the step on all ranks.

Keras decides by one worker's gradients. If ranks decided differently, some would wait for gradients that others never
send, and the loss scales would diverge. A rank without rows has no say: what it computes is often NaN.

Tested in tests/integration/test_programs.py.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfps.graph.shares import current_share
from tfps.types import Optimizer, Structure


@functools.cache
def agree_on_finite(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras' LossScaleOptimizer ask all ranks, in replicas of a `strategy_class`; done once per process."""
    original = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(original)
    def check_finite(self: Optimizer, grads: Structure) -> tf.Tensor:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not isinstance(context.strategy, strategy_class) or context.num_replicas_in_sync == 1:
            return finite
        if (share := current_share()) is not None:
            finite = share.only_if_rows(finite, True)
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite
