"""A table on the host side of graphs; what programs see of it is in tests/layers/test_embedding.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.embeddings.host import summed


def test_lookups_of_a_step_read_what_the_step_before_has_left_whatever_its_gradient_needs() -> None:
    """The gradient does not depend on the rows, so nothing but its order would keep it from leaving first."""
    ids = tf.range(20, dtype=tf.int64)
    for _ in range(10):
        layer = tfps.layers.Embedding(20, 6, optimizer=keras.optimizers.SGD(1.0))
        layer.build()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(layer.trainable_variables)

        @tf.function
        def step(query: tf.Tensor, layer: object = layer, optimizer: object = optimizer) -> tf.Tensor:
            with tf.GradientTape() as tape:
                scores = tf.matmul(query, layer(ids), transpose_b=True)  # type: ignore[operator]
                loss = tf.reduce_sum(scores)
            variables = layer.trainable_variables  # type: ignore[attr-defined]
            optimizer.apply(tape.gradient(loss, variables), variables)  # type: ignore[attr-defined]
            return scores

        before = layer(ids).numpy()
        np.testing.assert_allclose(step(tf.ones((1, 6)))[0], before.sum(1), atol=1e-5)
        np.testing.assert_allclose(layer(ids), before - 1, atol=1e-5)


def test_gradients_of_several_replicas_are_added_by_id_in_their_order() -> None:
    one, big = np.float32(1), np.float32(2**24)
    parts = [
        (np.array([7, 2]), np.array([[big], [one]], np.float32)),
        (np.array([2, 7]), np.array([[one], [one]], np.float32)),
        (np.array([7]), np.array([[one]], np.float32)),
    ]
    ids, gradients = summed(parts, 1)
    np.testing.assert_array_equal(ids, [2, 7])
    np.testing.assert_array_equal(gradients, [[2], [(big + one) + one]])
    alone = summed(parts[:1], 1)
    assert alone[1] is parts[0][1]  # not a bit is changed
