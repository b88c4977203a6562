"""Worker: trains while others are lost, and saves what it ends with.

lossy.py FOLDER KIND FAULT      FAULT: [step, point, signal] as JSON of this rank, or null
lossy.py FOLDER plain RANK      plain Keras, without the rows that rank RANK saw lost
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import faults
import keras
import numpy as np
import tensorflow as tf
import training
from jobs import poll

import tfps
from tfps.input import datasets
from tfps.input.lockstep import Lockstep
from tfps.types import Argument, Model
from tfps.worker.worker import Worker

BATCH = 47
EPOCHS = int(os.environ.get("EPOCHS", "2"))
SAMPLES = 5 * BATCH + 13
OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.01)}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build() -> Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def batches(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for begin in range(0, len(x), BATCH):
        yield x[begin : begin + BATCH], y[begin : begin + BATCH]


def fit(kind: str, model: Model, strategy: tfps.Strategy, fault: keras.callbacks.Callback | None, folder: Path) -> None:
    x, y = training.digits(SAMPLES)
    more: dict[str, Argument] = {"epochs": EPOCHS, "verbose": 0, "callbacks": [fault] if fault else []}
    if "joined" in kind:
        more["callbacks"].append(WaitsForNewcomer(strategy))
    if "shuffled" in kind:  # what these find decides how training goes on
        more["callbacks"].append(keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0))
        stopping = keras.callbacks.EarlyStopping("accuracy", patience=100, mode="min", restore_best_weights=True)
        more["callbacks"].append(stopping)
    if "backup" in kind:
        more["callbacks"].append(keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2))
    if "validation" in kind:
        more["validation_data"] = training.digits(60)
        more["validation_batch_size"] = 13
    if "save" in kind:
        more["callbacks"].append(keras.callbacks.ModelCheckpoint(folder / "model.keras"))
    if "dataset" in kind:
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH), **more)
    elif "generator" in kind:
        model.fit(Batches(x, y), shuffle=False, **more)
    elif "loop" in kind:
        model.optimizer.build(model.trainable_variables)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))

        @tf.function
        def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = LOSS(targets, model(inputs))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

        for _ in range(EPOCHS):
            for batch in data:
                strategy.run(step, args=batch)
    else:
        history = model.fit(x, y, batch_size=BATCH, shuffle="shuffled" in kind, **more).history
        (folder / f"history{cast(Worker, strategy._runtime.exchange).rank}.json").write_text(json.dumps(history))


class WaitsForNewcomer(keras.callbacks.Callback):
    """At the end of the first epoch the first worker waits until another one wants to join."""

    def __init__(self, strategy: tfps.Strategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch: int, logs: Argument = None) -> None:
        if epoch == 0 and self._strategy.rank == 0:
            poll(lambda: bool(self._strategy._runtime.exchange.joining.candidates(1)))


class Batches(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.batches = list(batches(x, y))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.batches[index]


def train(folder: Path, kind: str, fault: list[Argument] | None) -> None:
    divided: list[tuple[int, ...]] = []  # who divides each batch
    original = Lockstep._verdict

    def verdict(self: Lockstep, progress: Argument, position: int, codes: Argument, ranks: Argument) -> Argument:
        found = original(self, progress, position, codes, ranks)
        if found.all_have:
            divided.append(tuple(ranks))
        return found

    Lockstep._verdict = verdict  # type: ignore[method-assign]
    callback = faults.fail_at(*fault) if fault else None
    strategy = tfps.Strategy()
    with strategy.scope():
        model = build()
        model.compile(OPTIMIZERS["adam" if "adam" in kind else "sgd"](), LOSS, metrics=["accuracy"])
    fit(kind, model, strategy, callback, folder)
    worker = cast(Worker, strategy._runtime.exchange)
    found = {
        "weights": model.get_weights(),
        "ranks": worker.view.ranks,
        "divided": divided,
        "losses": [(loss.rank, loss.bucket, loss.step, loss.slices) for loss in worker._losses.found],
        "buckets": {
            b.spec.name: (b.spec.names, list(b.cutting.slices)) for b in worker._buckets if faults.is_gradient(b)
        },
        "kind": kind,
    }
    rank = worker.rank
    strategy.close()
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(found))


def plain(folder: Path, rank: str) -> None:
    found = pickle.loads((folder / f"rank{rank}.pickle").read_bytes())
    model = build()
    optimizer = OPTIMIZERS["adam" if "adam" in found["kind"] else "sgd"]()
    variables = model.trainable_variables
    optimizer.build(variables)
    counted = {(lost, bucket): (step, slices) for lost, bucket, step, slices in found["losses"]}
    x, y = training.digits(SAMPLES)
    steps = [batch for _ in range(EPOCHS) for batch in batches(x, y)]
    assert len(found["divided"]) == len(steps), (len(found["divided"]), len(steps))
    by_path = {variable.path: number for number, variable in enumerate(variables)}
    for number, ((inputs, targets), ranks) in enumerate(zip(steps, found["divided"], strict=True)):
        sums = [np.zeros(variable.shape, np.float32).reshape(-1) for variable in variables]
        rows = [len(datasets.part_of(place, len(ranks), tf.constant(inputs))) for place in range(len(ranks))]
        if (
            "loop" in found["kind"]
        ):  # a loop of its own asks for the rows when it takes a step, not when it announces it
            ended = {
                lost: min(step for other, _, step, _ in found["losses"] if other == lost)
                for lost, *_ in found["losses"]
            }
            rows = [0 if number > ended.get(each, number) else own for each, own in zip(ranks, rows, strict=True)]
        for place, each in enumerate(ranks):
            own_x, own_y = (datasets.part_of(place, len(ranks), tf.constant(part)) for part in (inputs, targets))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    keras.losses.sparse_categorical_crossentropy(own_y, model(own_x), from_logits=True)
                )
            gradients = [g.numpy().reshape(-1) / sum(rows) for g in tape.gradient(loss, [v.value for v in variables])]
            for bucket, (names, slices) in found["buckets"].items():
                numbers = [by_path[_path(name, by_path)] for name in names]
                flat = np.concatenate([gradients[n] for n in numbers])
                step, lacking = counted.get((each, bucket), (len(steps), ()))
                epoch = len(steps) // EPOCHS
                if number > step and number // epoch == step // epoch:
                    flat[:] = 0  # others had agreed with it on the next batches already
                elif number == step:
                    for index in lacking:
                        begin, nbytes = slices[index]
                        flat[begin // 4 : (begin + nbytes) // 4] = 0
                ends = np.cumsum([sums[n].size for n in numbers])[:-1]
                for n, part in zip(numbers, np.split(flat, ends), strict=True):
                    sums[n] += part
        optimizer.apply([tf.reshape(s, v.shape) for s, v in zip(sums, variables, strict=True)], variables)
    (folder / "plain.pickle").write_bytes(pickle.dumps(model.get_weights()))


def _path(name: str, paths: dict[str, int]) -> str:
    """The path of the variable that a bucket calls `name`."""
    (found,) = (path for path in paths if path == name or path.endswith("/" + name) or name.endswith(path))
    return found


if __name__ == "__main__":
    if sys.argv[2] == "plain":
        plain(Path(sys.argv[1]), sys.argv[3])
    else:
        train(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
