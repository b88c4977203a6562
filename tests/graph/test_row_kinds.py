"""What tensors are to the rows of a batch, as their graph shows."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from tfps.graph.ops import place_of
from tfps.graph.row_kinds import FIXED, Kind, Of, RowKinds
from tfps.types import Value

VARIABLE = tf.Variable(tf.ones([3, 2]))
CLASSES = 3
# Functions of x, float32 [rows, 3], and w, float32 [rows].
KINDS: dict[str, tuple[Of, Callable[[Value, Value], Value]]] = {
    "a_mean": (Of.MEAN, lambda x, w: tf.reduce_mean(tf.square(x))),
    "a_mean_of_sums_within_rows": (Of.MEAN, lambda x, w: tf.reduce_mean(tf.reduce_sum(x, 1))),
    "a_mean_over_rows_first": (Of.MEAN, lambda x, w: tf.reduce_sum(tf.reduce_mean(x, 0))),
    "means_with_factors_and_a_penalty": (
        Of.MEAN,
        lambda x, w: 0.5 * tf.reduce_mean(x) - tf.reduce_mean(w) / 3.0 + tf.nn.l2_loss(VARIABLE),
    ),
    "a_sum_by_the_number_of_rows": (Of.MEAN, lambda x, w: tf.reduce_sum(w) / tf.cast(tf.shape(w)[0], tf.float32)),
    "a_sum_by_at_least_one_row": (
        Of.MEAN,
        lambda x, w: tf.reduce_sum(w) / tf.maximum(tf.cast(tf.size(x), tf.float32), 1.0),
    ),
    "a_mean_of_ones": (Of.FIXED, lambda x, w: tf.reduce_mean(tf.ones_like(x))),
    "ones_of_each_row": (Of.COUNT, lambda x, w: tf.reduce_sum(tf.reduce_mean(tf.ones_like(x), 1))),
    "shares_of_a_mean": (Of.SHARES, lambda x, w: w / tf.cast(tf.shape(x)[0], tf.float32)),
    "a_sum_of_shares": (Of.MEAN, lambda x, w: tf.reduce_sum(w / tf.cast(tf.shape(x)[0], tf.float32))),
    "a_sum_by_a_size_within_rows": (Of.SUM, lambda x, w: tf.reduce_sum(x) / tf.cast(tf.shape(x)[1], tf.float32)),
    "a_sum_by_a_constant": (Of.SUM, lambda x, w: tf.reduce_sum(w) / 32.0),
    "a_sum": (Of.SUM, lambda x, w: tf.reduce_sum(w) + 1.0),
    "half_the_squares": (Of.SUM, lambda x, w: tf.nn.l2_loss(x)),
    "a_sum_of_columns": (Of.SUM, lambda x, w: tf.reduce_sum(x, 0)),
    "a_weighted_mean": (Of.TOTAL, lambda x, w: tf.reduce_sum(x[:, 0] * w) / tf.reduce_sum(w)),
    "a_weighted_mean_that_is_safe": (
        Of.TOTAL,
        lambda x, w: tf.math.divide_no_nan(tf.reduce_sum(x[:, 0] * w), tf.maximum(tf.reduce_sum(w), 1.0)) + 1.0,
    ),
    "a_weighted_mean_of_keras": (Of.TOTAL, lambda x, w: keras.ops.average(x[:, 0], weights=w)),
    "a_mean_of_chosen_rows": (Of.TOTAL, lambda x, w: tf.reduce_mean(tf.boolean_mask(x[:, 0], w > 0))),
    "chosen_rows": (Of.PICKED, lambda x, w: tf.boolean_mask(x, w > 0)[:, 0]),
    "a_mean_of_as_many_of_each_row": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(tf.reshape(tf.boolean_mask(x, x > 0), [-1, 2])),
    ),
    "weights_that_sum_to_one": (Of.DIVIDED, lambda x, w: x[:, 0] * (w / tf.maximum(tf.reduce_sum(w), 1.0))),
    "by_one_over_a_sum": (Of.DIVIDED, lambda x, w: w * (1.0 / tf.reduce_sum(w))),
    "a_root_of_a_mean": (Of.CURVED, lambda x, w: tf.sqrt(tf.reduce_mean(x))),
    "a_product_of_means": (Of.CURVED, lambda x, w: tf.reduce_mean(x) * tf.reduce_mean(w)),
    "the_largest": (Of.CURVED, lambda x, w: tf.reduce_max(w)),
    "a_number_of_each_row": (Of.ROWS, lambda x, w: tf.maximum(tf.norm(x, axis=1) - w, 0.0)),
    "a_column_of_each_row": (Of.ROWS, lambda x, w: tf.expand_dims(tf.reduce_sum(x, 1), 1)),
    "standardized_by_the_batch": (
        Of.ROWS,
        lambda x, w: (x - tf.reduce_mean(x, 0)) / (tf.math.reduce_std(x, 0) + 1e-3),
    ),
    "a_mean_of_what_is_standardized": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(tf.square((x - tf.reduce_mean(x, 0)) / tf.math.reduce_std(x, 0))),
    ),
    "time_before_rows": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(tf.reduce_sum(tf.transpose(x), 0)),
    ),
    "pairs_within_the_batch": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(x)[0]), x @ tf.transpose(x))
        ),
    ),
    "pairs_by_hand": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(x, x, transpose_b=True), 1)),
    ),
    "noise_as_long_as_the_batch": (Of.MEAN, lambda x, w: tf.reduce_mean(tf.random.normal((tf.shape(x)[0], 2)))),
    "noise_of_its_own": (Of.FIXED, lambda x, w: tf.reduce_mean(tf.random.normal([8, 2]))),
    "a_penalty": (Of.FIXED, lambda x, w: tf.nn.l2_loss(VARIABLE)),
    "a_function": (
        Of.TOTAL,
        lambda x, w: tf.function(lambda y: tf.reduce_sum(y) / tf.reduce_sum(w))(x),
    ),
    "a_mean_where_a_condition_holds": (
        Of.MEAN,
        lambda x, w: tf.where(VARIABLE[0, 0] > 0, tf.reduce_mean(x), tf.reduce_mean(w)),
    ),
    "found_in_a_table": (Of.MEAN, lambda x, w: tf.reduce_mean(tf.gather(VARIABLE, tf.cast(x[:, 0], tf.int32)))),
    "found_by_unique_ids": (
        Of.MEAN,
        lambda x, w: tf.reduce_mean(tf.gather(tf.unique(w)[0], tf.unique(w)[1])),
    ),
}


def kinds_of(function: Callable[[Value, Value], Value], rows: int | None) -> tuple[RowKinds, tf.Tensor]:
    specs = [tf.TensorSpec([rows, 3]), tf.TensorSpec([rows])]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    kinds = RowKinds(rows)
    for each in graph.inputs[:2]:
        kinds.note(each, Kind(Of.ROWS))
    return kinds, graph.outputs[0].op.inputs[0]  # within an Identity


@pytest.mark.parametrize("name", KINDS)
def test_a_graph_shows_what_a_number_is_to_the_rows(name: str) -> None:
    expected, function = KINDS[name]
    kinds, tensor = kinds_of(function, None)
    assert kinds.of(tensor).of is expected


@pytest.mark.parametrize(
    "name",
    [
        *(
            "a_mean",
            "a_sum",
            "a_weighted_mean",
            "a_number_of_each_row",
            "a_mean_over_rows_first",
            "a_sum_by_a_constant",
        ),
        *("weights_that_sum_to_one", "pairs_by_hand", "a_mean_of_what_is_standardized", "time_before_rows"),
    ],
)
def test_so_it_does_where_batches_have_a_fixed_number_of_rows(name: str) -> None:
    expected, function = KINDS[name]
    kinds, tensor = kinds_of(function, 4)
    assert kinds.of(tensor).of is expected


def test_a_mean_that_keeps_its_dimension_is_no_number_of_a_row() -> None:
    kinds, tensor = kinds_of(lambda x, w: tf.reduce_mean(w, 0, keepdims=True), 1)
    assert tensor.shape == [1]
    assert kinds.of(tensor).of is Of.MEAN


def test_rows_are_followed_where_they_are_not_first() -> None:
    kinds, tensor = kinds_of(lambda x, w: tf.stack([w, w]), None)
    assert kinds.of(tensor) == Kind(Of.ROWS, 1)
    kinds, tensor = kinds_of(lambda x, w: tf.reduce_mean(tf.stack([w, w]), 0), None)
    assert kinds.of(tensor) == Kind(Of.ROWS, 0)


def test_what_is_noted_counts_whatever_it_is_computed_from() -> None:
    kinds, tensor = kinds_of(lambda x, w: tf.reduce_sum(x) / tf.reduce_sum(w), None)
    for each in tensor.op.inputs:
        kinds.note(each, FIXED)
    assert kinds.of(tensor) == FIXED


def test_the_line_that_makes_it_no_mean_is_found() -> None:
    def loss(x: Value, w: Value) -> Value:
        total, count = tf.reduce_sum(x), tf.reduce_sum(w)
        quotient = total / count
        return 2.0 * (quotient + tf.reduce_mean(x))

    kinds, tensor = kinds_of(loss, None)
    assert "(quotient = total / count)" in place_of(kinds.origin(tensor).op)
    assert place_of(kinds.origin(tensor).op).startswith("test_row_kinds.py:")
