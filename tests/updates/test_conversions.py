"""Variables as Python numbers and NumPy arrays."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.types import Argument

KINDS: list[dict[str, Argument]] = [
    {"trainable": True},
    {
        "trainable": False,
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.SUM,
    },
]


@pytest.mark.parametrize("kind", KINDS, ids=["mirrored", "on read"])
@pytest.mark.parametrize("number", [0.0, 1.5])
def test_a_variable_is_the_number_that_a_plain_one_is(
    strategy: tfps.Strategy, kind: dict[str, Argument], number: float
) -> None:
    plain = tf.Variable(number)
    with strategy.scope():
        variable = tf.Variable(number, **kind)
    for convert in (int, float, complex):
        assert convert(variable) == convert(plain)


@pytest.mark.parametrize("kind", KINDS, ids=["mirrored", "on read"])
def test_a_variable_is_the_array_that_a_plain_one_is(strategy: tfps.Strategy, kind: dict[str, Argument]) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with strategy.scope():
        variable = tf.Variable(values, **kind)
    for found in (np.asarray(variable), np.array(variable, dtype=np.float64)):
        np.testing.assert_array_equal(found, values)
    assert np.asarray(variable).dtype == np.float32
    assert np.array(variable, dtype=np.float64).dtype == np.float64


def test_an_array_of_a_variable_stays_as_it_was_when_the_variable_changes(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    before = np.asarray(variable)
    variable.assign([3.0, 4.0])
    assert before.tolist() == [1.0, 2.0]


def test_the_optimizers_step_is_a_number(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.learning_rate) == pytest.approx(1e-3)
