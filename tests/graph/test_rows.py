"""The row that fills the place of missing ones; with real replicas: tests/integration/test_rows.py."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.rows import Fillers, cut
from tfps.types import Structure

KINDS = {
    "dense": tf.constant([[1.0, 2.0], [3.0, 4.0]]),
    "text": tf.constant(["a", "b"]),
    "ragged": tf.ragged.constant([[1, 2, 3], [4]]),
    "sparse": tf.sparse.from_dense([[0, 5], [6, 0]]),
}


def plain(value: object) -> list[object]:
    """As a list, whatever kind of tensor it is."""
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value)
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()  # type: ignore


def none_of(value: object) -> object:
    return tf.sparse.slice(value, [0, 0], [0, 2]) if isinstance(value, tf.SparseTensor) else value[:0]  # type: ignore


def relaxed(value: object) -> tf.TypeSpec:
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], value.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, 2], value.dtype)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)  # type: ignore


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("traced", [False, True], ids=["eagerly", "in a graph"])
def test_it_is_the_first_row_of_the_last_batch_that_had_any(kind: str, traced: bool) -> None:
    fillers, value = Fillers(), KINDS[kind]

    def filled(rows: tf.Tensor, batch: Structure) -> Structure:
        return fillers.fill(0, rows, (batch, 7))[0]

    if traced:
        filled = tf.function(filled, input_signature=[tf.TensorSpec([], tf.int64), relaxed(value)])
    none, two = tf.constant(0, tf.int64), tf.constant(2, tf.int64)
    assert len(plain(filled(none, none_of(value)))) == 1, "zeros, or nothing, before there was a batch with rows"
    assert plain(filled(two, value)) == plain(value)
    assert plain(filled(none, none_of(value))) == plain(value)[:1]


def test_only_what_has_no_rows_is_filled() -> None:
    batch, table = tf.zeros([0, 3]), tf.constant([[1.0], [2.0]])
    filled = Fillers().fill(0, tf.constant(0, tf.int64), {"batch": batch, "table": table, "none": None})
    assert filled["batch"].shape == [1, 3]
    assert filled["table"] is table
    assert filled["none"] is None


def test_what_belongs_to_it_is_cut_off_from_what_a_replica_returns() -> None:
    results = {"each": tf.constant([1.0]), "number": tf.constant(2.0), "more": tf.constant([1.0, 2.0])}
    left = cut(tf.constant(0, tf.int64), results)
    assert left["each"].shape == [0]
    assert float(left["number"]) == 2.0
    assert left["more"].shape == [2]
    kept = cut(tf.constant(1, tf.int64), results)
    np.testing.assert_array_equal(kept["each"], [1.0])
