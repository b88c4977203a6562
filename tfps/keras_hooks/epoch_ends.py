"""Keeps batches from being read past the last step of an epoch, where Keras forbids it.

A `PyDataset` with workers makes batches within an epoch only: Keras stops the workers when it ends, and whoever asks
for a batch then gets an error. If the data goes on (`steps_per_epoch`), staging must not read ahead into the next one.

Tested in tests/integration/test_programs.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import tensorflow as tf

from tfps.keras_hooks.keras_private import strategy_of_epochs, trainer_module
from tfps.types import Batches, Function


@functools.cache
def stop_at_epoch_ends(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Limits what iterators of a `strategy_class` read in an epoch of a `PyDataset`; done once per process."""
    kind = trainer_module.TFEpochIterator
    original = kind._enumerate_iterator

    @functools.wraps(original)
    def enumerate_iterator(self: Batches) -> Iterator[tuple[object, ...]]:
        strategy, steps = strategy_of_epochs(self), self.steps_per_epoch
        makes = getattr(self.data_adapter, "enqueuer", None) is not None
        if steps is None or not makes or not isinstance(strategy, strategy_class) or strategy.extended.hands_out:
            return original(self)
        at_once = self.steps_per_execution
        return _limited(original, self, math.ceil(steps / at_once) * at_once)

    kind._enumerate_iterator = enumerate_iterator


def _limited(original: Function, epochs: Batches, batches: int) -> Iterator[tuple[object, ...]]:
    """Yields what Keras does; the epoch's iterator may read so many `batches` in it."""
    allowed = False
    for begin, end, iterator in original(epochs):
        if not allowed and hasattr(iterator, "allow"):  # one that reads ahead
            iterator.allow(batches)
        allowed = True
        yield begin, end, iterator
