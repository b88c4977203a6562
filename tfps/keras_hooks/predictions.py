"""`Model.predict` with several ranks: each rank predicts all of its input, as a single process does.

Keras concatenates only the predictions of this worker's replicas: with sharded data no rank would have all of them.
Predicting needs no other rank, so a single rank may call it, also within an epoch (in a callback): there it predicts by
this worker's own moving statistics, as combining them takes all ranks.

Tested in tests/integration/test_semantics.py and tests/integration/test_programs.py.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfps.keras_hooks.keras_private import strategy_of_epochs, trainer_module
from tfps.types import Batches, Function, Model


class Sharding(threading.local):
    """Per-thread switch for dividing work between workers: off while predicting; other threads may train."""

    on = True
    evaluates = False  # whether this thread evaluates
    in_epoch = False  # whether this thread is within an epoch of `fit`, or between steps of `evaluate`

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """In the block datasets are not sharded, iterators do not wait for other ranks, noise is a single process's."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """In the block work is divided for evaluation."""
        before, self.evaluates = self.evaluates, True
        try:
            yield
        finally:
            self.evaluates = before

    @contextlib.contextmanager
    def within_epoch(self) -> Iterator[None]:
        """In the block a rank that predicts does so alone."""
        before, self.in_epoch = self.in_epoch, True
        try:
            yield
        finally:
            self.in_epoch = before

    @property
    def combines(self) -> bool:
        """Whether all ranks distribute the dataset that this thread distributes now, as far as is known."""
        return self.on or not self.in_epoch

    def kept_off(self, function: Function) -> Function:
        """Wraps `function` so that it is off in replica threads, too."""

        def in_replica(*arguments: object, **options: object) -> object:
            with self.off():
                return function(*arguments, **options)

        return in_replica


@functools.cache
def predict_everything(strategy_class: type[tf.distribute.Strategy]) -> None:
    """Makes Keras give all data to every rank, for models of a `strategy_class`; done once per process."""

    def undivided(original: Function) -> Function:
        @functools.wraps(original)
        def predict(self: Model, *arguments: object, **options: object) -> object:
            strategy = getattr(self, "distribute_strategy", None)
            whole = (
                strategy.extended.sharding.off() if isinstance(strategy, strategy_class) else contextlib.nullcontext()
            )
            with whole:
                return original(self, *arguments, **options)

        return predict

    catch = trainer_module.TFEpochIterator.catch_stop_iteration

    @contextlib.contextmanager
    @functools.wraps(catch)
    def catch_stop_iteration(self: Batches) -> Iterator[None]:
        strategy = strategy_of_epochs(self)
        within: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(strategy, strategy_class):
            within = strategy.extended.sharding.within_epoch()
        with catch(self), within:
            yield

    trainer_module.TFEpochIterator.catch_stop_iteration = catch_stop_iteration
    keras.Model.predict = undivided(keras.Model.predict)
    keras.Model.predict_on_batch = undivided(keras.Model.predict_on_batch)  # they share a traced function
