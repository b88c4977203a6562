"""The double buffer: what lies ready, in which order, what ends it, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import training

import tfps
from tfps.errors import UnsupportedError
from tfps.graph.ops import HOST
from tfps.input.datasets import StagedDataset, StagedDatasetFromFunction
from tfps.input.staging import Stage
from tfps.pserver.server import ParameterServer
from tfps.types import Batches, Logs, Structure, Value


@pytest.fixture(autouse=True)
def _only_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of an earlier test is left, and who closes waits for its own also where they do not get to run."""
    monkeypatch.setattr("tfps.input.staging._JOIN_S", jobs.DEADLINE_S)
    jobs.poll(lambda: not fillers())


def fillers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tfps-stage")]


def collected(gone: Callable[[], object]) -> bool:
    gc.collect()  # does nothing while another thread collects
    return gone() is None


def nothing_left(strategy: tfps.Strategy) -> bool:
    gc.collect()
    return not fillers() and strategy.extended.staging.staged() == 0


class Source:
    """A dataset of `count` numbers that knows how far it was read; `fails_at`: raises there."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.made = 0

        def generator() -> Iterator[int]:
            for number in range(count):
                if number == fails_at:
                    raise ArithmeticError("the disk is on fire")
                self.made += 1
                yield number

        self.dataset = tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([], tf.int64))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        self.dataset = self.dataset.with_options(options)


def everything() -> tf.data.Dataset:
    """Batches of every kind of component."""
    return tf.data.Dataset.from_tensor_slices(
        (
            {
                "dense": tf.reshape(tf.range(12, dtype=tf.float32), [6, 2]),
                "ragged": tf.ragged.constant([[1], [2, 3], [], [4], [5], [6, 7]]),
                "sparse": tf.sparse.from_dense([[1, 0], [0, 2], [0, 0], [3, 4], [0, 0], [5, 0]]),
                "text": tf.constant(list("abcdef")),
            },
            tf.range(6, dtype=tf.int32),
        )
    ).batch(4)


def plain(batch: Structure) -> list[Value]:
    return [np.asarray(part).tolist() for part in tf.nest.flatten(batch, expand_composites=True)]


def test_batches_of_every_structure_come_as_they_are(strategy: tfps.Strategy) -> None:
    dataset = everything().map(lambda features, label: (features, label, None))
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(distributed, StagedDataset)
    assert distributed.element_spec == dataset.element_spec
    expected = [plain(batch[:2]) for batch in dataset]

    eager = list(distributed)
    assert [plain(batch[:2]) for batch in eager] == expected
    assert [batch[2] for batch in eager] == [None, None]
    assert isinstance(eager[0][0]["ragged"], tf.RaggedTensor)
    assert isinstance(eager[0][0]["sparse"], tf.SparseTensor)

    @tf.function
    def following(iterator: Batches) -> Value:
        batch = iterator.get_next()
        assert batch[0]["dense"].shape.as_list() == [None, 2]
        assert batch[2] is None
        return batch[:2]

    @tf.function
    def optional(iterator: Batches) -> Value:
        return iterator.get_next_as_optional()

    iterator, other = iter(distributed), iter(distributed)
    assert [plain(following(iterator)) for _ in range(2)] == expected
    for _ in range(2):  # the end stays the end
        with pytest.raises(tf.errors.OutOfRangeError):
            following(iterator)
    assert [plain(optional(other).get_value()[:2]) for _ in range(2)] == expected
    for _ in range(2):
        assert not optional(other).has_value()
        assert not other.get_next_as_optional().has_value()


def test_datasets_from_a_function_are_staged_too(strategy: tfps.Strategy) -> None:
    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return tf.data.Dataset.range(5).batch(context.get_per_replica_batch_size(2))

    distributed = strategy.distribute_datasets_from_function(make)
    assert isinstance(distributed, StagedDatasetFromFunction)
    assert [batch.numpy().tolist() for batch in distributed] == [[0, 1], [2, 3], [4]]


def test_loops_inside_a_function_take_every_batch(strategy: tfps.Strategy) -> None:
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).batch(4))

    @tf.function
    def total(batches: Structure) -> tf.Tensor:
        result = tf.constant(0, tf.int64)
        for batch in batches:
            result += tf.reduce_sum(batch)
        return result

    assert int(total(distributed)) == int(total(iter(distributed))) == 45
    same = tf.function(lambda batches: batches)
    with pytest.raises(UnsupportedError, match=r"that a tf\.function returns cannot be used outside"):
        iter(same(distributed))


def test_batches_are_made_while_a_step_computes_and_no_further_ahead_than_the_depth(strategy: tfps.Strategy) -> None:
    source = Source(9)
    lead = []
    iterator = iter(strategy.experimental_distribute_dataset(source.dataset))
    assert source.made == 0  # nobody has asked for anything yet
    for taken, batch in enumerate(iterator, 1):
        assert int(batch) == taken - 1
        # "Computing": it does not go on before the next two batches lie ready.
        ahead = min(2, 9 - taken)
        jobs.poll(functools.partial(lambda ahead: strategy.extended.staging.staged() == ahead, ahead))
        lead.append(source.made - taken)
    assert lead == [2, 2, 2, 2, 2, 2, 2, 1, 0]


def test_an_error_of_the_pipeline_is_raised_at_its_step_after_the_batches_before(strategy: tfps.Strategy) -> None:
    distributed = strategy.experimental_distribute_dataset(Source(9, fails_at=3).dataset)

    @tf.function
    def following(iterator: Batches) -> Value:
        return iterator.get_next()

    for get in (following, next):
        iterator = iter(distributed)
        assert [int(get(iterator)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"(?s)input pipeline.*ArithmeticError: the disk is on"
        ):
            get(iterator)
        with pytest.raises((tf.errors.OutOfRangeError, StopIteration)):
            get(iterator)
    del iterator
    jobs.poll(lambda: nothing_left(strategy))


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(contextlib.nullcontext, id="eager", marks=pytest.mark.long),
        pytest.param(lambda: tf.Graph().as_default(), id="graph"),
    ],
)
def test_an_iterator_that_is_dropped_leaves_nothing_behind(
    strategy: tfps.Strategy, where: Callable[[], AbstractContextManager[object]], recwarn: pytest.WarningsRecorder
) -> None:
    distributed = strategy.experimental_distribute_dataset(Source(100).dataset)
    for number in distributed:
        if int(number) == 3:
            break
    jobs.poll(lambda: nothing_left(strategy))
    iterator = iter(distributed)
    next(iterator)
    gone = weakref.ref(iterator)
    jobs.poll(lambda: strategy.extended.staging.staged() == 2)
    assert len(fillers()) == 1
    gc.disable()
    try:
        with where():  # a program that builds a graph of TensorFlow 1 meanwhile
            del iterator
        assert gone() is None  # without the garbage collector: there is no cycle
    finally:
        gc.enable()
    jobs.poll(lambda: nothing_left(strategy))
    assert not recwarn.list  # an exception in a finalizer


def test_an_iterator_that_is_dropped_takes_out_its_own_batches_only(strategy: tfps.Strategy) -> None:
    distributed = strategy.experimental_distribute_dataset(Source(9).dataset)
    dropped, kept = iter(distributed), iter(distributed)
    assert (int(next(dropped)), int(next(kept))) == (0, 0)
    jobs.poll(lambda: strategy.extended.staging.staged() == 4)
    del dropped
    jobs.poll(lambda: len(fillers()) == 1)
    assert strategy.extended.staging.staged() == 2
    assert [int(number) for number in kept] == list(range(1, 9))


def test_who_drops_an_iterator_finds_the_batch_that_it_takes_out_while_the_thread_ends(
    strategy: tfps.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(Source(100).dataset))
    next(iterator)
    feed = iterator._feed
    jobs.poll(lambda: strategy.extended.staging.staged() == 2 and feed._putting)
    filler = feed._thread
    dequeue = feed.tokens.dequeue

    def stalled() -> list[Value]:
        taken: list[Value] = dequeue()
        if threading.current_thread() is not filler:
            jobs.poll(feed.tokens.is_closed)  # the thread ends
        return taken

    monkeypatch.setattr(feed.tokens, "dequeue", stalled)
    assert jobs.attempt(feed.stop) == [None]
    filler.join(jobs.DEADLINE_S)
    assert nothing_left(strategy)
    assert not strategy.extended.staging._running


def test_close_ends_iterators_that_are_still_in_use() -> None:
    strategy = tfps.Strategy()
    iterator = iter(strategy.experimental_distribute_dataset(Source(100).dataset))
    next(iterator)
    staging = strategy.extended.staging
    strategy.close()
    assert not fillers()
    assert staging.staged() == 0
    again = strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))  # unstaged, for prediction
    assert [int(number) for number in again] == [0, 1, 2]


def test_a_strategy_that_is_closed_early_ends_its_input_and_not_that_of_others() -> None:
    server = ParameterServer("127.0.0.1", 0, workers=1)
    early, late = tfps.Strategy([server.address]), tfps.Strategy([server.address])
    iterators = [iter(each.experimental_distribute_dataset(Source(100).dataset)) for each in (early, late)]
    assert [int(next(iterator)) for iterator in iterators] == [0, 0]
    jobs.poll(lambda: late.extended.staging.staged() == 2)
    staging = early.extended.staging
    assert len(fillers()) == 2
    early.close()
    assert len(fillers()) == 1
    assert staging.staged() == 0
    assert [int(next(iterators[1])) for _ in range(2)] == [1, 2]
    gone = weakref.ref(staging)
    iterators.pop(0)
    del early, staging
    jobs.poll(lambda: collected(gone))
    late.close()
    assert not fillers()
    server.stop()


def test_a_strategy_that_is_dropped_ends_its_input() -> None:
    server = ParameterServer("127.0.0.1", 0, workers=1)
    dropped, kept = tfps.Strategy([server.address]), tfps.Strategy([server.address])
    iterator = iter(dropped.experimental_distribute_dataset(Source(100).dataset))
    assert int(next(iterator)) == 0
    gone = weakref.ref(dropped)
    del dropped
    jobs.poll(lambda: collected(gone))
    jobs.poll(lambda: not fillers())  # another thread may have collected it: that one does not wait
    kept.close()
    server.stop()


def test_a_new_epoch_and_a_new_fit_need_no_new_trace(strategy: tfps.Strategy) -> None:
    traces = []

    class Counting(keras.Sequential):
        def train_step(self, data: Structure) -> Logs:
            traces.append("train")
            return super().train_step(data)

        def test_step(self, data: Structure) -> Logs:
            traces.append("test")
            return super().test_step(data)

    with strategy.scope():
        model = Counting([keras.layers.Input((64,)), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = training.digits(64)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    for _ in range(2):
        model.fit(data, epochs=3, validation_data=data, verbose=0)
    assert traces == ["train", "test"]
    jobs.poll(lambda: nothing_left(strategy))


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_the_step_that_finds_the_end_does_not_count_itself(strategy: tfps.Strategy, steps_per_execution: int) -> None:
    with strategy.scope():
        model, x, y = training.mlp()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, steps_per_execution=steps_per_execution)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).filter(lambda x, y: True)
    assert int(data.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    model.fit(data, epochs=4, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 4 * 5


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.long), 4])
def test_fit_with_and_without_staging_is_bitwise_the_same(steps_per_execution: int) -> None:
    def trained(depth: int) -> list[bytes]:
        strategy = tfps.Strategy(config=tfps.Config(staging_depth=depth))
        try:
            return training.train(strategy, keras.optimizers.Adam, steps_per_execution=steps_per_execution)
        finally:
            strategy.close()

    assert trained(0) == trained(2) == trained(5)


def test_depth_zero_leaves_datasets_to_tensorflow() -> None:
    strategy = tfps.Strategy(config=tfps.Config(staging_depth=0))
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))
    assert not isinstance(distributed, StagedDataset)
    assert [int(number) for number in distributed] == [0, 1, 2]
    strategy.close()


def test_a_batch_is_not_taken_inside_of_a_replica_function(strategy: tfps.Strategy) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(3)))
    with pytest.raises(ValueError, match="outside of the replica function"):
        strategy.run(lambda: next(iterator))


def test_small_whole_numbers_are_staged_on_the_host_if_there_is_a_gpu() -> None:
    """Functions of TensorFlow take and return them there; on a device, each step would copy them twice."""
    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.string))

    def staged_on(device: str) -> set[tuple[tuple[tf.DType, ...], str]]:
        asked: set[tuple[tuple[tf.DType, ...], str]] = set()

        class Fake:
            devices = (device,)

            def buffer(self, replica: int, dtypes: tuple[tf.DType, ...], device: str) -> None:
                asked.add((dtypes, device))

        staging: Value = Fake()
        Stage(staging, spec)
        return asked

    assert staged_on("/device:GPU:0") == {((tf.float32,), "/device:GPU:0"), ((tf.int32, tf.string), HOST)}
    assert staged_on("/device:CPU:1") == {((tf.float32, tf.int32), "/device:CPU:1"), ((tf.string,), HOST)}
