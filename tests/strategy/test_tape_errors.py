"""Failures that come while an eager step reads a variable under a tape."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import tfps
from tfps.errors import WorkerLostError, to_text
from tfps.types import Value


def test_a_failure_between_a_read_and_its_tape_reaches_the_program_as_itself(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 2))

    def step() -> Value:
        failure = WorkerLostError("rank 7 (there) has died")
        strategy.extended.exchange.fail(failure)
        # Behind the token that the read takes.
        layer.kernel.value.gates[0].open(to_text(failure))
        with tf.GradientTape():
            return layer(tf.ones([1, 2]))

    with pytest.raises(WorkerLostError, match="rank 7"):
        strategy.run(step)


def test_other_errors_of_the_interpreter_stay(strategy: tfps.Strategy) -> None:
    def step() -> None:
        raise SystemError("something else")

    with pytest.raises(SystemError, match="something else"):
        strategy.run(step)
