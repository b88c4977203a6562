"""What ranks must have alike of a batch: all but what random ops or Python code of the pipeline have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfps.input.same_data import Same, sames
from tfps.types import Array, Value

INPUT, TARGET, MADE, RANDOM = Same.INPUT, Same.TARGET, Same.MADE, Same.RANDOM
Dataset = tf.data.Dataset
X, Y = np.zeros((8, 4, 4, 3), "float32"), np.arange(8)
PIXELS = Dataset.from_tensor_slices((X.astype("uint8"), Y))
ROWS, WORDS = Dataset.from_tensor_slices((X, Y)), Dataset.from_tensor_slices((["a", "b"], [1, 2]))
SPEC = tf.TensorSpec([None, 4, 4, 3]), tf.TensorSpec([None], tf.int64)


def generated() -> Iterator[tuple[Array, Array]]:
    yield X, Y


def in_python(x: Value, y: Value) -> tuple[Value, Value]:
    return tf.numpy_function(lambda *both: both, [x, y], [tf.float32, tf.int64])


@tf.function
def noisy(x: Value) -> Value:
    return x + tf.random.normal([])


def mixed(one: tuple[Value, Value], other: tuple[Value, Value]) -> tuple[Value, Value, Value]:
    share = tf.random.uniform([])
    return share * one[0] + (1 - share) * other[0], share * tf.cast(one[1] + other[1], tf.float32), one[1]


def of_layer(layer: keras.Layer) -> Callable[[Value, Value], tuple[Value, Value]]:
    return lambda x, y: (layer(x, training=True), y)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(lambda: ROWS.shuffle(8).batch(2).repeat().prefetch(1), [INPUT, TARGET], id="rows"),
        pytest.param(lambda: ROWS.map(lambda x, y: (x / 255, tf.one_hot(y, 8))).batch(2), [INPUT, TARGET], id="scaled"),
        pytest.param(lambda: Dataset.from_tensor_slices({"a": X, "b": Y}).batch(2), [INPUT, INPUT], id="dict"),
        pytest.param(lambda: ROWS.batch(2).map(lambda x, y: (noisy(x), y)), [RANDOM, TARGET], id="in a function"),
        pytest.param(
            lambda: ROWS.map(lambda x, y: (tf.cond(y < 5, lambda: x, lambda: x + tf.random.uniform([])), y)),
            [RANDOM, TARGET],
            id="in a branch",
        ),
        pytest.param(
            lambda: ROWS.batch(2).map(lambda x, y: (tf.map_fn(noisy, x), tf.map_fn(lambda each: each + 1, y))),
            [RANDOM, TARGET],
            id="in a loop",
        ),
        pytest.param(
            lambda: PIXELS.map(lambda x, y: (tf.image.random_crop(x, [2, 2, 3]), y)).batch(2),
            [RANDOM, TARGET],
            id="cropped bytes",
        ),
        pytest.param(lambda: ROWS.batch(2).map(of_layer(keras.layers.RandomFlip())), [RANDOM, TARGET], id="a layer"),
        pytest.param(
            lambda: WORDS.map(of_layer(keras.layers.StringLookup(vocabulary=["a", "b"]))), [INPUT, TARGET], id="lookup"
        ),
        pytest.param(
            lambda: Dataset.zip((ROWS.shuffle(8), ROWS.shuffle(8))).map(mixed).batch(2),
            [RANDOM, RANDOM, TARGET],
            id="mixup with weights",
        ),
        pytest.param(
            lambda: ROWS.filter(lambda x, y: tf.random.uniform([]) < 0.5).batch(2),
            [INPUT, TARGET],
            id="chosen by chance",
        ),
        pytest.param(
            lambda: WORDS.map(lambda x, y: (tf.io.decode_jpeg(tf.io.read_file(x)), y)), [INPUT, TARGET], id="files"
        ),
        pytest.param(lambda: ROWS.map(in_python), [MADE, TARGET], id="Python code"),
        pytest.param(lambda: Dataset.from_generator(generated, output_signature=SPEC), [MADE, TARGET], id="generator"),
        pytest.param(
            lambda: Dataset.range(3).interleave(lambda at: ROWS.skip(at).map(lambda x, y: (noisy(x), y))),
            [RANDOM, RANDOM],
            id="interleaved",
        ),
        pytest.param(
            lambda: Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3]]), [1, 2])).batch(2),
            [INPUT, INPUT, TARGET],
            id="ragged",
        ),
    ],
)
def test_what_random_ops_reach_may_differ_and_pixels_that_python_makes(
    make: Callable[[], tf.data.Dataset], expected: list[Same]
) -> None:
    assert sames(make()) == expected
