"""Worker: trains on data of which the workers have different numbers of batches; writes what happened to a file.

uneven.py OUT NAME ...      NAME is one of PROGRAMS; default: all
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import tensorflow as tf
import training
from keras_versions import KERAS_3_8

import tfps
from tfps.types import Argument, Batches, Json, Logs, Structure, Value

BATCHES = {0: 5, 1: 3}  # by rank
PARTIAL = {0: 2, 1: 0}
FITTED = ("fit", "without any", "not counted", "accumulation", "several steps", "eager", "unstaged", "failing")


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts what each epoch trains and evaluates on."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.trained.append(0)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.trained[-1] += 1

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self.evaluated.append(0)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.evaluated[-1] += 1


class Warnings(logging.Handler):
    """Keeps what tfps warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def shard(strategy: tfps.Strategy, batches: int, *, counted: bool = True) -> Value:
    """This worker's data; if not `counted`, TensorFlow cannot know how many batches there are."""
    images, labels = training.digits(320)
    first = 160 * strategy.rank
    dataset = tf.data.Dataset.from_tensor_slices((images[first:], labels[first:])).batch(16).take(batches)
    if not counted:
        dataset = dataset.filter(lambda images, labels: True)
    return strategy.distribute_datasets_from_function(lambda context: dataset)


def model_of(strategy: tfps.Strategy, **options: Argument) -> keras.Model:
    optimizer = options.pop("optimizer", {})
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.layers.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(**optimizer), loss, **options)
    return model


def fitted(strategy: tfps.Strategy, *, counted: bool = True, epochs: int = 3, **options: Argument) -> dict[str, Json]:
    model, steps = model_of(strategy, **options), Steps()
    data = shard(strategy, BATCHES[strategy.rank], counted=counted)
    model.fit(
        data, epochs=epochs, validation_data=shard(strategy, BATCHES[strategy.rank]), callbacks=[steps], verbose=0
    )
    return {
        "trained": steps.trained,
        "evaluated": steps.evaluated,
        "iterations": int(model.optimizer.iterations.numpy()),
        "weights": [weight.tobytes().hex() for weight in model.get_weights()],
    }


def empty(strategy: tfps.Strategy) -> dict[str, Json]:
    """One rank has no batch at all."""
    model, steps = model_of(strategy), Steps()
    model.build((None, 64))
    data = shard(strategy, PARTIAL[strategy.rank], counted=False)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(iterator: Batches) -> None:
        strategy.run(model.train_step, args=(iterator.get_next(),))

    for _ in range(2):
        iterator = iter(data)
        steps.on_epoch_begin(0)
        while True:
            try:
                step(iterator)
            except tf.errors.OutOfRangeError:
                break
            steps.on_train_batch_end(0)
    return {"trained": steps.trained, "weights": [weight.tobytes().hex() for weight in model.get_weights()]}


def loop(strategy: tfps.Strategy) -> dict[str, Json]:
    """Two iterators at once, batches taken outside of the step's function."""
    model, trained = model_of(strategy), []
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)), autograph=False)
    few, many = shard(strategy, BATCHES[strategy.rank]), shard(strategy, 7 - BATCHES[strategy.rank])
    for _ in range(2):
        trained.append(0)
        for one, two in zip(few, many, strict=False):
            step(one)
            step(two)
            trained[-1] += 1
    return {"trained": trained, "weights": [weight.tobytes().hex() for weight in model.get_weights()]}


def without_any(strategy: tfps.Strategy) -> dict[str, Json]:
    """One rank has no batch at all, and batches are taken outside of the step's function."""
    model, trained = model_of(strategy), []
    step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)), autograph=False)
    data = shard(strategy, PARTIAL[strategy.rank], counted=False)
    for _ in range(2):
        trained.append(0)
        for batch in data:
            step(batch)
            trained[-1] += 1
        iterator = iter(data)
        while next(iterator, None) is not None:
            trained[-1] += 1
    steps = Steps()
    model.fit(data, verbose=0, callbacks=[steps])
    trained += steps.trained
    seen = sum(len(labels) for _, labels in shard(strategy, BATCHES[strategy.rank]))  # a loop that does not train
    model.run_eagerly = True
    for _ in range(2 - strategy.rank):  # the second time, rank 0 alone
        model.predict(training.digits(16)[0], verbose=0)
    return {"trained": trained, "seen": seen, "weights": [weight.tobytes().hex() for weight in model.get_weights()]}


def in_function(strategy: tfps.Strategy) -> dict[str, Json]:
    """Whole epochs inside of a function: of a loop over a dataset (also one given to the function) or an iterator."""
    model, trained = model_of(strategy), []
    data = shard(strategy, BATCHES[strategy.rank], counted=False)

    def over(batches: Batches) -> tf.Tensor:
        steps = tf.constant(0)
        for batch in batches:
            strategy.run(model.train_step, args=(batch,))
            steps += 1
        return steps

    over_dataset, over_argument = tf.function(lambda: over(data)), tf.function(lambda given: over(given["data"]))

    @tf.function  # type: ignore[untyped-decorator]
    def over_iterator() -> tf.Tensor:
        iterator = iter(data)
        for _ in tf.range(3):
            strategy.run(model.train_step, args=(next(iterator),))
        return tf.constant(3)

    @tf.function  # type: ignore[untyped-decorator]
    def evaluation() -> tf.Tensor:  # uses everything: it does not train
        seen = tf.constant(0)
        for images, _ in data:
            seen += strategy.run(lambda images: tf.shape(images)[0], args=(images,))
        return seen

    given = {"data": data}
    for epoch in (over_dataset, over_dataset, over_iterator, over_dataset):
        trained += [int(epoch()), int(over_argument(given))]
    weights = [weight.tobytes().hex() for weight in model.get_weights()]
    return {"trained": trained, "seen": int(evaluation()), "weights": weights}


def failing(strategy: tfps.Strategy) -> dict[str, Json]:
    """The input pipeline of rank 1 fails."""

    def generator() -> Iterator[Structure]:
        images, labels = training.digits(16)
        for number in range(5):
            if number == 2 and strategy.rank == 1:
                raise ArithmeticError("the disk is on fire")
            yield images, labels

    signature = (tf.TensorSpec([16, 64]), tf.TensorSpec([16], tf.int64))
    dataset = tf.data.Dataset.from_generator(generator, output_signature=signature)
    data = strategy.distribute_datasets_from_function(lambda context: dataset)
    model, steps = model_of(strategy), Steps()
    try:
        model.fit(data, callbacks=[steps], verbose=0)
    except tf.errors.InvalidArgumentError as error:
        return {"trained": steps.trained, "error": error.message}
    return {"trained": steps.trained, "error": "none"}


PROGRAMS: dict[str, Callable[[tfps.Strategy], dict[str, Json]]] = {
    "fit": fitted,
    "not counted": lambda strategy: fitted(strategy, counted=False),
    "accumulation": lambda strategy: fitted(strategy, optimizer={"gradient_accumulation_steps": 2}),
    "several steps": lambda strategy: fitted(strategy, steps_per_execution=4),
    "eager": lambda strategy: fitted(strategy, run_eagerly=True, epochs=2),
    "empty": empty,
    "loop": loop,
    "without any": without_any,
    "in function": in_function,
    "unstaged": fitted,
    "unstaged loop": loop,
    "failing": failing,
}


def main(out: str, *names: str) -> None:
    warnings = Warnings()
    results: dict[str, Json] = {}
    for name in names or PROGRAMS:
        if name in FITTED and KERAS_3_8:
            continue
        program = PROGRAMS[name]
        strategy = tfps.Strategy(config=tfps.Config(staging_depth=0) if name.startswith("unstaged") else None)
        logging.getLogger("tfps").addHandler(warnings)
        warnings.said = []
        result = results[name] = program(strategy)
        result["warnings"] = list(warnings.said)
        if name == "not counted":
            result["predicted"] = len(model_of(strategy).predict(shard(strategy, 5 - 2 * strategy.rank), verbose=0))
        strategy.close()
        print(name, "ended", flush=True)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
