"""Batches that are cut by rows: each worker trains on its rows of every batch.

Those made in Python (`keras.utils.PyDataset`, generators): TensorFlow would give the workers whole batches in turn,
each cut into one step per replica. Batches would have other rows than in one process, and some workers would get more
steps than others. And those with a scalar beside the rows, which TensorFlow cannot cut: every replica gets it as it is.
"""

from __future__ import annotations

import functools

import tensorflow as tf

from tfps.graph.tf_private import made_by_generator
from tfps.types import Batches, Structure, Value


def of_whole_job(dataset: Batches) -> bool:
    """Returns whether `dataset` yields batches made in Python, whose size TensorFlow does not know."""
    if not isinstance(dataset, tf.data.Dataset) or not made_by_generator(dataset):
        return False
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.AUTO)


def has_scalars(dataset: Batches) -> bool:
    """Returns whether batches of `dataset` have scalars beside what has rows."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    ranks = {getattr(getattr(spec, "shape", None), "rank", None) for spec in tf.nest.flatten(dataset.element_spec)}
    return 0 in ranks and len(ranks) > 1


def own_rows(dataset: tf.data.Dataset, replicas: int, first: int, count: int) -> tf.data.Dataset:
    """Returns the rows of replicas `first` to `first + count - 1` of `replicas`, one element each.

    Parts of a batch differ by at most one row; if it has fewer rows than replicas, some are empty. Nothing is read
    ahead of those that Keras reads without, as it may be too early there (keras_hooks/epoch_ends.py).
    """

    def parts(*batch: object) -> tf.data.Dataset:
        elements = [_part(replica, replicas, batch) for replica in range(first, first + count)]
        datasets = [tf.data.Dataset.from_tensors(element) for element in elements]
        return functools.reduce(tf.data.Dataset.concatenate, datasets)

    split = dataset.flat_map(parts)
    if (batches := int(dataset.cardinality())) >= 0:
        split = split.apply(tf.data.experimental.assert_cardinality(batches * count))
    return split if dataset.options().autotune.enabled is False else split.prefetch(count)


def _leading(value: Value) -> Value:
    """Returns the number of rows of `value`, None if it has no row dimension."""
    if isinstance(value, tf.RaggedTensor):
        return value.nrows(tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    return tf.shape(value)[0] if isinstance(value, tf.Tensor) and value.shape.rank != 0 else None


def _part(replica: int, replicas: int, batch: tuple[Structure, ...]) -> Structure:
    def cut(value: Value) -> Value:
        rows = _leading(value)
        if rows is None:
            return value
        start, end = (-(-rows * part // replicas) for part in (replica, replica + 1))  # the first parts may be larger
        if isinstance(value, tf.SparseTensor):
            shape = tf.cast(value.dense_shape, tf.int64)
            begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
            return tf.sparse.slice(value, begin, tf.concat([[tf.cast(end - start, tf.int64)], shape[1:]], 0))
        return value[start:end]

    parts = tf.nest.map_structure(cut, batch)
    return parts if len(parts) > 1 else parts[0]
