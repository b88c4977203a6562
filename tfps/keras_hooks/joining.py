"""`fit` of a worker that joins a job under way: it goes on where the others are, at the next step.

Until then it trains one step for itself, which traces what it will need, so that the others wait for the state only:
weights, slots, counters and seeds, what Keras' own callbacks have found, and the position in the data.

Tested in tests/elastic/test_joined.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfps.collectives import AllGather, Broadcast
from tfps.errors import JoinError, TfpsError, UnsupportedError, WaitTimeoutError, WorkerLostError, in_a_line
from tfps.graph.patches import BaseStrategy
from tfps.keras_hooks import python_data, stages
from tfps.keras_hooks.hooks import for_callbacks, replaces
from tfps.keras_hooks.keras_private import distributed_dataset, has_read
from tfps.keras_hooks.position import NEVER, agreement_of
from tfps.keras_hooks.training_state import Snapshot, TrainingState, note_begun
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
    extended.training.begin_training()
    original(callbacks, *args, **options)
    if extended.training.admits:
        note_begun(callbacks.callbacks)
    if extended.exchange.joining.pending:
        _join(strategy, callbacks)


@replaces(keras.callbacks.CallbackList, "on_epoch_begin", _TEST)
@for_callbacks
def _begin_epoch(
    original: Function, strategy: BaseStrategy, callbacks: Callback, epoch: int, *args: object, **options: object
) -> None:
    """Lets workers take part that have joined the job meanwhile."""
    extended, kept = strategy.extended, contextlib.ExitStack()
    if extended.training.admits and not extended.sharding.in_epoch:
        position = extended.training
        position.epoch = epoch
        anew = not has_read(position.iterator)  # else others may have agreed on its first batch already
        if not position.just_joined and (anew or extended.staging.agreement.taken is not None):
            _admit(strategy, callbacks, 0)
        if position.just_joined and position.skipped_steps:
            kept.enter_context(position.joins.state.kept())
        position.just_joined = False
        _let_others_in(strategy, position.iterator.steps_per_execution == 1)
    with kept:
        original(callbacks, epoch, *args, **options)


@replaces(keras.callbacks.CallbackList, "on_train_batch_begin", _TEST)
@for_callbacks
def _begin_batch(
    original: Function, strategy: BaseStrategy, callbacks: Callback, batch: int, *args: object, **options: object
) -> None:
    """As `CallbackList.on_epoch_begin`, between two steps."""
    position, agreement = strategy.extended.training, agreement_of(strategy)
    if agreement is not None and agreement.taken is not None and position.joins is None:  # else it is still stopped
        _admit(strategy, callbacks, batch)
    original(callbacks, batch, *args, **options)
    if (joins := position.joins) is not None:
        position.joins = None
        _check(strategy, joins)


def _let_others_in(strategy: BaseStrategy, between_steps: bool) -> None:
    if (agreement := agreement_of(strategy)) is not None:
        agreement.admits = between_steps


def _join(strategy: BaseStrategy, callbacks: Callback) -> None:
    extended, model = strategy.extended, callbacks.model
    position, runtime = extended.training, extended.runtime
    with _alone(strategy):
        python_data.check(position.iterator)
        logger.info("tfps: this worker joins a job under way, and waits until the others let it take part")
        with extended.exchange.joining.trying_out():
            one_step = strategy.experimental_distribute_dataset(_one_batch(distributed_dataset(position.iterator)))
            model.train_function(iter(one_step))
            runtime.settle(runtime.wait_s)
        others = extended.exchange.joining.take_part(position.training)
    if others is None:
        logger.info("tfps: fit number %d of the job is over; this worker goes on to the next", position.training)
        _skip(strategy, callbacks)
        return
    with _alone(strategy), extended.aligned(others):
        _hand_over(strategy, callbacks, others)
    position.just_joined = True
    model.reset_metrics()
    _combine_metrics(strategy, model)


def _skip(strategy: BaseStrategy, callbacks: Callback) -> None:
    """Makes a `fit` that the others have ended return at once, with their History."""
    position = strategy.extended.training
    said = stages.result_of(strategy, f"fit {position.training}")
    for each in callbacks.callbacks:
        if isinstance(each, keras.callbacks.History):
            each.history, each.epoch = said["history"], said["epoch"]
    stages.forget_values(strategy, position.training)
    position.move(callbacks.model, NEVER)


@contextlib.contextmanager
def _alone(strategy: BaseStrategy) -> Iterator[None]:
    """Whatever ends this worker in the block, which joins, ends it alone.

    Raises:
        JoinError: says so.
    """
    try:
        yield
    except Exception as error:
        if strategy.extended.exchange.failure is not None:
            raise
        why = str(error) if isinstance(error, TfpsError) else in_a_line(error)
        refusal = JoinError.because(why)
        strategy.extended.exchange.fail(refusal)
        raise refusal from error


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
    runtime, joining, agreement = extended.runtime, extended.exchange.joining, extended.staging.agreement
    joining.notified = False
    if joiners := _joiners(strategy):
        extended.combiner.refresh()
        if not batch and not has_read(extended.training.iterator) and not agreement.settle(runtime.wait_s):
            raise WaitTimeoutError("the end of an epoch's data was not announced in time for a worker to join")
        runtime.settle(runtime.wait_s)
        if (others := joining.admit(joiners)) is not None:
            with extended.aligned(others):
                _hand_over(strategy, callbacks, others, batch)
            _combine_metrics(strategy, callbacks.model)
    if extended.training.joins is None:
        agreement.resume()


def _joiners(strategy: BaseStrategy) -> list[int]:
    """Who may take part, as all ranks agree; waits for some if too few workers are left."""
    runtime, joining = strategy.extended.runtime, strategy.extended.exchange.joining
    limit_s, said_so = strategy.config.rejoin_timeout_s, False
    deadline_s = time.monotonic() + limit_s
    while True:
        own: Json = [[], False]  # of the first rank: who is there, and whether the time is over
        if strategy.rank == 0:
            own = [joining.joiners(strategy.extended.training.training), time.monotonic() > deadline_s]
        said = AllGather(runtime, "joiners")(json.dumps(own).encode())
        heard = list(map(json.loads, said.values()))
        joiners = sorted({rank for ranks, _ in heard for rank in ranks})
        if len(said) + len(joiners) >= joining.least:
            return joiners
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


@dataclasses.dataclass(frozen=True)
class Joins:
    """Workers that have the state of the others, until all ranks have compared it before their first step."""

    state: TrainingState
    joiners: Collection[int]


def _hand_over(strategy: BaseStrategy, callbacks: Callback, others: Sequence[int], batch: int = 0) -> None:
    """Gives those who join the state of the `others`, before `batch` of the epoch; all ranks call it."""
    extended, state = strategy.extended, TrainingState(strategy, callbacks)
    rank = extended.exchange.rank  # not its place among those that take part
    if rank not in others:
        stages.know_values(strategy)  # they come now
    gather = AllGather(extended.runtime, "variables of the training")
    inventories: dict[int, dict[str, str]] = {}
    for _ in range(2):
        own = state.inventory()
        inventories = {each: json.loads(said) for each, said in gather(json.dumps(own).encode()).items()}
        if len({tuple(each) for each in inventories.values()}) == 1:
            break
        gc.collect()  # ranks collect garbage at different times
        state = TrainingState(strategy, callbacks)
    # Not those of the view: one that dies now is in it on some ranks only, and all must go on alike.
    joiners = set(inventories).difference(others)
    theirs = [said for each, said in inventories.items() if each not in joiners]
    refused = {each: why for each in sorted(joiners) if (why := state.difference(theirs[0], inventories[each]))}
    joiners -= _refuse(strategy, refused)
    if not joiners:
        return
    state.restrict(list(inventories.values()))
    own_snapshot = _captured(state, batch)
    snapshot = Snapshot.unpacked(Broadcast(extended.runtime, "state of the training")(own_snapshot.packed))
    if "error" in snapshot.plain:
        _refuse(strategy, {each: str(snapshot.plain["error"]) for each in joiners})
        return
    extended.take_from_first_rank(state.variables)
    extended.staging.take_read()  # one who joins has read others, and one who was alone compared none
    if rank in joiners:
        for name in state.apply(snapshot):
            logger.warning(
                "tfps: callback %s begins anew on this worker, which joins; get_state() and set_state(state) would let "
                "it go on",
                name.split()[0],
            )
        position = extended.training.skipped_steps + 1, snapshot.plain["epoch"] + 1
        logger.info("tfps: this worker goes on with step %d of epoch %d", *position)
    else:
        # Nothing has been assigned: pservers have all values still.
        state.move_remote(snapshot if "error" in own_snapshot.plain else own_snapshot)
        if snapshot.plain["taken"]:
            extended.staging.agreement.compare_next()
    extended.training.joins = Joins(state, joiners)


def _captured(state: TrainingState, batch: int) -> Snapshot:
    """What those who join get; what cannot be captured must not end a rank that has trained."""
    try:
        return state.capture(batch)
    except Exception as error:
        return Snapshot({"error": f"the others cannot say where they are: {in_a_line(error)}"}, {})


def _check(strategy: BaseStrategy, joins: Joins) -> None:
    """Compares the state of all ranks, after callbacks and before the first step of those who join."""
    extended = strategy.extended
    with _alone(strategy) if extended.exchange.rank in joins.joiners else contextlib.nullcontext():
        said = AllGather(extended.runtime, "state of those who join")(joins.state.digest())
        digests = {rank: np.frombuffer(each, np.int64) for rank, each in said.items()}
        theirs = next(each for rank, each in digests.items() if rank not in joins.joiners)
        refused = {}
        for rank in sorted(joins.joiners & digests.keys()):
            if (places := np.flatnonzero(digests[rank] != theirs)).size:
                name = joins.state.described(int(places[0]))
                refused[rank] = (
                    f"it has another value than the others of {name}, as after a callback or a program that changes it "
                    "on this worker only"
                )
        _refuse(strategy, refused)
    extended.staging.agreement.joiners = frozenset(joins.joiners - refused.keys())
    extended.staging.agreement.resume()


def _refuse(strategy: BaseStrategy, refused: Mapping[int, str]) -> set[int]:
    """Ends this worker if it is among the `refused`, who say why; returns them. All ranks call it.

    Raises:
        JoinError: it is.
    """
    for rank, why in refused.items():
        if rank == strategy.extended.exchange.rank:
            raise JoinError(why)
        logger.warning("tfps: rank %d cannot join, and the job goes on without it: %s", rank, why)
    return set(refused)


def _combine_metrics(strategy: BaseStrategy, model: Model) -> None:
    """Has all ranks combine metrics at the next read, also without another step: who joins has counted nothing."""
    for variable in model.metrics_variables:
        if hasattr(variable.value, "take_combined"):
            strategy.extended.note_local_write(variable.value)
