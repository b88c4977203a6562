"""Epochs of `fit` in mode "async": each worker takes steps while there are batches, then all meet.

Keras takes as many steps as the dataset has batches, divided alike. Here batches are handed out, so the number differs
between workers, and an epoch ends where the data does. With `steps_per_epoch` it ends after so many steps per worker on
average. All begin the next epoch together: what a rank reads or saves between two epochs is of one state.

Tested in tests/integration/test_async.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.keras_hooks.keras_private import (
    distributed_dataset,
    strategy_of_epochs,
    trainer_module,
    without_limit,
)
from tfps.types import Batches, Function, Model


@dataclass(eq=False)
class _Epochs:
    """What is known of an epoch iterator.

    Args:
        steps: `steps_per_epoch`, as the program gave it.
        taken: times that the current epoch has asked for a step.
    """

    steps: int | None
    taken: int = 0


_known: weakref.WeakKeyDictionary[Batches, _Epochs] = weakref.WeakKeyDictionary()


@functools.cache
def run_epochs_apart(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes epochs of `fit` end with the data, where workers of a `strategy_class` take batches apart; done once."""
    kind = trainer_module.TFEpochIterator
    original_reset, original_steps, original_catch = kind.reset, kind._enumerate_iterator, kind.catch_stop_iteration

    def apart(epochs: Batches) -> tf.distribute.Strategy | None:
        """Returns the strategy of `epochs` if it is for training, and workers do not step together."""
        strategy = strategy_of_epochs(epochs)
        return strategy if isinstance(strategy, strategy_class) and strategy.extended.hands_out else None

    @functools.wraps(original_reset)
    def reset(self: Batches) -> None:
        original_reset(self)
        if (strategy := apart(self)) is None:
            return
        strategy.extended.policy.in_epoch = False
        if _ends_with_data(self):
            without_limit(self)  # already here, where `fit` asks how many steps a progress bar shows
            if _hands_out(self):
                distributed_dataset(self).begin_anew()

    @functools.wraps(original_steps)
    def enumerate_iterator(self: Batches) -> Iterator[tuple[object, ...]]:
        strategy = apart(self)
        return original_steps(self) if strategy is None else _steps(strategy, self, original_steps)

    @contextlib.contextmanager
    @functools.wraps(original_catch)
    def catch_stop_iteration(self: Batches) -> Iterator[None]:
        strategy = apart(self)
        if strategy is None or not _ends_with_data(self):
            with original_catch(self), _leaving(strategy):
                yield
            return
        with _leaving(strategy):
            try:
                yield
                self.tf_sync()
            except (StopIteration, tf.errors.OutOfRangeError):
                self.data_adapter.on_epoch_end()
                _check_steps(strategy, _known_of(self))

    kind.reset, kind._enumerate_iterator, kind.catch_stop_iteration = reset, enumerate_iterator, catch_stop_iteration
    keras.Model.evaluate = _evaluating(keras.Model.evaluate, strategy_class)


def _known_of(epochs: Batches) -> _Epochs:
    if epochs not in _known:
        _known[epochs] = _Epochs(epochs.steps_per_epoch)
    return _known[epochs]


def _hands_out(epochs: Batches) -> bool:
    return getattr(distributed_dataset(epochs), "whole", None) is not None


def _ends_with_data(epochs: Batches) -> bool:
    """Whether an epoch has as many steps as there are batches for this worker, not a number that Keras counts."""
    return _known_of(epochs).steps is None or _hands_out(epochs)


@contextlib.contextmanager
def _leaving(strategy: tf.distribute.Strategy | None) -> Iterator[None]:
    """Notes the end of the epoch in the block."""
    try:
        yield
    finally:
        if strategy is not None:
            strategy.extended.policy.in_epoch = False


def _steps(strategy: tf.distribute.Strategy, epochs: Batches, original: Function) -> Iterator[tuple[object, ...]]:
    """Yields what Keras does, until a step finds that the epoch has ended."""
    known, policy = _known_of(epochs), strategy.extended.policy
    policy.in_epoch = False  # the last one may have taken just one batch, to build the model
    policy.meet()
    policy.in_epoch, known.taken = True, 0
    if _ends_with_data(epochs):
        if _hands_out(epochs):
            distributed_dataset(epochs).steps = _of_all(strategy, epochs)
        without_limit(epochs)
    for each in original(epochs):
        known.taken += 1
        yield each


def _of_all(strategy: tf.distribute.Strategy, epochs: Batches) -> int | None:
    """Returns how many steps all workers take together in an epoch; None: as many as there are batches."""
    steps, at_once = _known_of(epochs).steps, epochs.steps_per_execution
    return None if steps is None else math.ceil(steps / at_once) * int(at_once * strategy.num_workers)


def _check_steps(strategy: tf.distribute.Strategy, known: _Epochs) -> None:
    """Checks that the epoch that has ended had a step for this worker.

    Raises:
        UnsupportedError: it had not; the job has failed.
    """
    if known.taken > 1:
        return
    error = UnsupportedError(
        f"mode='async' needs at least one batch for each worker in an epoch; rank {strategy.rank} of "
        f"{strategy.num_workers} got none: use fewer workers, or smaller batches"
    )
    strategy.extended.exchange.fail(error)
    raise error


def _evaluating(original: Function, strategy_class: type[tf.distribute.Strategy]) -> Function:
    """Wraps `Model.evaluate`: its batches are not handed out, and it ends no epoch."""

    @functools.wraps(original)
    def evaluate(self: Model, *arguments: object, **options: object) -> object:
        strategy = getattr(self, "distribute_strategy", None)
        if not isinstance(strategy, strategy_class):
            return original(self, *arguments, **options)
        with strategy.extended.sharding.evaluating():
            return original(self, *arguments, **options)

    return evaluate
