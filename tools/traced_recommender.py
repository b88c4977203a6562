#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Records a few steps of a small recommender for docs/recommenders.md, as run `tables` of LOG_DIR:

tfps_launch --workers 2 --pservers 2 tools/traced_recommender.py LOG_DIR

A layer sleeps as long as an accelerator computes, so that two processors are enough for workers and pservers.
"""

from __future__ import annotations

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.types import Value

RUN = "tables"
FIRST, STEPS = 16, 4  # sizes of slices have tuned themselves by then
ITEMS, DIM = 100_000, 64
BATCH, HISTORY = 1024, 20  # examples of the whole job; ids of each
FORWARD_S, BACKWARD_S = 0.03, 0.04


class Asleep(keras.layers.Layer):  # type: ignore[misc]
    """Passes on what it gets, late; gradients, too."""

    def call(self, inputs: Value) -> Value:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def slept(values: Value) -> Value:
            return _late(values, FORWARD_S), lambda gradient: _late(gradient, BACKWARD_S)

        return slept(inputs)


def _late(values: tf.Tensor, seconds: float) -> tf.Tensor:
    def sleep(values: Value) -> Value:
        time.sleep(seconds)
        return values

    return tf.ensure_shape(tf.numpy_function(sleep, [values], values.dtype), values.shape)


def main(log_dir: str) -> None:
    """Trains on ids of which some come often and most rarely."""
    strategy = tfps.Strategy()
    random = np.random.default_rng(1)
    examples = (FIRST + STEPS + 2) * BATCH
    ids, ages = (ITEMS ** random.random((examples, HISTORY))).astype("int64"), random.random((examples, 1))
    with strategy.scope():
        history, age = keras.Input((HISTORY,), dtype="int64"), keras.Input((1,))
        rows = tfps.layers.Embedding(None, DIM, combiner="sum", optimizer="adagrad", name="items")(history)
        both = Asleep()(keras.layers.Concatenate()([rows, keras.layers.Dense(DIM, activation="relu")(age)]))
        model = keras.Model([history, age], keras.layers.Dense(1)(keras.layers.Dense(DIM, activation="relu")(both)))
        model.compile("adagrad", "mse")
    trace = tfps.callbacks.Trace(log_dir, steps=(FIRST, FIRST + STEPS - 1), name=RUN)
    model.fit((ids, ages), ids[:, 0] % 2, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[trace])
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1])
