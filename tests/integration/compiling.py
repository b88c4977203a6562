"""Worker: a loop of a program that XLA compiles, in which rank 1 gets a batch of another size in its third step.

What is said of waits comes soon, and that a worker compiles is told at once.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.runtime import first_runs
from tfps.types import Value
from tfps.worker import client

STEPS, ROWS, UNITS = 4, 8, 16

if __name__ == "__main__":
    client.PATIENCE_S, first_runs.SHORT_S = 0.2, 0.0
    strategy = tfps.Strategy(config=tfps.Config(xla="on", xla_part_bytes=4096))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Dense(4 * UNITS, activation) for activation in ["gelu", "swish", "selu"] * 2]
        model = keras.Sequential([keras.Input((UNITS,)), *hidden, keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    def step(x: Value) -> Value:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    signature = [tf.TensorSpec([None, UNITS])]
    run = tf.function(lambda x: strategy.run(step, (x,)), autograph=False, input_signature=signature)

    for number in range(STEPS):
        print(f"step {number}", flush=True)
        run(np.ones([ROWS - 2 * (number == 2 and strategy.rank == 1), UNITS], np.float32))
    model.get_weights()
    (made,) = strategy.extended.compiled.made
    print(f"sizes {made.sizes}")
    strategy.close()
