"""Generators that loops read ahead, one after the other: what was not used comes first for the next."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.keras_hooks.generators import Reading
from tfps.types import Logs, Structure

NOTHING = threading.Event().set  # stops nothing


def numbers() -> Generator[int, None, None]:
    yield from itertools.count()


def test_what_was_read_and_not_used_comes_first_for_the_next_reader() -> None:
    source = numbers()
    first = Reading(source)
    assert list(itertools.islice(first.look(), 2)) == [0, 1]
    view = first.begin(lambda: view.close(3), goes_on=False)
    assert first.open() is view
    assert list(itertools.islice(view, 6)) == [0, 1, 2, 3, 4, 5]
    second = Reading(source)
    assert list(itertools.islice(second.look(), 2)) == [3, 4]  # has stopped the first one
    assert list(view) == []  # which reads no more
    assert list(itertools.islice(second.open(), 4)) == [3, 4, 5, 6]


def test_a_loop_begins_with_the_first_batches_again_as_in_keras_unless_it_goes_on() -> None:
    reading = Reading(numbers())
    list(itertools.islice(reading.look(), 2))
    for used, goes_on, expected in ((1, False, [0, 1, 2]), (2, False, [0, 1, 2]), (2, True, [2, 3, 4])):
        view = reading.begin(NOTHING, goes_on=goes_on)
        assert list(itertools.islice(reading.open(), 3)) == expected
        view.close(used if not goes_on else 0)
    view = reading.begin(NOTHING, goes_on=True)
    assert next(view) == 2
    view.used(1)
    view.close(1)
    assert next(Reading(reading._source).open()) == 3


class Numbered(keras.Model):
    """Reports the number that each batch consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.dense(x)

    def train_step(self, data: Structure) -> Logs:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"number": tf.reduce_mean(y)}

    def test_step(self, data: Structure) -> Logs:
        x, y = data
        self(x)
        return {"number": tf.reduce_mean(y)}


class Seen(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | tuple[int]] = []

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.seen.append(round(float((logs or {})["number"])))

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.seen.append((round(float((logs or {})["number"])),))


def batches(sizes: int = 3) -> Iterator[Structure]:
    for number in itertools.count():
        yield np.ones((5, sizes), "float32"), np.full((5, 1), number, "float32")


def test_training_and_validation_share_one_generator_in_turns() -> None:
    strategy = tfps.Strategy()
    with strategy.scope():
        model = Numbered()
        model.compile("sgd", "mse")
    source, seen = batches(), Seen()
    model.fit(
        source, steps_per_epoch=2, epochs=3, validation_data=source, validation_steps=3, verbose=0, callbacks=[seen]
    )
    expected = [0, 1, (2,), (3,), (4,), 5, 6, (2,), (3,), (7,), 8, 9, (2,), (3,), (10,)]
    assert seen.seen == expected

    class Within(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
            if batch == 0:
                model.evaluate(source, steps=1, verbose=0, callbacks=[seen])

    seen.seen.clear()
    model.fit(source, steps_per_epoch=2, epochs=2, verbose=0, callbacks=[seen, Within()])
    assert seen.seen == [11, (12,), 13, 14, (15,), 16]
    strategy.close()
