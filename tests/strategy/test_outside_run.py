"""Loops without `strategy.run`: what they write, and where they are refused by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import keras
import pytest
import tensorflow as tf

import tfps
from tfps.types import Argument, Function, Library, Model, Variable

L: Library = keras.layers
# Eagerly and in a function, which AutoGraph converts.
both_ways = pytest.mark.parametrize("wrap", [lambda step: step, tf.function], ids=["eager", "function"])


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[tfps.Strategy]:
    """Rank 0 of two; rank 1 adds nothing to any sum, so that a mean is half of what rank 0 has."""
    with companion.strategy_with_companion(monkeypatch, tfps.Config(step_timeout_s=30)) as (strategy, _):
        yield strategy


def step_of(model: Model, optimizer: keras.optimizers.Optimizer) -> Function:
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones([2, 3]), training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

    return step


class Partly(keras.Model):
    """Has a layer that is built in the scope, and one in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Dense(2), L.Dense(1)
        self.first.build((None, 3))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(inputs))


LAZY = {
    "without slots": (Partly, lambda: keras.optimizers.SGD(0.1), "partly"),
    "partly built": (Partly, keras.optimizers.Adam, "partly"),
    "loss scaling": (Partly, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "partly"),
}


@pytest.mark.parametrize(("build", "make", "name"), LAZY.values(), ids=LAZY)
@both_ways
def test_a_model_that_gets_its_variables_in_a_call_outside_of_the_scope_is_refused_by_name(
    strategy: tfps.Strategy, build: Function, make: Function, name: str, wrap: Function
) -> None:
    with strategy.scope():
        model, optimizer = build(), make()
    step = wrap(step_of(model, optimizer))
    with pytest.raises(tfps.UnsupportedError, match=f"{name}.*/kernel.*created outside of the scope.*build or call"):
        step()


@both_ways
def test_a_sequential_model_of_the_scope_gets_its_variables_there_in_a_call_outside(
    strategy: tfps.Strategy, wrap: Function
) -> None:
    with strategy.scope():
        model, optimizer = keras.Sequential([L.Dense(1)]), keras.optimizers.Adam()
    wrap(step_of(model, optimizer))()
    assert all(isinstance(each.value, tf.distribute.DistributedValues) for each in model.weights)


def test_a_model_of_its_own_beside_the_strategy_trains(job: tfps.Strategy) -> None:
    model, optimizer = keras.Sequential([L.Dense(1, use_bias=False)]), keras.optimizers.SGD(1.0)
    step = step_of(model, optimizer)
    step()
    before = model.get_weights()[0]
    step()
    assert (before - model.get_weights()[0]).ravel().tolist() == pytest.approx([1.0] * 3)


REFUSED = {
    "server": ({"update": "server"}, "got update='server'"),
    "async": ({"update": "server", "mode": "async"}, "got mode='async'"),
}


@pytest.mark.parametrize(("settings", "got"), REFUSED.values(), ids=REFUSED)
def test_gradients_are_applied_outside_of_run_only_where_that_is_defined(
    settings: dict[str, Argument], got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with companion.strategy_with_companion(monkeypatch, tfps.Config(**settings)) as (strategy, _):
        check_refused(strategy, got)


def test_gradients_are_applied_outside_of_run_only_with_one_device_per_worker() -> None:
    with contextlib.closing(tfps.Strategy(devices=["CPU:0", "CPU:1"])) as strategy:
        check_refused(strategy, "got this worker has 2 devices")


def check_refused(strategy: tfps.Strategy, got: str) -> None:
    with strategy.scope():
        model, optimizer = keras.Sequential([keras.Input((3,)), L.Dense(1)]), keras.optimizers.SGD(0.1)
    before = model.get_weights()
    for wrap in (lambda step: step, tf.function):
        with pytest.raises(tfps.UnsupportedError, match=f"{got}.*strategy.run"):
            wrap(step_of(model, optimizer))()
    assert all((was == now).all() for was, now in zip(before, model.get_weights(), strict=True))


# What such a loop writes.


def moving(strategy: tfps.Strategy) -> Variable:
    with strategy.scope():
        variable = tf.Variable([8.0], trainable=False)
    strategy.run(lambda: None)  # the ranks agree on initial values
    return variable


@both_ways
def test_what_a_step_writes_is_combined_and_what_is_assigned_between_steps_is_not(
    job: tfps.Strategy, wrap: Function
) -> None:
    variable = moving(job)
    variable.assign([6.0])
    assert variable.numpy() == [6.0]

    @wrap
    def step() -> tf.Tensor:
        with tf.GradientTape():
            variable.assign(variable + 1.0)
            return tf.identity(variable)

    assert [float(step()[0]), float(step()[0])] == [7.0, 8.0]  # its own within a step
    assert variable.numpy() == [4.0]
    with job.scope():
        variable.assign([5.0])
        assert variable.numpy() == [5.0]


def test_an_integer_sum_that_a_function_assigns_keeps_its_remainder() -> None:
    with contextlib.closing(tfps.Strategy(devices=["CPU:0", "CPU:1", "CPU:2"])) as strategy:
        with strategy.scope():
            total = tf.Variable(
                [0, 0, 0, 0],
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
                dtype=tf.int64,
            )

        @tf.function
        def assign(values: tf.Tensor) -> tf.Tensor:
            return tf.identity(total.assign(values))

        values = [5, -4, 2**63 - 1, -(2**63)]
        assert assign(tf.constant(values, tf.int64)).numpy().tolist() == values
        assert total.numpy().tolist() == values
