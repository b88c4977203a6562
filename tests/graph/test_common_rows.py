"""Slices of lookups that all replicas make alike: marked, gathered, summed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph.common_rows import mark, merge
from tfps.graph.rows import rows_of
from tfps.graph.shares import Share
from tfps.types import Value

ROWS = tf.TensorSpec([None, None], tf.int64)


def marked(lookups: Callable[[tf.Tensor], Value], spec: tf.TensorSpec = ROWS) -> list[int] | None:
    """Returns the marked indices for a batch of two rows [5, 6]; None if none are marked."""

    @tf.function(input_signature=[spec])
    def function(batch: tf.Tensor) -> tf.Tensor:
        share = Share(rows_of(batch), 2, None, tf.identity, None, (batch,))
        indices = tf.concat(list(map(tf.convert_to_tensor, lookups(batch))), 0)
        gradient = mark(tf.IndexedSlices(tf.ones([tf.size(indices), 1]), indices), share)
        return indices if gradient is None else gradient.indices

    indices: list[int] = function(tf.constant([[5, 6], [5, 6]], tf.int64)).numpy().tolist()
    return indices if min(indices) < 0 else None


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
    merged = merge(tf.IndexedSlices(tf.range(1.0, len(gathered) + 1)[:, None], tf.constant(gathered)), 2)
    whole, expected = np.zeros(8), np.zeros(8)
    np.add.at(whole, merged.indices.numpy(), merged.values.numpy()[:, 0])
    np.add.at(expected, [each if each >= 0 else -1 - each for each in gathered], np.arange(1, len(gathered) + 1))
    np.testing.assert_array_equal(whole, expected)
    assert len(merged.indices) == (4 if other[-1] == -4 else len(gathered))


def test_no_slices_at_all_stay_none() -> None:
    merged = merge(tf.IndexedSlices(tf.zeros([0, 3]), tf.zeros([0], tf.int64)), 3)
    assert merged.values.shape == (0, 3)
    assert merged.indices.shape == (0,)
