"""Reductions in graphs: declared where their result is used, before the first run, and never else."""

from __future__ import annotations

import os
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.types import Structure, Value, Variable

SUM = tf.distribute.ReduceOp.SUM


def reductions(strategy: tfps.Strategy) -> list[str]:
    """What has been declared of reductions that graphs wait for."""
    return [spec.name for key, spec in strategy._runtime.declared._declared.values() if key[0] == "pull"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails what is declared only when a message comes."""

    def refuse(*_: object) -> None:
        raise tfps.TfpsError("its first run was not seen")

    monkeypatch.setattr("tfps.updates.reductions._declare_late", refuse)


def summed(value: Value) -> Value:
    """In a replica function."""
    return tf.distribute.get_replica_context().all_reduce(SUM, value)


def test_a_fit_declares_the_buckets_of_its_updates_and_no_reduction(remote: tfps.Strategy) -> None:
    training.train(remote, keras.optimizers.Adam, epochs=1)
    assert remote._runtime.update_buckets() > 2
    assert reductions(remote) == []


def test_a_fit_that_clips_by_the_norm_of_the_sum_declares_reductions_and_waits_for_them(remote: tfps.Strategy) -> None:
    class Clipping(keras.optimizers.SGD):
        def apply(self, gradients: Structure, variables: Sequence[Variable] | None = None) -> Value:
            reduced = summed(list(gradients))
            total = tf.linalg.global_norm(reduced)
            return super().apply([gradient / (1.0 + total) for gradient in reduced], variables)

    training.train(remote, lambda: Clipping(0.1), epochs=1)
    assert len(reductions(remote)) == 6  # three layers, each with a kernel and a bias


def test_what_is_returned_is_used_and_what_is_dropped_is_not(remote: tfps.Strategy) -> None:
    @tf.function(autograph=False)
    def step(value: Value) -> Value:
        def in_replica() -> Value:
            summed(value[:3])
            return summed(value[:2])

        return remote.run(in_replica)

    np.testing.assert_array_equal(step(tf.constant([1.0, 2.0, 3.0])), [1.0, 2.0])
    assert reductions(remote) == ["tensor (2,) float32"]


def test_nothing_is_declared_before_the_first_run_and_nothing_again_by_a_new_trace(remote: tfps.Strategy) -> None:
    @tf.function(autograph=False)
    def step(value: Value, more: int) -> Value:
        return remote.run(lambda: summed(value) + float(more))

    value = tf.constant([1.0, 2.0])
    step.get_concrete_function(value, 1)
    assert reductions(remote) == []
    for more in (1, 2):
        np.testing.assert_array_equal(step(value, more), value + float(more))
        assert reductions(remote) == ["tensor (2,) float32"]


@pytest.mark.usefixtures("seen")
def test_a_branch_that_the_first_run_does_not_take_is_declared_with_the_others(remote: tfps.Strategy) -> None:
    @tf.function(autograph=False)
    def step(value: Value, doubled: Value) -> Value:
        def in_replica() -> Value:
            return tf.cond(doubled, lambda: 2 * summed(value), lambda: summed(value[:1]))

        return remote.run(in_replica)

    value = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(step(value, tf.constant(False)), [1.0])
    assert reductions(remote) == ["tensor (2,) float32", "tensor (1,) float32"]
    np.testing.assert_array_equal(step(value, tf.constant(True)), [2.0, 4.0])


@pytest.mark.usefixtures("seen")
def test_a_function_that_was_traced_for_another_caller_is_declared_with_the_one_that_runs(
    remote: tfps.Strategy,
) -> None:
    @tf.function(autograph=False)
    def inner(value: Value) -> Value:
        return summed(value)

    def outer(factor: int) -> Value:
        @tf.function(autograph=False)
        def step(value: Value) -> Value:
            return remote.run(lambda: factor * inner(value))

        return step

    value = tf.constant([1.0, 2.0])
    outer(1).get_concrete_function(value)  # never runs
    np.testing.assert_array_equal(outer(3)(value), [3.0, 6.0])
    assert reductions(remote) == ["tensor (2,) float32"]


@pytest.mark.parametrize("how", ["dataset", "gradient"])
def test_a_reduction_that_only_its_run_shows_to_be_used_is_declared_then(remote: tfps.Strategy, how: str) -> None:
    """A dataset's function runs without a call, and a gradient may use what no output of its function does."""
    value = tf.constant([1.0, 2.0])
    if how == "dataset":
        data = tf.data.Dataset.from_tensors(value)
        result = data.reduce(tf.zeros([2]), lambda total, each: total + remote.run(lambda: summed(each)))
    else:

        @tf.custom_gradient
        def scaled(given: Value) -> Value:
            total = summed(given)
            return tf.identity(given), lambda upstream: upstream * total

        @tf.function(autograph=False)
        def step(given: Value) -> Value:
            return remote.run(lambda: scaled(given))

        step(value)
        assert reductions(remote) == []
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = step(value)
        result = tape.gradient(result, value)
    np.testing.assert_array_equal(result, [1.0, 2.0])
    assert reductions(remote) == ["tensor (2,) float32"]
