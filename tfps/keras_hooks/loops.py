"""Keras' loops: what `fit`, `evaluate` and `predict` read, by which parameters they compute, and where epochs end.

`predict` gives each rank the predictions of all of its input, as a single process does: with sharded data no rank would
have all of them. Predicting needs no other rank, so a single rank may call it, also within an epoch (in a callback):
there it predicts by this worker's own moving statistics, as combining them takes all ranks.

Tested in tests/integration/test_semantics.py, test_programs.py and test_local_programs.py there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator

import keras

from tfps.graph.patches import BaseStrategy, replaced
from tfps.keras_hooks import generators, stages
from tfps.keras_hooks.agreed_logs import compared_tables
from tfps.keras_hooks.hooks import for_callbacks, for_models, replaces
from tfps.keras_hooks.keras_private import (
    add_steps_seen,
    distributed_dataset,
    sizes_of_arrays,
    trainer_module,
)
from tfps.keras_hooks.position import agreement_of
from tfps.keras_hooks.python_data import check_generators
from tfps.types import Batches, Callback, Function, Model

_PROGRAMS, _LOCAL = "tests/integration/test_programs.py", "tests/integration/test_local_programs.py"
_SEMANTICS, _OUTER = "tests/integration/test_semantics.py", "tests/policies/test_outer.py"


class Sharding(threading.local):
    """Per-thread switch for dividing work between workers: off while predicting; other threads may train."""

    on = True
    evaluates = False  # whether this thread evaluates
    cut_short = False  # whether its last epoch of `fit` ended because another rank had no more data
    in_epoch = False  # whether this thread is within an epoch of `fit`, or between steps of `evaluate`

    def off(self) -> contextlib.AbstractContextManager[None]:
        """In the block datasets are not sharded, iterators do not wait for other ranks, noise is a single process's."""
        return replaced(self, "on", False)

    @property
    def combines(self) -> bool:
        """Whether all ranks distribute the dataset that this thread distributes now, as far as is known."""
        return self.on or not self.in_epoch

    def kept_off(self, function: Function) -> Function:
        """Wraps `function` so that it is off in replica threads, too."""

        def in_replica(*args: object, **options: object) -> object:
            with self.off():
                return function(*args, **options)

        return in_replica


def _own_strategy(epochs: Batches) -> BaseStrategy | None:
    strategy = epochs._distribute_strategy
    return strategy if isinstance(strategy, BaseStrategy) else None


@replaces(trainer_module.TFEpochIterator, "reset", "tests/integration/test_async.py")
def _reset(original: Function, epochs: Batches) -> None:
    """An epoch ends with the data where workers take batches apart (mode `async`)."""
    original(epochs)
    strategy = _own_strategy(epochs)
    if strategy is not None and not strategy.extended.sharding.in_epoch and not strategy.extended.sharding.evaluates:
        strategy.extended.training.begin(epochs)
    if strategy is not None and strategy.extended.hands_out:
        strategy.extended.policy.reset_epochs(epochs)


@replaces(trainer_module.TFEpochIterator, "_enumerate_iterator", _PROGRAMS)
def _enumerate_iterator(original: Function, epochs: Batches) -> Iterator[tuple[object, ...]]:
    """As `TFEpochIterator.reset`; ranks may meet; and staging reads no further than an epoch of a `PyDataset`.

    A `PyDataset` with workers makes batches within an epoch only: Keras stops the workers when it ends, and whoever
    asks for a batch then gets an error. If the data goes on (`steps_per_epoch`), staging must not read ahead into the
    next one.
    """
    strategy, steps = _own_strategy(epochs), epochs.steps_per_epoch
    if strategy is not None and strategy.extended.hands_out:
        yield from strategy.extended.policy.epoch_steps(epochs, original)
        return
    makes = getattr(epochs.data_adapter, "enqueuer", None) is not None
    allows = strategy is not None and steps is not None and makes
    if strategy is not None and strategy.extended.sharding.on:
        if not strategy.extended.changes and hasattr(distributed_dataset(epochs), "sizes"):
            distributed_dataset(epochs).sizes = sizes_of_arrays(epochs)
        strategy.extended.policy.begin_steps()
    skipped, seen = (0, 0) if strategy is None else strategy.extended.training.begin_epoch(epochs)
    fresh = None  # in place of an iterator that another loop over the same generator has stopped
    for step in itertools.islice(original(epochs), skipped, None):  # its last part is the iterator
        if getattr(step[-1], "superseded", False):
            fresh = generators.current(epochs, fresh or step[-1])
            step = (*step[:-1], fresh)
        if allows and hasattr(step[-1], "allow"):  # one that reads ahead
            step[-1].allow(math.ceil(steps / epochs.steps_per_execution) * epochs.steps_per_execution - skipped)
        allows = False
        add_steps_seen(epochs, seen)
        seen = 0
        yield step


@replaces(trainer_module.TFEpochIterator, "catch_stop_iteration", _PROGRAMS)
def _catch_stop_iteration(original: Function, epochs: Batches) -> contextlib.AbstractContextManager[None]:
    """Notes that this thread is within an epoch, and where it ends."""
    strategy = _own_strategy(epochs)
    if strategy is None:
        return original(epochs)

    @contextlib.contextmanager
    def within_epoch(epochs: Batches) -> Iterator[None]:
        sharding, agreement, warn = extended.sharding, agreement_of(strategy), epochs._interrupted_warning
        cut_short = False

        def ran_out() -> None:
            """Keras' warning, unless ours has said whose data ended."""
            nonlocal cut_short
            cut_short = agreement is not None and agreement.cut_short
            if not cut_short:
                warn()

        quiet, inside = replaced(epochs, "_interrupted_warning", ran_out), replaced(sharding, "in_epoch", True)
        noting = contextlib.nullcontext() if extended.numbers is None else extended.numbers.noting()
        with quiet, original(epochs), inside, noting:
            yield
        if not sharding.evaluates:
            sharding.cut_short = cut_short

    extended = strategy.extended
    return extended.policy.epoch(epochs, within_epoch) if extended.hands_out else within_epoch(epochs)


@replaces(keras.callbacks.ProgbarLogger, "on_epoch_end", "tests/input/test_batch_agreement.py")
@for_callbacks
def _end_bar(original: Function, strategy: BaseStrategy, callback: Callback, *args: object, **options: object) -> None:
    """The bar of an epoch that another rank's data has ended shows the steps that there were."""
    short = strategy.extended.sharding.cut_short
    with replaced(callback, "target", callback.seen) if short else contextlib.nullcontext():
        original(callback, *args, **options)


@replaces(keras.callbacks.CallbackList, "on_train_end", _LOCAL)
@for_callbacks
def _end_training(
    original: Function, strategy: BaseStrategy, callbacks: Callback, *args: object, **options: object
) -> None:
    """Ends the last round of modes `diloco` and `local` before callbacks save."""
    strategy.extended.policy.end_training()
    original(callbacks, *args, **options)
    strategy.extended.training.end()
    if (agreement := agreement_of(strategy)) is not None:
        agreement.admits = False
        agreement.resume()


@replaces(keras.Model, "fit", _PROGRAMS)
@for_models
def _fit(original: Function, strategy: BaseStrategy, model: Model, *args: object, **options: object) -> object:
    """Compares what layers have adapted to between ranks, tells the policy, and leaves the History for who joins."""
    position = strategy.extended.training
    if strategy.extended.exchange.joining.pending and position.admits:
        check_generators(original, model, args, options)
    with compared_tables(strategy, model), strategy.extended.policy.fitting():
        if position.fitting:
            return original(model, *args, **options)
        with replaced(position, "fitting", True):
            history = original(model, *args, **options)
    stages.note(strategy, f"fit {position.training}", {"history": history.history, "epoch": history.epoch})
    return history


@replaces(keras.Model, "evaluate", _LOCAL)
@for_models
def _evaluate(original: Function, strategy: BaseStrategy, model: Model, *args: object, **options: object) -> object:
    """As `Model.fit`; evaluates global parameters where workers train alone, and divides batches beforehand."""
    policy, evaluating = strategy.extended.policy, replaced(strategy.extended.sharding, "evaluates", True)
    position, joining = strategy.extended.training, strategy.extended.exchange.joining
    if not options.get("_use_cached_eval_dataset"):  # not in `fit`
        policy.begin_evaluation()
    stage = ""
    if not position.fitting:
        position.evaluation += 1
        stage = f"evaluate {position.evaluation}"
        if joining.pending:
            return stages.result_of(strategy, stage)
    agreement = agreement_of(strategy)
    within = contextlib.nullcontext() if agreement is None else replaced(agreement, "evaluates", True)
    with policy.global_parameters(), compared_tables(strategy, model), evaluating, within:
        result = original(model, *args, **options)
    if stage:
        stages.note(strategy, stage, result)
    return result


@replaces(keras.Model, "predict", _SEMANTICS)
@replaces(keras.Model, "predict_on_batch", _SEMANTICS, "as `predict`: they share a traced function")
@for_models
def _predict(original: Function, strategy: BaseStrategy, model: Model, *args: object, **options: object) -> object:
    """Gives every rank all predictions, by global parameters where workers train alone."""
    stages.check_known(model)
    with strategy.extended.policy.global_parameters(), strategy.extended.sharding.off():
        return original(model, *args, **options)


def with_global_parameters(
    original: Function, strategy: BaseStrategy, owner: Model | Callback, *args: object, **options: object
) -> object:
    """Calls a method of a model or callback while the model has what it shows: global parameters."""
    with strategy.extended.policy.global_parameters():
        return original(owner, *args, **options)


replaces(keras.Model, "test_on_batch", _OUTER, "evaluates global parameters where workers train alone")(
    for_models(with_global_parameters)
)
_KEEPS = "keeps the weights that were evaluated, as it restores them on every rank"
replaces(keras.callbacks.EarlyStopping, "on_epoch_end", _LOCAL, _KEEPS)(for_callbacks(with_global_parameters))
