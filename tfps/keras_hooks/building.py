"""Builds models before the first step, as Keras does under every strategy but not without one.

Plain Keras creates in the first step what is missing. So does tfps where Keras cannot build: a model without `call()`,
whose `train_step` uses layers and models of its own (GANs, VAEs, diffusion), or one whose `call()` is only a part.

Tested in tests/integration/test_programs.py and tests/integration/test_rows.py.
"""

from __future__ import annotations

import functools
import logging

import keras
import tensorflow as tf

from tfps.keras_hooks.keras_private import distributed_dataset, fully_built
from tfps.types import Batches, Model, Structure, Value

logger = logging.getLogger("tfps")


@functools.cache
def build_if_possible(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras build models of a `strategy_class` by one replica's batch, if it can; done once per process.

    Keras takes the mean of the replicas' first batches, which fails if sizes differ. The dataset's spec suffices where
    complete. Taking a batch would give a shuffled dataset its second order in the first epoch.
    """
    original = keras.Model._maybe_symbolic_build

    @functools.wraps(original)
    def maybe_symbolic_build(self: Model, iterator: Batches = None, data_batch: Structure = None) -> None:
        strategy = self.distribute_strategy
        if not isinstance(strategy, strategy_class):
            original(self, iterator, data_batch)
            return
        if type(self).call is keras.Model.call:  # no `call()`: Keras would warn of layers that are not built
            return
        if iterator is not None:
            data_batch = _described_batch(iterator)
            if data_batch is None:
                _, _, batches = next(iter(iterator))
                data_batch = keras.tree.map_structure(_example, next(batches))
        optimizer = None if self.optimizer is None or self.optimizer.built else self.optimizer
        if optimizer is not None:
            optimizer.built = True  # for Keras: it may only be built with all variables
        try:
            original(self, None, data_batch)
        except Exception as error:
            # What is wrong with the model, the first step will say.
            logger.debug("tfps: the first step builds %s, as Keras cannot: %s", self.name, error)
            return
        finally:
            if optimizer is not None:
                optimizer.built = False
        if optimizer is not None and fully_built(self):
            with strategy.scope():
                optimizer.build(self.trainable_variables)

    keras.Model._maybe_symbolic_build = maybe_symbolic_build


def _described_batch(epochs: Batches) -> Structure:
    """Returns the specs of one replica's batch in `fit`, None if any size but the first is undefined.

    An optional (a generator's None) becomes None, as in Keras' steps.
    """
    dataset = distributed_dataset(epochs)
    spec = dataset.sources[0].element_spec if hasattr(dataset, "sources") else dataset.element_spec
    spec = keras.tree.map_structure(lambda each: None if isinstance(each, tf.OptionalSpec) else each, spec)
    for each in filter(None, keras.tree.flatten(spec)):
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
