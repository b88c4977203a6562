"""Keras' loops: what `fit`, `evaluate` and `predict` read, by which parameters they compute, and where epochs end.

`predict` gives each rank the predictions of all of its input, as a single process does: with sharded data no rank would
have all of them. Predicting needs no other rank, so a single rank may call it, also within an epoch (in a callback):
there it predicts by this worker's own moving statistics, as combining them takes all ranks.

Tested in tests/integration/test_semantics.py, test_programs.py and test_local_programs.py there.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator

import keras

from tfps.graph.patches import BaseStrategy, Patch, for_callbacks, for_models, replaced
from tfps.keras_hooks.agreed_logs import compared_tables
from tfps.keras_hooks.keras_private import trainer_module
from tfps.types import Batches, Callback, Function, Model


class Sharding(threading.local):
    """Per-thread switch for dividing work between workers: off while predicting; other threads may train."""

    on = True
    evaluates = False  # whether this thread evaluates
    in_epoch = False  # whether this thread is within an epoch of `fit`, or between steps of `evaluate`

    def off(self) -> contextlib.AbstractContextManager[None]:
        """In the block datasets are not sharded, iterators do not wait for other ranks, noise is a single process's."""
        return replaced(self, "on", False)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """In the block work is divided for evaluation."""
        return replaced(self, "evaluates", True)

    def within_epoch(self) -> contextlib.AbstractContextManager[None]:
        """In the block a rank that predicts does so alone."""
        return replaced(self, "in_epoch", True)

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


# Epochs.


def _own_strategy(epochs: Batches) -> BaseStrategy | None:
    strategy = epochs._distribute_strategy
    return strategy if isinstance(strategy, BaseStrategy) else None


def _reset(original: Function) -> Function:
    def reset(self: Batches) -> None:
        original(self)
        strategy = _own_strategy(self)
        if strategy is not None and strategy.extended.hands_out:
            strategy.extended.policy.reset_epochs(self)

    return reset


def _enumerate_iterator(original: Function) -> Function:
    """Lets workers that take batches apart say when an epoch ends, and keeps others from reading past its end.

    A `PyDataset` with workers makes batches within an epoch only: Keras stops the workers when it ends, and whoever
    asks for a batch then gets an error. If the data goes on (`steps_per_epoch`), staging must not read ahead into the
    next one.
    """

    def enumerate_iterator(self: Batches) -> Iterator[tuple[object, ...]]:
        strategy, steps = _own_strategy(self), self.steps_per_epoch
        if strategy is not None and strategy.extended.hands_out:
            return strategy.extended.policy.epoch_steps(self, original)
        makes = getattr(self.data_adapter, "enqueuer", None) is not None
        if strategy is None or steps is None or not makes:
            return original(self)
        at_once = self.steps_per_execution
        return _limited(original(self), math.ceil(steps / at_once) * at_once)

    return enumerate_iterator


def _limited(steps: Iterator[tuple[Batches, ...]], batches: int) -> Iterator[tuple[object, ...]]:
    """Yields what Keras does; the epoch's iterator may read so many `batches` in it."""
    allowed = False
    for begin, end, iterator in steps:
        if not allowed and hasattr(iterator, "allow"):  # one that reads ahead
            iterator.allow(batches)
        allowed = True
        yield begin, end, iterator


def _catch_stop_iteration(original: Function) -> Function:
    @contextlib.contextmanager
    def within_epoch(epochs: Batches) -> Iterator[None]:
        strategy = _own_strategy(epochs)
        within = contextlib.nullcontext() if strategy is None else strategy.extended.sharding.within_epoch()
        with original(epochs), within:
            yield

    @contextlib.contextmanager
    def catch_stop_iteration(self: Batches) -> Iterator[None]:
        strategy, within = _own_strategy(self), within_epoch(self)
        if strategy is not None and strategy.extended.hands_out:
            within = strategy.extended.policy.epoch(self, within_epoch)
        with within:
            yield

    return catch_stop_iteration


@for_callbacks
def _end_training(
    original: Function, strategy: BaseStrategy, callbacks: Callback, *arguments: object, **options: object
) -> None:
    strategy.extended.policy.end_training()
    original(callbacks, *arguments, **options)


# Calls of models.


@for_models
def _fit(original: Function, strategy: BaseStrategy, model: Model, *arguments: object, **options: object) -> object:
    with compared_tables(strategy, model):
        return original(model, *arguments, **options)


@for_models
def _evaluate(
    original: Function, strategy: BaseStrategy, model: Model, *arguments: object, **options: object
) -> object:
    policy, evaluating = strategy.extended.policy, strategy.extended.sharding.evaluating()
    if not options.get("_use_cached_eval_dataset"):  # not in `fit`
        policy.begin_evaluation()
    with policy.global_parameters(), compared_tables(strategy, model), evaluating:
        return original(model, *arguments, **options)


@for_models
def _predict(original: Function, strategy: BaseStrategy, model: Model, *arguments: object, **options: object) -> object:
    with strategy.extended.policy.global_parameters(), strategy.extended.sharding.off():
        return original(model, *arguments, **options)


def with_global_parameters(
    original: Function, strategy: BaseStrategy, owner: Model | Callback, *arguments: object, **options: object
) -> object:
    """Calls a method of a model or callback while the model has what it shows: global parameters."""
    with strategy.extended.policy.global_parameters():
        return original(owner, *arguments, **options)


_PROGRAMS = "tests/integration/test_programs.py"
_LOCAL = "tests/integration/test_local_programs.py"
_SEMANTICS = "tests/integration/test_semantics.py"
PATCHES = (
    Patch(
        trainer_module.TFEpochIterator,
        "reset",
        _reset,
        "an epoch ends with the data where workers take batches apart (mode `async`)",
        "tests/integration/test_async.py",
    ),
    Patch(
        trainer_module.TFEpochIterator,
        "_enumerate_iterator",
        _enumerate_iterator,
        "the same; and staging reads no further than an epoch of a `PyDataset`",
        _PROGRAMS,
    ),
    Patch(
        trainer_module.TFEpochIterator,
        "catch_stop_iteration",
        _catch_stop_iteration,
        "notes that this thread is within an epoch, and where it ends",
        _PROGRAMS,
    ),
    Patch(
        keras.callbacks.CallbackList,
        "on_train_end",
        _end_training,
        "ends the last round of modes `diloco` and `local` before callbacks save",
        _LOCAL,
    ),
    Patch(keras.Model, "fit", _fit, "compares what layers have adapted to between ranks", _PROGRAMS),
    Patch(
        keras.Model,
        "evaluate",
        _evaluate,
        "compares that, too; evaluates global parameters where workers train alone, and divides batches beforehand",
        _LOCAL,
    ),
    Patch(
        keras.Model,
        "test_on_batch",
        for_models(with_global_parameters),
        "evaluates global parameters where workers train alone",
        "tests/policies/test_outer.py",
    ),
    Patch(
        keras.Model,
        "predict",
        _predict,
        "gives every rank all predictions, by global parameters where workers train alone",
        _SEMANTICS,
    ),
    Patch(keras.Model, "predict_on_batch", _predict, "as `predict`: they share a traced function", _SEMANTICS),
    Patch(
        keras.callbacks.EarlyStopping,
        "on_epoch_end",
        for_callbacks(with_global_parameters),
        "keeps the weights that were evaluated, as it restores them on every rank",
        _LOCAL,
    ),
)
