"""Builds models before the first step, as Keras does under every strategy.

Tested in tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfps.keras_hooks.keras_private import distributed_dataset
from tfps.types import Batches, Model, Structure, Value


@functools.cache
def build_by_first_replica(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Replaces the mean of the replicas' first batches, with which Keras builds a model: it fails if sizes differ.

    The dataset's spec suffices where complete. Taking a batch would give a shuffled dataset its second order in the
    first epoch. Done once per process.
    """
    original = keras.Model._maybe_symbolic_build

    @functools.wraps(original)
    def maybe_symbolic_build(self: Model, iterator: Batches = None, data_batch: Structure = None) -> None:
        if iterator is not None and isinstance(self.distribute_strategy, strategy_class):
            data_batch = _described_batch(iterator)
            if data_batch is None:
                _, _, batches = next(iter(iterator))
                data_batch = keras.tree.map_structure(_example, next(batches))
            iterator = None
        original(self, iterator, data_batch)

    keras.Model._maybe_symbolic_build = maybe_symbolic_build


def _described_batch(epochs: Batches) -> Structure:
    """Returns the specs of one replica's batch in `fit`, None if any size but the first is undefined."""
    dataset = distributed_dataset(epochs)
    spec = dataset.sources[0].element_spec if hasattr(dataset, "sources") else dataset.element_spec
    for each in tf.nest.flatten(spec):
        if not isinstance(each, tf.TensorSpec) or not each.shape[1:].is_fully_defined():
            return None
    return spec


def _example(value: Value) -> Value:
    """Returns the first replica's part of `value`, with at least one row: Keras takes losses of no rows for vectors."""
    if isinstance(value, tf.distribute.DistributedValues):
        value = value.values[0]
    if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] == 0:
        return tf.zeros([1, *value.shape[1:]], value.dtype)
    return value
