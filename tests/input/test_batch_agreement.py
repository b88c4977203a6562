"""Ranks take their batches together: who waits for what, what ends the data, and that nobody waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from keras_versions import NOT_IN_KERAS_3_8

import tfps
from tfps.errors import ClosedError, MismatchError
from tfps.exchange.interface import BucketSpec
from tfps.types import Array, Batches, Value

CONFIG = tfps.Config(slice_bytes=4096, window_bytes=16384, step_timeout_s=jobs.DEADLINE_S)
Pair = tuple[tfps.Strategy, companion.Companion]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with companion.strategy_with_companion(monkeypatch, CONFIG) as pair:
        yield pair


class Training:
    """A function that trains on the next batch of an iterator, on a thread where it may wait."""

    def __init__(self, strategy: tfps.Strategy, batches: int = 8) -> None:
        with strategy.scope():
            self.model, x, y = training.mlp()
            self.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).take(batches)
        self.distributed = strategy.distribute_datasets_from_function(lambda context: self.data)
        self.step: Callable[[Batches], Value] = tf.function(
            lambda iterator: strategy.run(self.model.train_step, args=(iterator.get_next(),)), autograph=False
        )
        self.outcome: list[Value] = []

    def in_background(self, iterator: Batches) -> threading.Thread:
        def run() -> None:
            try:
                self.outcome.append(self.step(iterator))
            except Exception as error:
                self.outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def batches_only(spec: BucketSpec) -> bool:
    return spec.name == "batches"


def test_data_ends_where_another_rank_has_no_batch_and_one_warning_says_so(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, other = pair
    other.batches = 2
    train = Training(strategy)
    for _ in range(3):
        iterator = iter(train.distributed)
        for _ in range(2):
            train.step(iterator)
        for _ in range(2):
            with pytest.raises(tf.errors.OutOfRangeError):
                train.step(iterator)
    said = [record.getMessage() for record in caplog.records if "ended after" in record.getMessage()]
    assert len(said) == 1
    assert "the data of rank 1 ended after 2 batches" in said[0]
    assert "batches dropped: rank 0 6." in said[0]


@NOT_IN_KERAS_3_8
def test_of_data_that_another_rank_has_ended_one_line_speaks_and_the_bar_shows_its_steps(
    pair: Pair, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    strategy, other = pair
    other.batches = 2
    train = Training(strategy, batches=5)
    train.model.fit(train.distributed, epochs=2)
    assert "batches dropped: rank 0 3." in caplog.text
    assert not [each for each in recwarn if "ran out of data" in str(each.message)]
    shown = capsys.readouterr().out
    assert "2/5" in shown
    assert "5/5" not in shown


@NOT_IN_KERAS_3_8
def test_ranks_with_as_many_batches_hear_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    train = Training(pair[0], batches=3)
    train.model.fit(train.distributed, epochs=2, verbose=0)
    assert not [record for record in caplog.records if "ended after" in record.getMessage()]


def test_the_next_batch_is_agreed_on_while_the_step_before_waits_for_its_gradients(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy)
    iterator = iter(train.distributed)
    train.step(iterator)
    train.model.get_weights()
    other.holds = lambda spec: not batches_only(spec)
    train.step(iterator)
    assert other.wait_held()
    # Step 2 cannot finish, as rank 1 holds its gradients back; the batch of step 3 is granted all the same.
    progress = next(iter(strategy.extended.staging.agreement._iterators.values()))
    jobs.poll(lambda: progress.agreed == 3)
    assert other.release() > 0


@NOT_IN_KERAS_3_8
def test_evaluation_and_prediction_in_graphs_ask_nobody(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy, batches=5)
    train.model.fit(train.distributed, verbose=0)
    # Five batches, and that there is no sixth one.
    jobs.poll(lambda: other.announced == 6)
    other.batches = 0
    assert len(train.model.predict(train.distributed, verbose=0)) == 80
    count = tf.function(lambda iterator: strategy.run(lambda batch: tf.shape(batch[0])[0], args=(iterator.get_next(),)))
    iterator = iter(train.distributed)
    assert sum(int(count(iterator)) for _ in range(5)) == 80
    total = tf.function(lambda: train.distributed.reduce(0, lambda seen, batch: seen + tf.shape(batch[0])[0]))
    assert int(total()) == 80
    assert other.announced == 6


def test_a_loop_that_takes_batches_eagerly_meets_the_others_at_its_first_one(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy, batches=5)
    assert len(list(train.distributed)) == 5
    assert other.announced == 1
    other.batches = 1
    assert len(list(train.distributed)) == 5
    assert other.announced == 2
    other.batches = 0
    assert not list(train.distributed)
    assert other.announced == 3


def test_a_loop_whose_steps_exchange_something_only_now_and_then_goes_on(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy, batches=7)
    taken = 0
    for _ in train.distributed:  # as with gradient accumulation
        taken += 1
        if taken % 3 == 0:
            strategy.reduce("SUM", 1.0, axis=None)
    assert taken == 7
    assert other.announced == 5, "the first batch, and two after each step that exchanged something"


def test_a_failure_reaches_a_step_that_waits_for_its_batch(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy)
    train.step(iter(train.distributed))
    jobs.poll(lambda: other.announced == 2)  # also the batch after it, when that has been read
    other.holds = batches_only
    thread = train.in_background(iter(train.distributed))
    assert other.wait_held()
    assert thread.is_alive()
    other._worker.fail(tfps.TfpsError("rank 1 has had enough"))
    thread.join(jobs.DEADLINE_S)
    assert "rank 1 has had enough" in str(train.outcome[0])
    with pytest.raises(tfps.TfpsError, match=r"^rank 1 \(.*\) failed: rank 1 has had enough$"):
        train.step(iter(train.distributed))


def test_closing_wakes_a_step_that_waits_for_its_batch(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy)
    train.step(iter(train.distributed))
    jobs.poll(lambda: other.announced == 2)  # also the batch after it, when that has been read
    other.holds = batches_only
    later = iter(train.distributed)
    thread = train.in_background(iter(train.distributed))
    assert other.wait_held()
    strategy._runtime.close(drain=False)
    thread.join(jobs.DEADLINE_S)
    assert "the strategy is closed" in str(train.outcome[0])
    with pytest.raises(ClosedError, match="the strategy is closed, a batch was asked for"):
        next(later)
    other.holds = lambda spec: False


def test_workers_that_take_batches_in_another_order_are_refused(pair: Pair) -> None:
    strategy, other = pair
    train = Training(strategy)
    train.step(iter(train.distributed))
    jobs.poll(lambda: other.announced == 2)  # also the batch after it, when that has been read

    def elsewhere(said: Array) -> Array:
        code, place, *more = said
        return np.array([code, place + 3, *more])

    other.of_batches = elsewhere  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match=r"^the workers .* rank 0 at batch 0 .* rank 1 at batch 3 .* same program"):
        train.step(iter(train.distributed))
