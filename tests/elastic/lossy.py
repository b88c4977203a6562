"""Worker: trains while others are lost, and saves what it ends with.

lossy.py FOLDER KIND FAULT      FAULT: [step, point, signal] as JSON of this rank, or null
lossy.py FOLDER plain RANK      plain Keras, without the rows that rank RANK saw lost: what it may end with
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from tfps.input.batch_agreement import BatchAgreement
from tfps.keras_hooks import joining
from tfps.recovery.exchange import ElasticExchange
from tfps.types import Argument, Model
from tfps.worker.worker import Worker

BATCH = 47
DEVICES = [f"CPU:{number}" for number in range(int(os.environ.get("DEVICES", "1")))]
WAITS = "waits"  # the file that a first worker makes
JOIN_AFTER = json.loads(os.environ.get("JOIN_AFTER", "[0, 5]"))
NEWCOMERS = int(os.environ.get("NEWCOMERS", "1"))
EPOCHS = int(os.environ.get("EPOCHS", "2"))
SAMPLES = 5 * BATCH + 13
EVERY = 4  # batches that are accumulated before an update
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "accumulated": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=EVERY),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def build() -> Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.layers.Input((64,)),
            keras.layers.Reshape((8, 8, 1)),
            keras.layers.Conv2D(4, 3, activation="tanh"),  # smooth: a sum in another order moves nothing by much
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def build_with_table() -> Model:
    """A pixel of a value is a word of the image."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((64,))
    words = keras.ops.cast(16 * inputs, "int64") + 17 * keras.ops.arange(64, dtype="int64")
    table = tfps.layers.Embedding(None, 4, optimizer=keras.optimizers.Adagrad(0.1), name="words")
    hidden = keras.layers.Flatten()(table(words))
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


def rows_of(model: Model) -> list[np.ndarray]:
    """All rows of its table, if it has one."""
    tables = [layer for layer in model.layers if isinstance(layer, tfps.layers.Embedding)]
    return [table.read_rows(np.arange(17 * 64)) for table in tables]


def batches(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for begin in range(0, len(x), BATCH):
        yield x[begin : begin + BATCH], y[begin : begin + BATCH]


def turned(number: int, count: int) -> int:
    """Which of `count` batches has this number in a stream, which turns them by one each time that all were there."""
    return (number + number // count) % count


def epochs_of(kind: str) -> list[list[int]]:
    """The numbers of the batches of each epoch in plain Keras, whose random state is that of a model just built."""
    count, found = math.ceil(SAMPLES / BATCH), list[list[int]]()
    order: list[int] = []
    reordered = list(range(count))
    for epoch in range(EPOCHS):
        if "part" in kind and epoch % 2:  # after an epoch of four steps, the next one finds the end of the data
            found.append(order[4:])
            continue
        order = list(range(count))
        if "endless" in kind or ("yielded" in kind and "finite" not in kind):
            order = [turned(epoch * count + number, count) for number in order]
        if "reordered" in kind:
            order = reordered = [reordered[number] for number in np.random.permutation(count)]
        if "pydataset" in kind and "shuffled" in kind:
            random.shuffle(order)
        end = 4 if "part" in kind else 2 if "finite" in kind and epoch else count  # Keras begins with two it has seen
        found.append(order[:end])
    return found


def fit(kind: str, model: Model, strategy: tfps.Strategy, fault: keras.callbacks.Callback | None, folder: Path) -> None:
    x, y = training.digits(SAMPLES)
    more: dict[str, Argument] = {"epochs": EPOCHS, "verbose": 0, "callbacks": [fault] if fault else []}
    if "joined" in kind:
        more["callbacks"].append(WaitsForJoiner(strategy, folder))
    if "assigned" in kind:
        more["callbacks"].append(keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: assign_again(model)))
    if "shuffled" in kind and "arrays" in kind:  # what these find decides how training goes on
        more["callbacks"].append(keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0))
        stopping = keras.callbacks.EarlyStopping("accuracy", patience=100, mode="min", restore_best_weights=True)
        more["callbacks"].append(stopping)
    if "backup" in kind:
        more["callbacks"].append(keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2))
    if "validation" in kind and "pydataset" in kind:
        more["validation_data"] = Batches(*training.digits(60))
    elif "validation" in kind:
        more["validation_data"] = training.digits(60)
        more["validation_batch_size"] = 13
    if "save" in kind:
        more["callbacks"].append(keras.callbacks.ModelCheckpoint(folder / "model.keras"))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    if "pydataset" in kind:
        kinds = {"reordered": Reordered, "counting": Counting, "endless": Endless}
        data = next((kinds[each] for each in kinds if each in kind), Batches)(x, y)
        data.workers = 2 if "workers" in kind else 1
        steps = 4 if "part" in kind else len(data) if "endless" in kind else None
        save_history(folder, strategy, model.fit(data, shuffle="shuffled" in kind, steps_per_epoch=steps, **more))
    elif "dataset repeated" in kind:
        model.fit(dataset.repeat(), steps_per_epoch=int(dataset.cardinality()), **more)
    elif "dataset" in kind:
        model.fit(dataset, **more)
    elif "generator" in kind:
        model.fit(Batches(x, y), shuffle=False, **more)
    elif "yielded" in kind:
        forever = None if "finite" in kind else math.ceil(SAMPLES / BATCH)
        each = list(batches(x, y))
        yielded = (each[turned(number, len(each))] for number in range(len(each) * (EPOCHS if forever else 1)))
        save_history(folder, strategy, model.fit(yielded, steps_per_epoch=forever, **more))
    elif "loop" in kind or "alone" in kind:
        model.optimizer.build(model.trainable_variables)
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))

        @tf.function
        def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = LOSS(targets, model(inputs))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

        if "alone" in kind:  # each worker by itself, as Keras' guides have it, with all rows
            for inputs, targets in [*batches(x, y)] * EPOCHS:
                step(tf.constant(inputs), tf.constant(targets))
            return
        for _ in range(EPOCHS):
            for batch in data:
                strategy.run(step, args=batch)
    else:
        save_history(folder, strategy, model.fit(x, y, batch_size=BATCH, shuffle="shuffled" in kind, **more))


def optimizer_of(kind: str) -> str:
    return next((each for each in OPTIMIZERS if each in kind), "sgd")


def save_history(folder: Path, strategy: tfps.Strategy, fitted: keras.callbacks.History) -> None:
    name = f"history{cast(Worker, strategy._runtime.exchange).rank}.json"
    (folder / name).write_text(json.dumps(fitted.history))


def assign_again(model: Model) -> None:
    """Assigns what variables and slots have already, between the last step of an epoch and the next."""
    for variable in (*model.trainable_variables, *model.optimizer.variables[2:]):
        variable.assign(variable.numpy())


class WaitsForJoiner(keras.callbacks.Callback):
    """After a step of an epoch (JOIN_AFTER) the first worker waits until so many others (NEWCOMERS) want to join."""

    def __init__(self, strategy: tfps.Strategy, folder: Path) -> None:
        super().__init__()
        self._strategy, self._folder = strategy, folder

    def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        if [self._epoch, batch] == JOIN_AFTER and self._strategy.rank == 0:
            (self._folder / WAITS).touch()  # one who came before would take part too early
            poll(lambda: len(self._strategy._runtime.exchange.joining.joiners(1)) >= NEWCOMERS)


class Batches(keras.utils.PyDataset):
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.batches = list(batches(x, y))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.batches[index]


class Reordered(Batches):
    """Puts its batches into another order after each epoch, as many programs do."""

    def on_epoch_end(self) -> None:
        order = np.random.permutation(len(self.batches))
        self.batches = [self.batches[number] for number in order]


class Endless(Batches):
    """A stream of the batches."""

    num_batches = None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.batches[turned(index, len(self.batches))]


class Counting(Batches):
    """Gives another batch when it is asked again, as one that draws from a random generator without a seed."""

    asked = -2  # Keras looks at two batches first

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked += 1
        return self.batches[max(self.asked, 0) % len(self.batches)]


def train(folder: Path, kind: str, fault: list[Argument] | None) -> None:
    divided: list[tuple[int, ...]] = []  # who divides each batch
    original = BatchAgreement._decision

    def decision(self: BatchAgreement, progress: Argument, position: int, codes: Argument, ranks: Argument) -> Argument:
        found = original(self, progress, position, codes, ranks)
        if found.all_have:
            divided.append(tuple(ranks))
        return found

    BatchAgreement._decision = decision  # type: ignore[method-assign]
    callback = faults.fail_at(*fault) if fault else None
    if "told early" in kind and os.environ["TFPS_RANK"] == "2":
        hand_over = joining._hand_over

        def later(strategy: tfps.Strategy, callbacks: Argument, others: Argument, batch: int = 0) -> None:
            """Begins when it is known here that who joins is lost; the first rank has begun before."""
            poll(lambda: set(strategy.extended.exchange.view.ranks) == set(others))
            hand_over(strategy, callbacks, others, batch)

        joining._hand_over = later
    strategy = tfps.Strategy(devices=DEVICES)
    with strategy.scope():
        model = build_with_table() if "table" in kind else build()
        model.compile(
            OPTIMIZERS[optimizer_of(kind)](),
            LOSS,
            metrics=["accuracy"],
            steps_per_execution=2 if "several" in kind else 1,
            run_eagerly="eagerly" in kind,
        )
    fit(kind, model, strategy, callback, folder)
    exchange = strategy._runtime.exchange
    worker = cast(Worker, exchange.core.worker if isinstance(exchange, ElasticExchange) else exchange)
    found = {
        "weights": [*model.get_weights(), *rows_of(model)],
        "ranks": exchange.places,
        "divided": divided,
        "losses": [(loss.rank, loss.bucket, loss.step, loss.slices) for loss in worker.losses.found],
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
    counted = {(lost, bucket): (step, slices) for lost, bucket, step, slices in found["losses"]}
    x, y = training.digits(SAMPLES)
    all_batches = list(batches(x, y))
    build()  # draws numbers
    whole = "alone" in found["kind"]
    steps = [all_batches[number] for order in epochs_of(found["kind"]) for number in order]
    epoch = len(all_batches)
    # A loop of its own asks for the rows when it takes a step, not when it announces it: the last that a lost worker
    # has said may be those of the step after the one whose gradients it did not push to the end.
    accumulates = "accumulated" in found["kind"]
    ended: dict[int, int] = {}
    if whole:  # a step counts those who say at its beginning that they take it
        found["divided"] = [
            tuple(each for each in range(3) if all(each != lost or n <= step for lost, _, step, _ in found["losses"]))
            for n in range(len(steps))
        ]
    for lost, _, step, _ in found["losses"] if "loop" in found["kind"] else ():
        ended[lost] = min(step, ended.get(lost, step))

    def lacking(number: int, each: int, bucket: str) -> Iterator[tuple[int, int]]:
        # Pushes are of updates.
        update, indices = counted.get((each, bucket), (len(steps), ()))
        step, now = (update * EVERY, number - number % EVERY) if accumulates else (update, number)
        _, slices = found["buckets"][bucket]
        stays = all(each in ranks for ranks in found["divided"][step : number + 1])  # else it has joined again
        if now > step and stays and (accumulates or number // epoch == step // epoch):
            yield from slices  # others had agreed with it on the next batches already
        elif now == step:
            yield from (slices[index] for index in indices)

    kind = optimizer_of(found["kind"])
    names = {bucket: names for bucket, (names, _) in found["buckets"].items()}

    def possible(further: int) -> list[np.ndarray]:
        def is_absent(number: int, each: int) -> bool:
            return number > ended.get(each, number) + further

        keras.backend.clear_session()  # names begin anew
        return without(kind, steps, found["divided"], names, lacking, is_absent, whole=whole)

    (folder / "plain.pickle").write_bytes(pickle.dumps(list(map(possible, (0, 1) if ended else (0,)))))


def without(
    optimizer_kind: str,
    steps: Sequence[tuple[np.ndarray, np.ndarray]],
    divided: Sequence[Sequence[int]],
    buckets: Mapping[str, Sequence[str]],
    lacking: Callable[[int, int, str], Iterable[tuple[int, int]]],
    is_absent: Callable[[int, int], bool] = lambda number, rank: False,
    *,
    whole: bool = False,  # each has all rows
) -> list[np.ndarray]:
    """The weights of plain Keras after `steps`, without what was lost.

    `divided` are the ranks that divide each batch. `lacking` gives the slices (offset and bytes) of a bucket of which
    a rank's part of a step's gradient is not in the sum; its rows count, unless it `is_absent`.
    """
    model = build()
    optimizer = OPTIMIZERS[optimizer_kind]()
    variables = model.trainable_variables
    optimizer.build(variables)
    assert len(divided) >= len(steps), (len(divided), len(steps))
    by_path = {variable.path: number for number, variable in enumerate(variables)}
    for number, ((inputs, targets), ranks) in enumerate(zip(steps, divided, strict=False)):
        sums = [np.zeros(variable.shape, np.float32).reshape(-1) for variable in variables]
        places = [(0, 1) if whole else (place, len(ranks)) for place in range(len(ranks))]
        rows = [len(datasets.part_of(*place, tf.constant(inputs))) for place in places]
        total = sum(own for each, own in zip(ranks, rows, strict=True) if not is_absent(number, each))
        for place, each in zip(places, ranks, strict=True):
            own_x, own_y = (datasets.part_of(*place, tf.constant(part)) for part in (inputs, targets))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    keras.losses.sparse_categorical_crossentropy(own_y, model(own_x), from_logits=True)
                )
            gradients = [g.numpy().reshape(-1) / total for g in tape.gradient(loss, [v.value for v in variables])]
            for bucket, names in buckets.items():
                numbers = [by_path[_path(name, by_path)] for name in names]
                flat = np.concatenate([gradients[n] for n in numbers])
                for begin, nbytes in lacking(number, each, bucket):
                    flat[begin // 4 : (begin + nbytes) // 4] = 0
                ends = np.cumsum([sums[n].size for n in numbers])[:-1]
                for n, part in zip(numbers, np.split(flat, ends), strict=True):
                    sums[n] += part
        optimizer.apply([tf.reshape(s, v.shape) for s, v in zip(sums, variables, strict=True)], variables)
    weights: list[np.ndarray] = model.get_weights()
    return weights


def _path(name: str, paths: dict[str, int]) -> str:
    """The path of the variable that a bucket calls `name`."""
    (found,) = (path for path in paths if path == name or path.endswith("/" + name) or name.endswith(path))
    return found


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration() for _ in DEVICES]
    )
    if sys.argv[2] == "plain":
        plain(Path(sys.argv[1]), sys.argv[3])
    else:
        train(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
