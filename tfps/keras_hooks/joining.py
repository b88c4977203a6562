"""`fit` of a worker that joins a job under way: it goes on where the others are, at the next step.

Until then it trains one step for itself, which traces what it will need, so that the others wait for the state only:
weights, slots, counters and seeds, what Keras' own callbacks have found, and the position in the data.

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import json
import logging
import threading
import time

import keras
import tensorflow as tf

from tfps.collectives import AllGather, Broadcast
from tfps.errors import UnsupportedError, WaitTimeoutError, WorkerLostError
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks import python_data
from tfps.keras_hooks.hooks import for_callbacks, replaces
from tfps.keras_hooks.keras_private import distributed_dataset, has_read
from tfps.keras_hooks.position import NEVER
from tfps.keras_hooks.training_state import Snapshot, TrainingState
from tfps.types import Batches, Callback, Function, Json, Model, Value

logger = logging.getLogger("tfps")
_ASK_S = 0.5  # between two questions who wants to join
_TEST = "tests/elastic/test_joined.py"


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
    extended.training.training += 1
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
    if extended.training.admits and not extended.sharding.in_epoch:
        position = extended.training
        position.epoch = epoch
        anew = not has_read(position.iterator)  # else others may have agreed on its first batch already
        if not position.just_joined and (anew or extended.staging.lockstep.taken is not None):
            _admit(strategy, callbacks, 0)
        position.just_joined = False
        _let_others_in(strategy, position.iterator.steps_per_execution == 1)
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
    position, runtime = extended.training, extended.runtime
    python_data.check(position.iterator)
    logger.info("tfps: this worker joins a job under way, and waits until the others let it take part")
    with extended.exchange.joining.trying_out():
        one_step = strategy.experimental_distribute_dataset(_one_batch(distributed_dataset(position.iterator)))
        model.train_function(iter(one_step))
        runtime.settle(runtime.wait_s)
    others = extended.exchange.joining.take_part(position.training)
    if others is None:
        logger.info("tfps: training %d of the job is over; this worker goes on to the next", position.training)
        position.move(model, NEVER)
        return
    with extended.aligned(others):
        _hand_over(strategy, callbacks, joins=True)
    position.just_joined = True
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
        if not batch and not has_read(extended.training.iterator) and not lockstep.settle(runtime.wait_s):
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
            own = [joining.candidates(strategy.extended.training.training), time.monotonic() > deadline_s]
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
    extended, state = strategy.extended, TrainingState(strategy, callbacks)
    own = state.capture(batch)
    theirs = Snapshot.unpacked(Broadcast(extended.runtime, "state of the training")(own.packed))
    if joins:
        state.check_names(theirs)
    extended.take_from_first_rank([*state.variables, *state.constants])
    extended.staging.take_read()  # one who joins has read others, and one who was alone compared none
    if joins:
        state.apply(theirs)
        state.check(theirs)
        position = extended.training
        logger.info(
            "tfps: this worker goes on with step %d of epoch %d", position.skipped_steps + 1, theirs.plain["epoch"] + 1
        )
        return
    state.move_remote(own)  # nothing has been assigned: pservers have all values still, or more than workers
    if own.plain["taken"]:
        extended.staging.lockstep.compare_next()


def _combine_metrics(strategy: BaseStrategy, model: Model) -> None:
    """Has all ranks combine metrics at the next read, also without another step: who joins has counted nothing."""
    for variable in model.metrics_variables:
        if hasattr(variable.value, "take_combined"):
            strategy.extended.note_local_write(variable.value)
