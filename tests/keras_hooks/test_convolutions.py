"""Convolutions that Keras compiles by XLA on CPUs."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.types import Model, Options, Value

LAYERS = keras.layers


def grouped() -> Model:
    """A block as in ResNeXt, a convolution in one dimension with groups, and one in three with channels first."""
    inputs = keras.Input((8, 8, 8))
    hidden = LAYERS.Conv2D(8, 3, groups=4, padding="same", use_bias=False)(LAYERS.Conv2D(8, 1)(inputs))
    hidden = LAYERS.Add()([inputs, LAYERS.ReLU()(hidden)])
    hidden = LAYERS.Conv1D(4, 3, groups=2)(LAYERS.Reshape((64, 8))(hidden))
    hidden = LAYERS.Conv3D(2, (3, 3, 1), data_format="channels_first")(LAYERS.Reshape((1, 8, 31, 1))(hidden))
    return keras.Model(inputs, LAYERS.Dense(3)(LAYERS.Flatten()(hidden)))


def results(strategy: tfps.Strategy | None) -> list[bytes]:
    """Bits of predictions, eager results, gradients, losses and trained weights."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(12, 8, 8, 8)).astype("float32")
    y = np.arange(12) % 3
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = grouped()
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(model(x) ** 2)
    options: Options = {"batch_size": 4, "verbose": 0}
    values: list[Value] = [*tape.gradient(total, model.trainable_variables), total, model.predict(x, **options)]
    values += model.fit(x, y, shuffle=False, **options).history["loss"]
    if strategy:
        values.append(strategy.run(model, args=(x[:2],)))
    else:
        values.append(model(x[:2]))
    values += [model.evaluate(x, y, **options), *model.get_weights()]
    return [np.asarray(value).tobytes() for value in values]


@pytest.mark.long
def test_convolutions_compiled_by_xla_are_those_of_plain_keras_bit_for_bit(strategy: tfps.Strategy) -> None:
    assert results(strategy) == results(None)
