"""A number for a batch is computed from sums over rows: those of its parts, added up, give that of the whole."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.row_kinds import Kind, Of, RowKinds
from tfps.graph.row_sums import row_sums
from tfps.types import Value

SUM, MEAN = tf.reduce_sum, tf.reduce_mean
# Functions of x, float32 [rows, 3], and w, float32 [rows], of which some are 0.
PROVEN: dict[str, Callable[[Value, Value], Value]] = {
    "a_quotient": lambda x, w: SUM(x[:, 0] * w) / SUM(w),
    "with_factors": lambda x, w: 1.0 - 2.0 * tf.math.divide_no_nan(SUM(x), SUM(w)) / 3.0,
    "at_least_one": lambda x, w: SUM(x[:, 1] * w) / tf.maximum(SUM(w), 1.0),
    "smoothed": lambda x, w: (2.0 * SUM(x[:, 0] * w) + 1.0) / (SUM(x) + SUM(w) + 1.0),
    "a_mean_of_chosen": lambda x, w: MEAN(tf.boolean_mask(x, w > 0)[:, 0]),
    "accuracy_of_chosen": lambda x, w: MEAN(
        tf.cast(tf.argmax(tf.boolean_mask(x, w > 0), -1) == tf.cast(tf.boolean_mask(w, w > 0), tf.int64), tf.float32)
    ),
    "how_many_are_chosen": lambda x, w: tf.cast(tf.shape(tf.boolean_mask(x, w > 0))[0], tf.float32),
    "a_root_of_a_mean": lambda x, w: tf.sqrt(MEAN(tf.square(x))),
    "a_variance": lambda x, w: MEAN(tf.square(w)) - tf.square(MEAN(w)),
    "beside_a_mean": lambda x, w: SUM(x[:, 0] * w) / SUM(w) + MEAN(x),
    "a_count_in_a_curve": lambda x, w: tf.sqrt(SUM(x) / tf.cast(tf.shape(x)[0] + 1, tf.float32)),
    "f1_of_classes": lambda x, w: MEAN(
        2.0
        * SUM(tf.nn.softmax(x) * tf.one_hot(tf.cast(w, tf.int32), 3), 0)
        / (SUM(tf.nn.softmax(x), 0) + SUM(tf.one_hot(tf.cast(w, tf.int32), 3), 0))
    ),
    "by_keras": lambda x, w: keras.ops.sum(keras.ops.equal(keras.ops.argmax(x, -1), 1)) / keras.ops.sum(w > 0),
    "an_average_of_keras": lambda x, w: keras.ops.average(x[:, 0], weights=w),
}
NOT_PROVEN: dict[str, Callable[[Value, Value], Value]] = {
    "a_maximum": lambda x, w: tf.reduce_max(x),
    "about_the_mean_of_the_batch": lambda x, w: 1.0 - SUM(tf.square(x[:, 0] - w)) / SUM(tf.square(w - MEAN(w))),
    "a_correlation": lambda x, w: tf.sqrt(MEAN((x[:, 0] - MEAN(x[:, 0])) * (w - MEAN(w)))),
    "pairs": lambda x, w: SUM(w[:, None] - w[None]) / SUM(w),
    "products_of_rows": lambda x, w: SUM(tf.matmul(x, x, transpose_b=True)) / SUM(w),
    "all_but_the_first": lambda x, w: SUM(w[1:]) / SUM(x),
    "normalized_weights": lambda x, w: SUM(x[:, 0] * (w / SUM(w))),
    "sorted": lambda x, w: SUM(tf.sort(w) * x[:, 0]) / SUM(w),
    "softmax_over_rows": lambda x, w: SUM(tf.nn.softmax(w) * x[:, 0]) / SUM(w),
    "as_python_computes": lambda x, w: tf.ensure_shape(tf.numpy_function(np.max, [x], tf.float32), []) / SUM(w),
}
X = np.random.default_rng(0).normal(size=(11, 3)).astype("float32") ** 2
W = np.array([0, 1, 0, 2, 1, 0, 0, 0, 1, 2, 0], "float32")
PARTS = [slice(0, 5), slice(5, 8), slice(8, 11), slice(11, 11)]  # the second has no weight, the last no row


def traced(function: Callable[[Value, Value], Value], rows: int | None) -> tuple[Value, Value | None]:
    """What it gives and the sums, functions of x and w; and the rest, of sums."""
    rests: list[Value] = []

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([rows, 3]), tf.TensorSpec([rows])])
    def step(x: Value, w: Value) -> list[Value]:
        kinds = RowKinds(rows)
        for each in (x, w):
            kinds.note(each, Kind(Of.ROWS))
        number = function(x, w)
        found = row_sums(kinds, number, tf.shape(x)[0])
        if found is not None:
            rests.append(tf.function(found.rest, input_signature=[tf.TensorSpec(found.sums.shape, tf.float64)]))
        return [number] if found is None else [number, found.sums]

    step.get_concrete_function()
    return step, rests[0] if rests else None


@pytest.mark.parametrize("name", PROVEN)
def test_sums_of_parts_give_the_number_of_the_whole(name: str) -> None:
    step, rest = traced(PROVEN[name], None)
    assert rest is not None
    whole = step(X, W)[0].numpy()
    np.testing.assert_allclose(rest(sum(step(X[part], W[part])[1] for part in PARTS)), whole, rtol=1e-5)
    apart = np.mean([step(X[part], W[part])[0] for part in PARTS[:3]])
    assert not abs(apart - whole) < 1e-4 * abs(whole)  # NaN, too


@pytest.mark.parametrize("name", NOT_PROVEN)
def test_what_does_not_come_from_single_rows_has_no_sums(name: str) -> None:
    assert traced(NOT_PROVEN[name], None)[1] is None
