"""`fit` of a worker that joins a job under way: it goes on where the others are, at the beginning of an epoch.

Until then it trains one step for itself, which traces what it will need, so that the others wait for the state only:
weights, slots, counters and seeds, what Keras' own callbacks have found, and the position in the data.

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence

import keras
import numpy as np

from tfps.collectives import AllGather, Broadcast
from tfps.errors import MismatchError, UnsupportedError
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks import random_numbers
from tfps.keras_hooks.hooks import for_callbacks, replaces
from tfps.keras_hooks.keras_private import begin_at, distributed_dataset
from tfps.types import Array, Callback, Function, Json, Model, Variable

logger = logging.getLogger("tfps")
NEVER = 2**31  # an epoch that no training has
_TEST = "tests/elastic/test_joined.py"
# What Keras' callbacks have found so far. Arrays may be among them.
_FOUND: dict[type, tuple[str, ...]] = {
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


@replaces(keras.callbacks.CallbackList, "on_train_begin", _TEST)
@for_callbacks
def _begin_training(
    original: Function, strategy: BaseStrategy, callbacks: Callback, *args: object, **options: object
) -> None:
    """A worker that joins a job under way takes over its position."""
    extended = strategy.extended
    if extended.sharding.in_epoch:  # a training within another
        original(callbacks, *args, **options)
        return
    extended.trainings += 1
    original(callbacks, *args, **options)
    if extended.exchange.joining.candidate:
        _join(strategy, callbacks)


@replaces(keras.callbacks.CallbackList, "on_epoch_begin", _TEST)
@for_callbacks
def _begin_epoch(
    original: Function, strategy: BaseStrategy, callbacks: Callback, epoch: int, *args: object, **options: object
) -> None:
    """Lets workers take part that have joined the job meanwhile."""
    extended = strategy.extended
    if extended.admits and not extended.sharding.in_epoch:
        if extended.training_begun == extended.trainings:
            _admit(strategy, callbacks, epoch)
        extended.training_begun = extended.trainings  # in its first epoch nobody is admitted
    original(callbacks, epoch, *args, **options)


def _join(strategy: BaseStrategy, callbacks: Callback) -> None:
    extended, model = strategy.extended, callbacks.model
    epochs, runtime = extended.epochs, extended.runtime
    if epochs is None or epochs.steps_per_epoch is not None or not hasattr(distributed_dataset(epochs), "opened"):
        raise UnsupportedError(
            "a worker can join a job under way where each epoch reads its data anew: leave out steps_per_epoch, and "
            "give fit arrays or a tf.data.Dataset that ends"
        )
    with extended.exchange.joining.trying_out():
        model.train_function(iter(distributed_dataset(epochs)))
        runtime.settle(runtime.wait_s)
    source = extended.exchange.joining.take_part(extended.trainings)
    if source is None:
        logger.info("tfps: training %d of the job is over; this worker goes on to the next", extended.trainings)
        extended.positioned = True
        begin_at(model, NEVER)
        return
    extended.align(source)
    _hand_over(strategy, callbacks, 0, joins=True)
    extended.training_begun = 0  # it has just been admitted
    model.reset_metrics()


def _admit(strategy: BaseStrategy, callbacks: Callback, epoch: int) -> None:
    """Lets those take part who are ready; all ranks call it."""
    extended = strategy.extended
    runtime, joining = extended.runtime, extended.exchange.joining
    own = joining.candidates(extended.trainings) if strategy.rank == 0 else []
    said = AllGather(runtime, "candidates")(json.dumps(own).encode())
    if not (candidates := sorted({rank for each in said.values() for rank in json.loads(each)})):
        return
    extended.combiner.refresh()
    # Those who join announce only what comes: what is over must be announced, and answered, before they take part.
    extended.staging.lockstep.wait_announced(runtime.wait_s)
    runtime.settle(runtime.wait_s)
    if (source := joining.admit(candidates)) is not None:
        extended.align(source)
        _hand_over(strategy, callbacks, epoch, joins=False)


def _hand_over(strategy: BaseStrategy, callbacks: Callback, epoch: int, *, joins: bool) -> None:
    """Gives those who join the state of the others; all ranks call it."""
    runtime = strategy.extended.runtime
    said = AllGather(runtime, "who has the state of the training")(b"" if joins else b"1")
    runtime.sources = frozenset(rank for rank, has in said.items() if has)  # if one is lost, another of these gives it
    try:
        _exchange_state(strategy, callbacks, epoch, joins=joins)
    finally:
        runtime.sources = None


def _exchange_state(strategy: BaseStrategy, callbacks: Callback, epoch: int, *, joins: bool) -> None:
    extended, model = strategy.extended, callbacks.model
    runtime, lockstep, dataset = extended.runtime, extended.staging.lockstep, distributed_dataset(extended.epochs)
    variables = _state(model)
    texts = [f"{variable.name} {variable.shape} {variable.dtype.name}" for variable in variables]
    found, arrays = _found(callbacks.callbacks)
    own = {
        "epoch": epoch,
        "variables": texts,
        "iterators": lockstep.places,
        "opened": getattr(dataset, "opened", 0),
        "shuffles": random_numbers.shuffles(),
        "callbacks": found,
    }
    said = json.loads(Broadcast(runtime, "position in the training")(lambda: json.dumps(own).encode()))
    if joins and said["variables"] != texts:
        first = next((pair for pair in zip(said["variables"], texts, strict=False) if pair[0] != pair[1]), ("", ""))
        raise MismatchError(
            f"a worker that joins must have the variables of the others, got {len(texts)} and {len(said['variables'])}"
            f"; the first that differ are {first[1]!r} here and {first[0]!r} there"
        )
    packed = Broadcast(runtime, "arrays of callbacks")(lambda: _packed(arrays))
    extended.take_from_first_rank(variables)
    if joins:
        lockstep.places = said["iterators"]
        dataset.open_until(said["opened"])
        random_numbers.set_shuffles(said["shuffles"])
        _set_found(callbacks.callbacks, said["callbacks"], packed)
        extended.positioned = True
        begin_at(model, said["epoch"])
        logger.info("tfps: this worker goes on with epoch %d", said["epoch"] + 1)


def _state(model: Model) -> list[Variable]:
    """The variables whose values go to those who join: not metrics, which begin anew with the epoch."""
    metrics = {id(variable) for variable in model.metrics_variables}
    found = [each for each in (*model.variables, *model.optimizer.variables) if id(each) not in metrics]
    return list({id(each.value): each.value for each in found}.values())


def _found(callbacks: Sequence[Callback]) -> tuple[list[Json], dict[str, Array]]:
    """What Keras' own callbacks have found, in their order; lists of arrays apart, by place and name."""
    found, arrays = [], {}
    for place, callback in enumerate(callbacks):
        names = next((names for kind, names in _FOUND.items() if type(callback) is kind), ())
        values = {}
        for name in names:
            value = getattr(callback, name, None)
            if name == "best_weights":
                for number, each in enumerate(value or ()):
                    arrays[f"{place}/{name}/{number}"] = np.asarray(each)
                value = None if value is None else len(value)
            values[name] = value
        found.append(values)
    return json.loads(json.dumps(found, default=float)), arrays


def _set_found(callbacks: Sequence[Callback], found: Sequence[Json], packed: bytes) -> None:
    with np.load(io.BytesIO(packed)) as arrays:
        for place, (callback, values) in enumerate(zip(callbacks, found, strict=False)):
            for name, value in values.items():
                if name == "best_weights" and value is not None:
                    value = [arrays[f"{place}/{name}/{number}"] for number in range(value)]
                setattr(callback, name, value)


def _packed(arrays: dict[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **dict(arrays))  # type: ignore[arg-type]  # it takes any name
    return file.getvalue()
