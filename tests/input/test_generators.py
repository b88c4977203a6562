"""Batches that Python makes are cut by rows, so that a step has the rows that it has in one process."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tfps.input import datasets
from tfps.types import Structure, Value

SPEC = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.string))


def generated(sizes: list[int]) -> tf.data.Dataset:
    def batches() -> Iterator[Structure]:
        start = 0
        for size in sizes:
            rows = np.arange(start, start + size)
            yield np.stack([rows, -rows], 1).astype(np.float32), rows, "name"
            start += size

    return tf.data.Dataset.from_generator(batches, output_signature=SPEC).prefetch(1)


@pytest.mark.parametrize(("replicas", "count"), [(2, 1), (3, 1), (4, 2), (6, 3)])
def test_the_replicas_of_a_step_have_the_rows_of_one_batch(replicas: int, count: int) -> None:
    sizes = [12, 12, 7]
    parts: dict[int, list[Value]] = {}
    for first in range(0, replicas, count):
        for number, (x, y, name) in enumerate(datasets.own_rows(generated(sizes), replicas, first, count)):
            parts.setdefault(number // count, []).append(y.numpy())
            np.testing.assert_array_equal(x[:, 1], -y.numpy().astype(np.float32))
            assert name == b"name"
    assert len(parts) == len(sizes)
    for step, rows in parts.items():
        assert np.concatenate(rows).tolist() == list(range(sum(sizes[:step]), sum(sizes[: step + 1])))
        assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_of_a_batch_with_fewer_rows_than_replicas_the_first_ones_have_them() -> None:
    for first, expected in ((0, [2, 1, 1]), (1, [2, 0, 1])):
        rows = [y.numpy().tolist() for _, y, _ in datasets.own_rows(generated([4, 1, 2]), 2, first, 1)]
        assert [len(each) for each in rows] == expected


def test_single_sparse_and_ragged_values_are_cut_too() -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [4, 5, 6]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 4]])
    for value, shown in ((ragged, ragged.to_tensor()), (sparse, tf.sparse.to_dense(sparse))):
        dataset = tf.data.Dataset.from_tensors(value)
        cut = [next(iter(datasets.own_rows(dataset, 2, first, 1))) for first in (0, 1)]
        dense = [each.to_tensor() if isinstance(each, tf.RaggedTensor) else tf.sparse.to_dense(each) for each in cut]
        np.testing.assert_array_equal(dense[0], shown[:2, : dense[0].shape[1]])
        np.testing.assert_array_equal(dense[1], shown[2:])


def test_only_what_python_makes_in_batches_of_its_own_is_cut() -> None:
    assert datasets.of_all_workers(generated([4]))
    assert datasets.of_all_workers(generated([4]).with_options(tf.data.Options()))
    rows = tf.data.Dataset.from_generator(lambda: iter(range(4)), output_signature=SPEC[2])
    assert not datasets.of_all_workers(rows.batch(2))
    assert not datasets.of_all_workers(tf.data.Dataset.range(4).batch(2))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    assert not datasets.of_all_workers(generated([4]).with_options(options))


class Batches(keras.utils.PyDataset):
    """Two batches of three rows."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Structure:
        return np.zeros([3, 2], np.float32), np.full([3], index)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_keras_makes_of_a_py_dataset_is_cut(workers: int) -> None:
    adapter = PyDatasetAdapter(Batches(workers=workers))
    assert datasets.of_all_workers(adapter.get_tf_dataset())


def test_what_keras_makes_of_a_generator_is_cut() -> None:
    adapter = GeneratorDataAdapter(Batches()[index] for index in range(2))
    assert datasets.of_all_workers(adapter.get_tf_dataset())
