"""Generators that several loops read: each begins after the last batch that the one before has used."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import itertools
import threading
from collections.abc import Callable, Generator, Iterator

import keras
import numpy as np
import pytest

import tfps
from tfps.keras_hooks.generators import Reading, View
from tfps.types import Model, Structure, Value

SIZE = 4


class Sums(keras.Model):
    """Notes the batches that it is trained on, and evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = self.add_weight(shape=(40,), initializer="zeros", trainable=False, aggregation="mean")

    def call(self, x: Value) -> Value:
        return self.dense(x)

    def note(self, batch: Structure, what: float) -> dict[str, Value]:
        number = keras.ops.cast(batch[0][0, 0], "int32")
        self.seen.assign_add(what * keras.ops.one_hot(number, 40))
        return {"loss": 0.0 * keras.ops.mean(self(batch[0]))}

    def train_step(self, batch: Structure) -> dict[str, Value]:
        return self.note(batch, 1.0)

    def test_step(self, batch: Structure) -> dict[str, Value]:
        return self.note(batch, 10.0)


def batches(first: int = 0) -> Iterator[Structure]:
    for number in itertools.count(first):
        yield np.full((SIZE, 1), number, np.float32), np.zeros((SIZE, 1), np.float32)


@pytest.fixture
def model(strategy: tfps.Strategy) -> Model:
    with strategy.scope():
        model = Sums()
        model.compile("sgd")
    return model


def seen(model: Model) -> list[int]:
    return [int(each) for each in np.trim_zeros(np.asarray(model.seen))]


def test_loops_over_one_generator_use_each_batch_once_and_lose_none(model: Model) -> None:
    generator = batches()
    model.fit(generator, steps_per_epoch=2, epochs=2, verbose=0)
    model.fit(generator, steps_per_epoch=3, verbose=0)
    model.evaluate(generator, steps=2, verbose=0)
    model.fit(generator, steps_per_epoch=2, verbose=0)
    assert seen(model) == [1] * 7 + [10] * 2 + [1] * 2


def test_training_and_validation_take_turns_at_one_generator(model: Model) -> None:
    generator = batches()
    model.fit(generator, steps_per_epoch=2, epochs=3, verbose=0, validation_data=generator, validation_steps=1)
    # Keras validates each epoch on the batches that it has looked at first.
    assert seen(model) == [1, 1, 30, 1, 1, 1, 1]


def test_a_generator_that_ends_ends_the_loop(model: Model) -> None:
    generator = itertools.islice(batches(), 5)
    model.fit((each for each in generator), verbose=0)
    assert seen(model) == [1] * 5


def view(reading: Reading, stop: Callable[[], object] = lambda: None) -> View:
    made = reading.begin(stop, goes_on=False)
    assert reading.open() is made
    return made


def numbers(count: int) -> Generator[int, None, None]:
    yield from range(count)


def test_what_is_not_used_comes_first_for_the_next_reader() -> None:
    source = numbers(20)
    first = Reading(source)
    look = first.look()
    assert [next(look), next(look)] == [0, 1]
    one = view(first)
    assert [next(one) for _ in range(5)] == [0, 1, 2, 3, 4]
    one.used(1)
    one.close(2)
    assert list(one) == []  # it has ended
    second = Reading(source)
    assert next(second.look()) == 2
    assert list(view(second)) == list(range(2, 20))


def test_the_next_reader_stops_the_one_before_and_waits_for_it() -> None:
    source, stopped = numbers(9), threading.Event()
    one = view(Reading(source), stopped.set)
    assert [next(one) for _ in range(3)] == [0, 1, 2]

    def ends() -> None:
        assert stopped.wait(30.0)
        one.close(1)

    thread = threading.Thread(target=ends, daemon=True)
    thread.start()
    assert list(view(Reading(source))) == list(range(1, 9))
    thread.join()
