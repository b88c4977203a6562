from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.prefetch import batch_function, given_inputs, noting_inputs, tensors_of
from tfps.types import Function, Value


def traced(function: Function, *specs: tf.TensorSpec) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The inputs and outputs of a traced function, in its graph."""
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return [each for each in graph.inputs if each.dtype != tf.resource], list(graph.outputs)


IDS = tf.TensorSpec([None, 3], tf.int64)
OTHER = tf.TensorSpec([None], tf.float32)


def test_what_a_step_computes_from_its_batch_is_known_before_it() -> None:
    def step(ids: tf.Tensor, other: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.control_dependencies([tf.debugging.assert_less(ids, tf.constant(100, tf.int64))]):
            unique, _ = tf.unique(tf.reshape(ids, [-1]))
        return unique, unique % 7, ids

    computed = batch_function(*traced(step, IDS, OTHER))
    assert computed is not None
    batch = np.array([[1, 2, 1], [50, 9, 2]])
    for size in (2, 1):
        found = computed(tf.constant(batch[:size]), tf.zeros([size]))
        expected = step(tf.constant(batch[:size]), tf.zeros([size]))
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_needs_more_than_the_batch_is_not() -> None:
    variable = tf.Variable(tf.constant(3, tf.int64))

    def of_variable(ids: tf.Tensor) -> tf.Tensor:
        return ids + variable

    def at_random(ids: tf.Tensor) -> tf.Tensor:
        return ids + tf.random.uniform([], maxval=5, dtype=tf.int64)

    def in_a_branch(ids: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.size(ids) > 3, lambda: ids + 1, lambda: ids)

    for step in (of_variable, at_random, in_a_branch):
        assert batch_function(*traced(step, IDS)) is None


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_batches_are_flat_tensors(kind: str) -> None:
    ragged = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
    batch = ragged if kind == "ragged" else ragged.to_sparse()
    seen = []

    def step(batch: Value) -> tf.Tensor:
        seen.append(list(given_inputs()))
        return tf.unique(batch.values)[0]

    graph = tf.function(noting_inputs(step), autograph=False).get_concrete_function(batch).graph
    computed = batch_function(seen[0], graph.outputs)
    assert computed is not None
    np.testing.assert_array_equal(computed(*tensors_of((batch, None)))[0], [1, 2, 3])
    assert not given_inputs()
