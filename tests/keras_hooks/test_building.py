"""Models that Keras cannot build before their first step, or not wholly: bitwise as plain Keras, which does not try."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.types import Options, Structure, Value

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {each.__name__: each for each in (training.WithoutCall, training.CallOfNothing, training.CallOfAPart)}


def trained(
    strategy: tfps.Strategy | None, model_class: type[training.WithoutCall], on_batch: bool = False
) -> tuple[list[bytes], Value]:
    """All variables, and what Keras reports."""
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    x, y = training.digits()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_class()
        model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    if on_batch:
        reported = [model.train_on_batch(x[:64], y[:64]), model.test_on_batch(x, y)]
    else:
        options: Options = {"batch_size": 64, "verbose": 0}
        before = model.evaluate(x, y, **options)
        fit = model.fit(x, y, validation_data=(x, y), epochs=2, shuffle=False, **options)
        reported = [before, fit.history]
    variables = [*model.weights, *model.optimizer.variables, *model.metrics_variables]
    return [np.asarray(v.numpy()).tobytes() for v in variables], [reported, [each.path for each in variables]]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "CallOfAPart" else pytest.mark.long) for n in MODELS]
)
def test_a_model_with_a_step_of_its_own_needs_no_call(strategy: tfps.Strategy, name: str) -> None:
    assert trained(strategy, MODELS[name]) == trained(None, MODELS[name])


def test_on_single_batches_it_needs_none_either(strategy: tfps.Strategy) -> None:
    assert trained(strategy, training.WithoutCall, True) == trained(None, training.WithoutCall, True)


class Optional(keras.Model):
    """Takes a second input that may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(10)

    def call(self, inputs: Structure) -> Value:
        rows, more = inputs
        return self.out(rows if more is None else rows + more)


def missing(strategy: tfps.Strategy | None) -> tuple[list[bytes], Value]:
    x, y = training.digits()

    def batches() -> Iterator[Structure]:
        for begin in range(0, 320, 32):
            yield (x[begin : begin + 32], None), y[begin : begin + 32]

    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = Optional()
        model.compile("sgd", LOSS)
    fit = model.fit(batches(), steps_per_epoch=8, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()], fit.history


def test_a_generator_may_yield_none_for_an_input(strategy: tfps.Strategy) -> None:
    assert missing(strategy) == missing(None)


def padded(strategy: tfps.Strategy | None, eager: bool) -> Value:
    x, y = training.digits(40)
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    rows = tf.data.Dataset.from_generator(
        lambda: ((x[n, : 1 + n % 5], y[n]) for n in range(40)),
        output_signature=(tf.TensorSpec((None,)), tf.TensorSpec((), tf.int64)),
    )
    with strategy.scope() if strategy else contextlib.nullcontext():
        layers = [keras.Input((None,)), keras.layers.Reshape((-1, 1)), keras.layers.LSTM(4), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.compile("sgd", LOSS, run_eagerly=eager)
    fit = model.fit(rows.shuffle(40, seed=5).padded_batch(8), epochs=2, verbose=0)
    return fit.history, [weight.tobytes() for weight in model.get_weights()]


def test_shuffled_batches_of_unknown_sizes_come_in_the_order_of_plain_keras(strategy: tfps.Strategy) -> None:
    assert padded(strategy, False) == padded(None, False)


def paths(strategy: tfps.Strategy | None) -> list[str]:
    x, y = training.digits(40)
    keras.backend.clear_session()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = training.Subclassed()
        model.compile("adam", LOSS)
    model.fit(x, y, verbose=0)
    return [each.path for each in [*model.variables, *model.optimizer.variables]]


def test_variables_have_the_paths_of_plain_keras(strategy: tfps.Strategy) -> None:
    assert paths(strategy) == paths(None)


def test_what_is_wrong_with_a_model_is_said_as_in_plain_keras(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        model = keras.Model()
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match=r"does not have a `call\(\)` method"):
        model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
