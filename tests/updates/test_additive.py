"""What a replica assigns to a variable, as its graph tells: a sum that it adds to, and what it keeps of a mean."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.tf_private import ResourceVariable
from tfps.types import Value, Variable
from tfps.updates.variables import adds_up, kept_part

Assigned = Callable[[Variable, Value], Value]


@tf.function
def hidden(variable: Variable, x: Value) -> Value:
    return tf.maximum(variable.read_value(), x)


@pytest.mark.parametrize(
    ("assigned", "adds"),
    [
        (lambda v, x: v.read_value() + x, True),
        (lambda v, x: tf.identity(v.read_value()) - tf.exp(x), True),
        (lambda v, x: v.read_value() + tf.function(lambda: 2.0 * x)(), True),
        (lambda v, x: tf.zeros([2]), True),
        (lambda v, x: tf.ones([2]), False),
        (lambda v, x: x, False),
        (lambda v, x: 0.9 * v.read_value() + x, False),
        (lambda v, x: tf.maximum(v.read_value(), x), False),
        (lambda v, x: v.read_value() + tf.exp(v.read_value()), False),
        (lambda v, x: tf.function(lambda: v.read_value() * x)(), True),  # nobody sees what it does
        (hidden, True),
    ],
)
def test_what_is_added_to_a_sum_is_told_from_what_replaces_it(assigned: Assigned, adds: bool) -> None:
    variable = ResourceVariable([1.0, 2.0], trainable=False)
    found = []

    @tf.function(input_signature=[tf.TensorSpec([2])])
    def replica(x: tf.Tensor) -> None:
        found.append(adds_up(variable, assigned(variable, x), x.graph))

    replica.get_concrete_function()
    assert found == [adds]


@pytest.mark.parametrize(
    ("assigned", "kept"),
    [
        (lambda v, x: 0.75 * v.read_value() + 0.25 * x, [0.75, 1.5]),
        (lambda v, x: v.read_value() - (v.read_value() - x) / 4.0, [0.75, 1.5]),
        (lambda v, x: x, [0.0, 0.0]),
        (lambda v, x: tf.exp(v.read_value()) + x, None),
        (lambda v, x: v.read_value() * v.read_value(), None),
    ],
)
def test_the_part_of_a_mean_that_was_there_before_is_found(assigned: Assigned, kept: list[float] | None) -> None:
    variable = ResourceVariable([1.0, 2.0], trainable=False)

    @tf.function(input_signature=[tf.TensorSpec([2])])
    def replica(x: tf.Tensor) -> Value:
        return kept_part(variable, assigned(variable, x))

    part = replica(tf.constant([8.0, 8.0]))
    assert part is None if kept is None else np.array_equal(part, kept)
