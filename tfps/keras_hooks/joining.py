"""`fit` of a worker that joins a job under way: it goes on where the others are, at the next step.

Until then it trains one step for itself, which traces what it will need, so that the others wait for the state only:
weights, slots, counters and seeds, what Keras' own callbacks have found, and the position in the data.

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather, Broadcast
from tfps.errors import MismatchError, UnsupportedError, WaitTimeoutError, WorkerLostError
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks import python_data, random_numbers
from tfps.keras_hooks.captured import Captured, captured_by
from tfps.keras_hooks.hooks import for_callbacks, replaces
from tfps.keras_hooks.keras_private import (
    begin_at,
    continues,
    distributed_dataset,
    has_read,
    known_batches,
    set_known_batches,
)
from tfps.keras_hooks.variables import RemoteVariable
from tfps.runtime.remote import RemoteParameter, RemoteSlot
from tfps.types import Array, Batches, Callback, Function, Json, Model, Value, Variable

logger = logging.getLogger("tfps")
_ASK_S = 0.5  # between two questions who wants to join
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
    if extended.sharding.in_epoch:  # a training within another, whose steps are no places to join
        _let_others_in(strategy, False)
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
        extended.epoch = epoch
        anew = not has_read(extended.epochs)  # else others may have agreed on its first batch already
        if not extended.just_joined and (anew or extended.staging.lockstep.taken is not None):
            _admit(strategy, callbacks, 0)
        extended.just_joined = False
        _let_others_in(strategy, extended.epochs.steps_per_execution == 1)
    original(callbacks, epoch, *args, **options)


@replaces(keras.callbacks.CallbackList, "on_train_batch_begin", _TEST)
@for_callbacks
def _begin_batch(
    original: Function, strategy: BaseStrategy, callbacks: Callback, batch: int, *args: object, **options: object
) -> None:
    """As `CallbackList.on_epoch_begin`, between two steps."""
    staging = strategy.extended.staging
    if staging is not None and staging.lockstep is not None and staging.lockstep.taken is not None:
        _admit(strategy, callbacks, batch)
    original(callbacks, batch, *args, **options)


def _let_others_in(strategy: BaseStrategy, between_steps: bool) -> None:
    staging = strategy.extended.staging
    if staging is not None and staging.lockstep is not None:
        staging.lockstep.admits = between_steps


def _join(strategy: BaseStrategy, callbacks: Callback) -> None:
    extended, model = strategy.extended, callbacks.model
    epochs, runtime = extended.epochs, extended.runtime
    python_data.check(epochs)
    logger.info("tfps: this worker joins a job under way, and waits until the others let it take part")
    with extended.exchange.joining.trying_out():
        one_step = strategy.experimental_distribute_dataset(_one_batch(distributed_dataset(epochs)))
        model.train_function(iter(one_step))
        runtime.settle(runtime.wait_s)
    others = extended.exchange.joining.take_part(extended.trainings)
    if others is None:
        logger.info("tfps: training %d of the job is over; this worker goes on to the next", extended.trainings)
        extended.positioned = True
        begin_at(model, NEVER)
        return
    with extended.aligned(others):
        _hand_over(strategy, callbacks, joins=True)
    extended.just_joined = True
    model.reset_metrics()
    _combine_metrics(strategy, model)


def _one_batch(dataset: Batches) -> tf.data.Dataset:
    """A batch of zeros as those of `dataset`, which is not read: reading may change the order of its epochs."""

    def zeros(spec: tf.TypeSpec) -> Value:
        known = isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec))
        if not known or spec.shape.rank is None:
            raise UnsupportedError(
                "a worker can join a job under way whose batches are dense, ragged or sparse tensors of known rank, "
                f"got {spec}"
            )
        shape = [1 if size is None else size for size in spec.shape]
        if isinstance(spec, tf.SparseTensorSpec):
            nothing = tf.zeros([0, len(shape)], tf.int64), tf.zeros([0], spec.dtype)
            return tf.SparseTensor(*nothing, dense_shape=shape)
        dense = tf.zeros(shape, spec.dtype)
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(
                dense, ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype
            )
        return dense

    spec = dataset.sources[0].element_spec
    with tf.device("CPU:0"):
        batch = tf.nest.map_structure(zeros, spec)
        # Of the same spec, so that steps are not traced anew: `from_tensors` would know all sizes.
        return tf.data.Dataset.from_generator(lambda: iter([batch]), output_signature=spec)


def _admit(strategy: BaseStrategy, callbacks: Callback, batch: int) -> None:
    """Lets those take part who are ready, before `batch` of the epoch; all ranks call it."""
    extended = strategy.extended
    runtime, joining, lockstep = extended.runtime, extended.exchange.joining, extended.staging.lockstep
    joining.told = False
    if candidates := _candidates(strategy):
        extended.combiner.refresh()
        if not batch and not has_read(extended.epochs) and not lockstep.settle(runtime.wait_s):
            raise WaitTimeoutError("the end of an epoch's data was not announced in time for a worker to join")
        runtime.settle(runtime.wait_s)
        if (others := joining.admit(candidates)) is not None:
            with extended.aligned(others):
                _hand_over(strategy, callbacks, batch, joins=False)
            _combine_metrics(strategy, callbacks.model)
    lockstep.resume()


def _candidates(strategy: BaseStrategy) -> list[int]:
    """Who may take part, as all ranks agree; waits for some if too few workers are left."""
    runtime, joining = strategy.extended.runtime, strategy.extended.exchange.joining
    limit_s, said_so = strategy.config.rejoin_timeout_s, False
    deadline_s = time.monotonic() + limit_s
    while True:
        own: Json = [[], False]  # of the first rank: who is there, and whether the time is over
        if strategy.rank == 0:
            own = [joining.candidates(strategy.extended.trainings), time.monotonic() > deadline_s]
        said = AllGather(runtime, "candidates")(json.dumps(own).encode())
        heard = list(map(json.loads, said.values()))
        candidates = sorted({rank for ranks, _ in heard for rank in ranks})
        if len(said) + len(candidates) >= joining.least:
            return candidates
        few = f"{len(said)} workers are left, fewer than min_workers={joining.least}"
        if any(over for _, over in heard):
            error = WorkerLostError(f"{few}, and no other has joined within {limit_s:.3g} s (rejoin_timeout_s)")
            strategy.extended.exchange.fail(error)
            raise error
        if not said_so:
            logger.warning("tfps: %s: training waits up to %.0f s for others to join", few, limit_s)
        said_so = True
        if strategy.rank == 0:
            threading.Event().wait(_ASK_S)


def _hand_over(strategy: BaseStrategy, callbacks: Callback, batch: int = 0, *, joins: bool) -> None:
    """Gives those who join the state of the others, before `batch` of the epoch; all ranks call it."""
    extended, model = strategy.extended, callbacks.model
    runtime, lockstep, epochs = extended.runtime, extended.staging.lockstep, extended.epochs
    dataset = distributed_dataset(epochs)
    # Of the iterator that goes on, if one does: how many batches it has given.
    taken = (lockstep.taken or 0) if batch or has_read(epochs) else 0
    is_open = batch > 0 or continues(epochs)
    missed = extended.begun_epochs - (batch > 0)
    variables, remote = _state(model)
    texts = [f"{variable.name} {variable.shape} {variable.dtype.name}" for variable in variables]
    found, arrays = _found(callbacks.callbacks)
    places = [each.place(arrays, f"remote/{number}") for number, each in enumerate(remote)]
    own = {
        "epoch": extended.epoch,
        "batch": batch,
        "taken": taken,
        "variables": texts,
        "iterators": lockstep.places,
        "opened": getattr(dataset, "opened", 0) - is_open,  # before the one that is read next
        "is_open": is_open,
        "known_batches": known_batches(epochs),
        "shuffles": random_numbers.shuffles(epochs),
        "python_data": python_data.position(epochs, missed, goes_on=taken > 0),
        "missed": missed,
        "callbacks": found,
        "remote": places,
    }
    said = json.loads(Broadcast(runtime, "position in the training")(lambda: json.dumps(own).encode()))
    if joins and said["variables"] != texts:
        first = next((pair for pair in zip(said["variables"], texts, strict=False) if pair[0] != pair[1]), ("", ""))
        raise MismatchError(
            f"a worker that joins must have the variables of the others, got {len(texts)} and {len(said['variables'])}"
            f"; the first that differ are {first[1]!r} here and {first[0]!r} there"
        )
    packed = Broadcast(runtime, "arrays of callbacks")(lambda: _packed(arrays))
    constants = captured_by(model)
    before = [each.numpy() for each in constants]
    extended.take_from_first_rank([*variables, *constants])
    if joins:
        _check_traced(constants, before)
    # Nothing has been assigned: pservers have all values still, or more than workers.
    kept = _unpacked(packed) if joins else arrays
    for number, (each, place) in enumerate(zip(remote, said["remote"] if joins else places, strict=True)):
        each.move(place, kept, f"remote/{number}")
    extended.staging.take_read()  # one who joins has read others, and one who was alone compared none
    if taken and not joins:
        lockstep.compare_next()
    if joins:
        on = int(said["taken"] > 0)  # an iterator goes on, which is counted among these
        lockstep.places = said["iterators"] - on
        skips = {"opened": said["opened"], "skipping": said["taken"]}
        begins_there = python_data.go_on(epochs, said["python_data"], **skips)
        dataset.open_until(
            said["opened"], said["taken"], reads_skipped=not begins_there, open_elsewhere=said["is_open"]
        )
        random_numbers.set_shuffles(epochs, said["shuffles"] - on)
        set_known_batches(epochs, said["known_batches"])
        extended.skipped_steps, extended.begun_epochs = said["batch"], said["missed"]
        extended.seen_steps = said["taken"] - said["batch"] if epochs.steps_per_epoch is not None and on else 0
        _set_found(callbacks.callbacks, said["callbacks"], kept)
        extended.positioned = True
        begin_at(model, said["epoch"])
        logger.info("tfps: this worker goes on with step %d of epoch %d", said["batch"] + 1, said["epoch"] + 1)


def _check_traced(constants: Sequence[Captured], before: Sequence[Array]) -> None:
    """Raises MismatchError if this rank has traced its step with other `constants` than the others have."""
    for constant, own in zip(constants, before, strict=True):
        if not np.allclose(constant.numpy(), own, rtol=1e-3, atol=1e-6):  # hosts may round differently
            raise MismatchError(
                f"a worker that joins must have the constants of the others, but the model has captured another one as "
                f"{constant.name!r}, computed from weights or random numbers when it was built; set one seed on all "
                "ranks before the model is built (keras.utils.set_random_seed)"
            )


def _combine_metrics(strategy: BaseStrategy, model: Model) -> None:
    """Has all ranks combine metrics at the next read, also without another step: who joins has counted nothing."""
    for variable in model.metrics_variables:
        if hasattr(variable.value, "take_combined"):
            strategy.extended.note_local_write(variable.value)


def _state(model: Model) -> tuple[list[Variable], list[RemoteParameter | RemoteSlot]]:
    """The variables whose values go to those who join, and what pservers have.

    No metrics, which begin anew with the epoch.
    """
    metrics = {id(variable) for variable in model.metrics_variables}
    found = [each for each in (*model.variables, *model.optimizer.variables) if id(each) not in metrics]
    own = list({id(each.value): each.value for each in found if not isinstance(each, RemoteVariable)}.values())
    remote = [each.remote for each in own if getattr(each, "remote", None) is not None]
    slots = {id(each): each.slot for each in found if isinstance(each, RemoteVariable)}
    return own, [*remote, *slots.values()]


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


def _set_found(callbacks: Sequence[Callback], found: Sequence[Json], arrays: Mapping[str, Array]) -> None:
    for place, (callback, values) in enumerate(zip(callbacks, found, strict=False)):
        for name, value in values.items():
            if name == "best_weights" and value is not None:
                value = [arrays[f"{place}/{name}/{number}"] for number in range(value)]
            setattr(callback, name, value)


def _packed(arrays: dict[str, Array]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **dict(arrays))  # type: ignore[arg-type]  # it takes any name
    return file.getvalue()


def _unpacked(packed: bytes) -> dict[str, Array]:
    with np.load(io.BytesIO(packed)) as arrays:
        return dict(arrays)
