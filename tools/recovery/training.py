"""What all jobs of tools/recovery train, with Keras 3 and with TensorFlow 2.15's own: which Keras is an argument."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tools.recovery.job import BATCH, LAYERS

if TYPE_CHECKING:
    from tfps.types import Array, Library, Model, Value

LEARNING_RATE = 1e-6


def build(keras: Library, units: int, row_s: float) -> Model:
    """Dense layers. Before them a worker sleeps `row_s` per row, as if a machine of its own had to compute it."""

    def pause(rows: Array) -> Array:
        time.sleep(len(rows) * row_s)
        return rows

    class Asleep(keras.layers.Layer):
        def call(self, rows: Value) -> Value:
            slept = tf.numpy_function(pause, [rows], tf.float32)
            slept.set_shape(rows.shape)
            return slept

    before = [Asleep()] if row_s else []
    layers = [keras.layers.Dense(units, use_bias=False) for _ in range(LAYERS)]
    return keras.Sequential([keras.layers.Input((units,)), *before, *layers])


def rows(units: int) -> Array:
    """A batch, which is its own target."""
    return np.random.default_rng(0).normal(size=[BATCH, units]).astype(np.float32)
