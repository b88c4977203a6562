"""Slices of lookups that all replicas make alike: marked, gathered, summed."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.common_rows import Marks, mark, merge
from tfps.graph.rows import rows_of
from tfps.graph.shares import Share
from tfps.graph.unique_rows import made_unique, seem_unique
from tfps.types import Value

ROWS = tf.TensorSpec([None, None], tf.int64)
ONCE = 1 << 48  # of the first lookup of ids that are unique
COMMON = Marks(common=True, unique=False, dtype=tf.int32)


def marked(lookups: Callable[[tf.Tensor], Value], spec: tf.TensorSpec = ROWS) -> list[int] | None:
    """Returns the marked indices for a batch of two rows [5, 6]; None if none are marked."""

    @tf.function(input_signature=[spec])
    def function(batch: tf.Tensor) -> tf.Tensor:
        share = Share(rows_of(batch), 2, None, tf.identity, None, (batch,))
        indices = tf.concat(list(map(tf.convert_to_tensor, lookups(batch))), 0)
        found = mark(tf.IndexedSlices(tf.ones([tf.size(indices), 1]), indices), share)
        return indices if found is None else found[0].indices

    indices: list[int] = function(tf.constant([[5, 6], [5, 6]], tf.int64)).numpy().tolist()
    return indices if min(indices) < 0 or max(indices) >= ONCE else None


def test_what_is_not_from_the_batch_is_marked() -> None:
    assert marked(lambda batch: [tf.reshape(batch, [-1])]) is None
    assert marked(lambda batch: [tf.range(tf.shape(batch, tf.int64)[0])]) is None
    assert marked(lambda batch: [tf.range(tf.shape(batch, tf.int64)[1])]) == [-1, -2]
    assert marked(lambda batch: [batch[0], np.array([0, 3])]) == [5, 6, -1, -4]


def test_what_repeats_for_each_row_is_not_marked() -> None:
    fixed = tf.TensorSpec([2, 2], tf.int64)
    assert marked(lambda batch: [tf.tile(tf.range(3), [batch.shape[0]])], fixed) is None
    assert marked(lambda batch: [tf.range(4)], fixed) == [-1, -2, -3, -4]


@pytest.mark.parametrize("other", [[-1, 7, -4], [-1, 7, -3], [-1, 7]], ids=["alike", "unlike", "fewer"])
def test_marked_slices_are_summed_if_all_replicas_have_the_same(other: list[int]) -> None:
    gathered = [7, -1, -4, *other]
    gradient = tf.IndexedSlices(tf.range(1.0, len(gathered) + 1)[:, None], tf.constant(gathered))
    merged = merge(gradient, 2, COMMON)
    whole, expected = np.zeros(8), np.zeros(8)
    np.add.at(whole, merged.indices.numpy(), merged.values.numpy()[:, 0])
    np.add.at(expected, [each if each >= 0 else -1 - each for each in gathered], np.arange(1, len(gathered) + 1))
    np.testing.assert_array_equal(whole, expected)
    assert len(merged.indices) == (4 if other[-1] == -4 else len(gathered))


def test_no_slices_at_all_stay_none() -> None:
    merged = merge(tf.IndexedSlices(tf.zeros([0, 3]), tf.zeros([0], tf.int64)), 3, COMMON)
    assert merged.values.shape == (0, 3)
    assert merged.indices.shape == (0,)


@tf.function
def nested(ids: tf.Tensor) -> tf.Tensor:
    return tf.unique(tf.reshape(ids, [-1]))[0]


def test_ids_that_a_lookup_takes_once_are_marked_with_its_number() -> None:
    def lookups(batch: tf.Tensor) -> Value:
        flat = tf.reshape(batch, [-1])
        once, where = tf.unique(flat)
        plain = [tf.gather(once, where), once % 6]  # each row's again; nobody can tell
        return [once, plain[0], nested(flat) + 1, keras.ops.unique(flat), tf.boolean_mask(once, once > 5), plain[1]]

    first, second, third, fourth = (ONCE * number for number in (1, 2, 3, 4))
    once = [first + 5, first + 6, second + 6, second + 7, third + 5, third + 6, fourth + 6]
    found = marked(lookups)
    assert found is not None
    assert [each for each in found if each >= ONCE] == once
    assert [each for each in found if each < ONCE] == [5, 6, 5, 6, 5, 0]


def test_the_gradient_of_a_lookup_within_a_function_is_marked() -> None:
    table, found = tf.Variable(tf.ones([8, 1])), []

    @tf.function
    def lookup(ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(table, nested(ids))

    @tf.function(input_signature=[ROWS])
    def function(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(lookup(batch) ** 2)
        found.append(made_unique(tape.gradient(loss, table).indices))

    function.get_concrete_function()
    assert found == [True]


def test_slices_of_ids_that_are_unique_are_summed_for_each_lookup() -> None:
    indices = [3, ONCE + 3, ONCE + 1, 2 * ONCE + 3, 3, ONCE + 2, ONCE + 1, 2 * ONCE + 3]
    values = tf.constant([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0], [64.0], [128.0]])
    marks = Marks(common=False, unique=True, dtype=tf.int32)
    merged = merge(tf.IndexedSlices(values, tf.constant(indices, tf.int64)), 2, marks)
    assert merged.indices.numpy().tolist() == [3, 3, 3, 1, 3, 2]
    assert merged.values.numpy()[:, 0].tolist() == [1.0, 16.0, 2.0, 68.0, 136.0, 32.0]
    assert merged.indices.dtype == tf.int32


def test_slices_of_both_kinds_are_summed() -> None:
    indices = tf.constant([-3, ONCE + 3, 5, -3, ONCE + 3], tf.int64)
    merged = merge(tf.IndexedSlices(tf.range(1.0, 6.0)[:, None], indices), 2, Marks(True, True, tf.int64))
    assert dict(zip(merged.indices.numpy(), merged.values.numpy()[:, 0], strict=True)) == {5: 3.0, 2: 5.0, 3: 7.0}


@pytest.mark.parametrize(
    ("own", "gathered", "seem"),
    [
        ([4, 2], [4, 2, 2, 7], True),
        ([4, 2], [4, 2, 3, 7], False),  # others have none of them
        ([4, 4], [4, 4, 4, 7], False),  # twice
        ([], [4, 7], False),
    ],
)
def test_eager_ids_that_seem_to_be_made_unique_are_told(own: list[int], gathered: list[int], seem: bool) -> None:
    assert seem_unique(tf.constant(own, tf.int64), tf.constant(gathered, tf.int64)) == seem
