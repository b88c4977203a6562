"""Worker: trains on data that is shuffled without a seed, and prints for each case how often each row was used.

unseeded.py NAME ...       names of CASES
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.types import Array, Batches, Value

ROWS, BATCH, EPOCHS = 64, 8, 2
X = np.arange(ROWS, dtype="float32")[:, None]
Y = X % 7


class Seen(keras.metrics.Metric):
    """How often each row was used, over all ranks; its result says how many rows were used exactly once."""

    def __init__(self) -> None:
        super().__init__(name="once")
        self.times = self.add_weight(shape=(ROWS,), name="times", initializer="zeros")

    def update_state(self, y_true: Value, y_pred: Value, sample_weight: Value = None) -> None:
        rows = tf.cast(tf.round(y_true[:, 1]), tf.int32)
        self.times.assign_add(tf.reduce_sum(tf.one_hot(rows, ROWS), 0))

    def result(self) -> Value:
        return tf.reduce_sum(tf.cast(tf.equal(self.times, 1.0), tf.float32))


TARGETS = np.concatenate([Y, X], 1)  # with the row's number


class Parting(keras.utils.PyDataset):
    """From batch 4 on its targets, by what is wrong, are others on each rank."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        apart = own_order()[:BATCH, None] if index >= 4 else 0
        return X[rows], TARGETS[rows] + apart


class Sequence(keras.utils.PyDataset):
    """Shuffles with NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.on_epoch_end()

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], TARGETS[rows]

    def on_epoch_end(self) -> None:
        self.order = np.random.permutation(ROWS)


def generated() -> Iterator[tuple[Array, Array]]:
    while True:
        order = np.random.permutation(ROWS)
        for start in range(0, ROWS, BATCH):
            rows = order[start : start + BATCH]
            yield X[rows], TARGETS[rows]


def shuffled(order: Value = None) -> tf.data.Dataset:
    rows = slice(None) if order is None else order
    return tf.data.Dataset.from_tensor_slices((X[rows], TARGETS[rows]))


def with_policy(dataset: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return dataset.with_options(options)


def noisy(x: Value, y: Value) -> tuple[Value, Value]:
    return x + tf.random.normal(tf.shape(x)), y


def cropped(x: Value, y: Value) -> tuple[Value, Value]:
    return tf.image.random_crop(tf.tile(tf.cast(x, tf.uint8)[:, :, None], [1, 2, 1]), [tf.shape(x)[0], 1, 1])[..., 0], y


def numbered() -> tf.data.Dataset:
    """Words by the numbers that a set gives them: others in each process."""
    numbers = {word: number for number, word in enumerate({f"word {row}" for row in range(ROWS)})}
    words = np.array([[numbers[f"word {row}"]] for row in range(ROWS)])
    return tf.data.Dataset.from_tensor_slices((words, TARGETS)).batch(BATCH)


def own_order() -> Array:
    """As a program that has a generator of its own, without a seed."""
    return np.random.default_rng().permutation(ROWS)


def fitted(make: Callable[[], Batches], **options: Value) -> Callable[[tfps.Strategy], str]:
    def case(strategy: tfps.Strategy) -> str:
        data = make()
        model = compiled(strategy)
        arguments = {"x": X, "y": TARGETS, "batch_size": BATCH} if data is None else {"x": data}
        history = model.fit(**arguments, epochs=EPOCHS, verbose=0, **options)
        return f"{history.history['once']}"

    return case


def evaluated(make: Callable[[], Batches]) -> Callable[[tfps.Strategy], str]:
    return lambda strategy: f"{compiled(strategy).evaluate(make(), verbose=0)[1]}"


def looped(strategy: tfps.Strategy) -> str:
    """A loop of one's own over data in an order of this rank's own."""
    model = compiled(strategy)
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
    for batch in strategy.experimental_distribute_dataset(shuffled(own_order()).batch(BATCH)):
        step(batch)
    return "trained"


def compiled(strategy: tfps.Strategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(1e-5), "mse", metrics=[Seen()])
    return model


CASES: dict[str, Callable[[tfps.Strategy], str]] = {
    "arrays": fitted(lambda: None),
    "shuffle": fitted(lambda: shuffled().shuffle(ROWS).batch(BATCH)),
    "sequence": fitted(Sequence),
    "generator": fitted(generated, steps_per_epoch=ROWS // BATCH),
    "validated": fitted(lambda: None, validation_split=0.25),
    "noise": fitted(lambda: shuffled().shuffle(ROWS).batch(BATCH).map(noisy)),
    "cropped": fitted(lambda: shuffled().shuffle(ROWS).batch(BATCH).map(cropped)),
    "parting": fitted(Parting, shuffle=False),
    "parting, evaluate": evaluated(Parting),
    "set": fitted(numbered),
    "evaluate": evaluated(lambda: shuffled().shuffle(ROWS).batch(BATCH)),
    "own order": fitted(lambda: shuffled(own_order()).batch(BATCH)),
    "own order, evaluate": evaluated(lambda: shuffled(own_order()).batch(BATCH)),
    "own order, loop": looped,
    "own order, off": fitted(lambda: with_policy(shuffled(own_order()).batch(BATCH), "OFF")),
    "off": fitted(lambda: with_policy(shuffled().shuffle(ROWS).batch(BATCH), "OFF")),
}


def main(*arguments: str) -> None:
    for argument in arguments:
        name, _, port = argument.rpartition(":")
        strategy = tfps.Strategy([f"127.0.0.1:{port}"])
        try:
            end = CASES[name](strategy)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        print(f"{name}: {end}".replace("\n", " "), flush=True)
        strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
