"""Models that Keras cannot build before their first step, or not wholly: bitwise as plain Keras, which does not try."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import training

import tfps
from tfps.types import Options, Value

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
    return [np.asarray(v.numpy()).tobytes() for v in variables], reported


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_step_of_its_own_needs_no_call(strategy: tfps.Strategy, name: str) -> None:
    assert trained(strategy, MODELS[name]) == trained(None, MODELS[name])


def test_on_single_batches_it_needs_none_either(strategy: tfps.Strategy) -> None:
    assert trained(strategy, training.WithoutCall, True) == trained(None, training.WithoutCall, True)


def test_what_is_wrong_with_a_model_is_said_as_in_plain_keras(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        model = keras.Model()
        model.compile("sgd", "mse")
    with pytest.raises(NotImplementedError, match=r"does not have a `call\(\)` method"):
        model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
