"""Steps, traces and data that end with an error, or with the strategy: nobody waits for ever, what follows is right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
from training import compiled

import tfps
from tfps.errors import ClosedError
from tfps.runtime import stopped_steps
from tfps.strategy import strategy as strategies
from tfps.types import Structure, Value


def test_a_step_that_fails_in_backward_leaves_no_reader_waiting(
    strategy: tfps.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_steps, "_LOOK_S", 0.05)
    model, x, y = compiled(strategy)
    model.fit(x, y, verbose=0)
    gate = model.trainable_variables[0].value.gates[0]
    gate._queue.dequeue()  # what a reader that TensorFlow stops may leave behind
    with pytest.raises((tfps.TfpsError, tf.errors.InvalidArgumentError), match="stopped by an error"):
        model.fit(x, y, verbose=0)
    with pytest.raises(tfps.TfpsError, match="restore a checkpoint"):
        model.get_weights()


def test_an_error_of_the_data_does_not_disturb_the_next_fit(strategy: tfps.Strategy) -> None:
    model, x, y = compiled(strategy)

    def failing() -> Iterator[Structure]:
        yield x[:32], y[:32]
        raise ValueError("no more")

    signature = (tf.TensorSpec((32, 64), tf.float32), tf.TensorSpec((32,), tf.int64))
    for _ in range(20):
        with pytest.raises(tf.errors.InvalidArgumentError, match="no more"):
            model.fit(tf.data.Dataset.from_generator(failing, output_signature=signature), verbose=0)
    model.fit(x, y, verbose=0)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def test_many_short_epochs_end(strategy: tfps.Strategy) -> None:
    # Every epoch ends with an error inside the step's graph (the end of the data), at a random moment for the gates.
    model, x, y = compiled(strategy)
    history = model.fit(x[:64], y[:64], batch_size=32, epochs=50, verbose=0).history
    assert len(history["loss"]) == 50


def test_after_close_training_raises_and_the_weights_stay_readable() -> None:
    strategy = tfps.Strategy()
    model, x, y = compiled(strategy)
    model.fit(x, y, verbose=0)
    weights = model.get_weights()
    strategy.close()
    strategy.close()
    for _ in range(2):
        with pytest.raises(ClosedError, match=r"^the strategy is closed, .* make a new strategy"):
            model.fit(x, y, verbose=0)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_a_step_that_stops_between_two_sends_fails_the_job() -> None:
    strategy = tfps.Strategy(config=tfps.Config(slice_bytes=64))
    with strategy.scope():
        first, second = tf.Variable(tf.zeros([16])), tf.Variable(tf.zeros([16]))

    def sample(value: Value, broken: Value) -> Value:
        if broken:
            wait = threading.Event()
            while strategy._runtime._messages_seen == before and not wait.wait(0.01):
                pass  # until the first gradient has been sent
            raise ValueError("bad sample")
        return value

    @tf.function(autograph=False)
    def step(broken: Value) -> None:
        def in_replica() -> None:
            late = tf.numpy_function(sample, [tf.ones([16]), broken], tf.float32)
            late.set_shape([16])
            gradients = tf.distribute.get_replica_context().all_reduce("SUM", [tf.ones([16]), late])
            for variable, gradient in zip((first, second), gradients, strict=True):
                strategy.extended.update(variable, lambda v, g: v.assign_add(g), args=(gradient,))

        strategy.run(in_replica)

    step(tf.constant(False))
    np.testing.assert_array_equal([first.numpy(), second.numpy()], tf.ones([2, 16]))  # both messages have been seen
    before = strategy._runtime._messages_seen
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad sample"):
        step(tf.constant(True))
    step(tf.constant(False))  # sends, and thereby shows that the step before has sent only half
    with pytest.raises(tfps.TfpsError, match="stopped by an error"):
        second.numpy()
    strategy.close()


def test_a_trace_that_failed_does_not_disturb_the_next(strategy: tfps.Strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0])

    def in_replica(broken: bool) -> None:
        (gradient, _) = tf.distribute.get_replica_context().all_reduce("SUM", [tf.ones([1]), tf.ones([1])])
        strategy.extended.update(variable, lambda v, g: v.assign_sub(g), args=(gradient,))
        if broken:
            raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake") as kept:
        strategy.run(tf.function(lambda: in_replica(True), autograph=False))
    strategy.run(tf.function(lambda: in_replica(False), autograph=False))
    np.testing.assert_array_equal(variable.numpy(), [0.0])
    assert kept.value.args == ("a mistake",)


def test_a_session_that_has_shown_an_error_still_finishes_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("a mistake")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert strategies._ended_by_exception() is error  # a script
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert strategies._ended_by_exception() is None
