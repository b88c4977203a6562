"""Programs in mode "async"; see program.py and test_async.py. The last rank is slow.

What they return belongs to the rank ("own") or has to be the same on all ranks ("ranks").
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import keras
import local_training
import numpy as np
import tensorflow as tf
from local_training import OPTIMIZERS
from program import Job, Results, sharded

from tfps.errors import TfpsError
from tfps.types import Argument, Callback, Logs, Model, Structure

ROWS = 6  # of a worker's batch
BATCHES = 20  # of the whole job
STEPS = {name: OPTIMIZERS[name] for name in ("plain", "clipvalue", "clipnorm", "global_clipnorm", "clipped scaled")}
SLOW_S = 0.05


class Noting(keras.Model):
    """A small model that notes the first row of each batch that it is trained with; the last rank is slow."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.rows: list[int] = []
        self._slow = job.rank == job.workers - 1
        self._hidden, self._head = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self._head(self._hidden(inputs[:, 1:]))

    def _note(self, inputs: np.ndarray) -> np.int32:
        self.rows.extend(round(float(row[0])) for row in inputs[:1])
        if self._slow:
            time.sleep(SLOW_S)
        return np.int32(0)

    def train_step(self, data: Structure) -> Structure:
        inputs = data[0] if isinstance(data, tuple) else data
        with tf.control_dependencies([tf.numpy_function(self._note, [inputs], tf.int32)]):
            return super().train_step(tf.nest.map_structure(tf.identity, data))


class Epochs(keras.callbacks.Callback):
    """Notes, at the end of each epoch, the rows used in it and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []
        self.weights: list[bytes] = []
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.rows.append(list(self.model.rows))
        self.model.rows.clear()
        self.weights.append(b"".join(weight.tobytes() for weight in self.model.get_weights()))
        self.losses.append(float((logs or {})["loss"]))

    def results(self) -> Results:
        return {"own rows": self.rows, "ranks weights": self.weights, "ranks losses": np.array(self.losses)}


def rows_and_targets(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row has its number, and something to learn."""
    numbers = np.arange(rows, dtype=np.float32)
    inputs = np.stack([numbers, np.sin(numbers), np.cos(numbers)], 1)
    return inputs, inputs[:, 1:2] * 2 - inputs[:, 2:3]


def dataset(job: Job, batches: int = BATCHES) -> tf.data.Dataset:
    size = ROWS * job.workers
    return tf.data.Dataset.from_tensor_slices(rows_and_targets(batches * size)).batch(size)


def compiled(job: Job, optimizer: Argument = None, **options: Argument) -> Model:
    with job.scope():
        model = Noting(job)
        model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", **options)
    return model


def trained(
    job: Job,
    data: Argument,
    epochs: int = 3,
    model: Model | None = None,
    callbacks: tuple[Callback, ...] = (),
    **more: Argument,
) -> Results:
    model, noted = model or compiled(job), Epochs()
    model.fit(data, epochs=epochs, verbose=0, callbacks=[*callbacks, noted], **more)
    steps = np.array(int(model.optimizer.iterations.numpy()))
    return {**noted.results(), "ranks steps": steps}


def handed_out(job: Job) -> Results:
    """Epochs over a dataset: each batch once, most of them by those that are free."""
    return trained(job, dataset(job), epochs=5, validation_data=dataset(job, 2))


def adam(job: Job) -> Results:
    return trained(job, dataset(job), model=compiled(job, keras.optimizers.Adam(0.01)))


def uneven(job: Job) -> Results:
    """The last batch has fewer rows than the job has replicas."""
    data = tf.data.Dataset.from_tensor_slices(rows_and_targets(ROWS * job.workers * 5 + 2)).batch(ROWS * job.workers)
    return trained(job, data)


def steps_per_epoch(job: Job) -> Results:
    """Epochs of a stream without end: each goes on where the last one ended."""
    return trained(job, dataset(job).repeat(), epochs=4, steps_per_epoch=6)


def steps_per_epoch_of_finite_data(job: Job) -> Results:
    """When the data has ended it begins anew."""
    return trained(job, dataset(job, 6), epochs=5, steps_per_epoch=3)


def several_steps(job: Job) -> Results:
    """Some steps at a time; 20 batches of the job are not a multiple of 7."""
    return trained(job, dataset(job), model=compiled(job, steps_per_execution=7))


def several_steps_per_epoch(job: Job) -> Results:
    return trained(job, dataset(job).repeat(), model=compiled(job, steps_per_execution=2), steps_per_epoch=3)


def arrays(job: Job) -> Results:
    inputs, targets = rows_and_targets(10 * ROWS * job.workers)
    return trained(job, inputs, y=targets, batch_size=ROWS * job.workers, shuffle=False)


def generator(job: Job) -> Results:
    """Batches made in Python are cut by rows, and the parts are handed out."""

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            size = ROWS * job.workers
            inputs, targets = rows_and_targets(10 * size)
            return inputs[index * size : (index + 1) * size], targets[index * size : (index + 1) * size]

    return trained(job, Batches(), shuffle=False)


def first_steps(job: Job) -> Results:
    """One step per worker, from the same weights, with batches that only that worker has; by optimizer and kind."""
    found: Results = {}
    for name in STEPS:
        for eagerly in (False, True):
            with job.scope():
                model = local_training.model()
                model.compile(STEPS[name](), local_training.loss(), run_eagerly=eagerly)
            begin: list[list[np.ndarray]] = []
            keep = keras.callbacks.LambdaCallback(on_train_begin=functools.partial(_keep, model, begin))
            model.fit(local_training.dataset(job.rank, 1, job.workers), callbacks=[keep], verbose=0)
            found[f"ranks {name}, eagerly: {eagerly}"] = [*begin, model.get_weights()]
    return found


def _keep(model: Model, weights: list[list[np.ndarray]], logs: Logs | None = None) -> None:
    weights.append(model.get_weights())


def files(job: Job, rows: list[int]) -> tf.data.Dataset:
    """A dataset of so many files, each with so many rows, which workers share."""
    names, first = [], 0
    for number, count in enumerate(rows):
        names.append(str(job.own / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for row in range(first, first + count):
                writer.write(str(row).encode())
        first += count

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        number = tf.strings.to_number(line)
        inputs = tf.stack([number, tf.sin(number), tf.cos(number)])
        return inputs, inputs[1:2] * 2 - inputs[2:3]

    data = tf.data.TFRecordDataset(tf.data.Dataset.from_tensor_slices(names)).map(parse).batch(ROWS * job.workers)
    return sharded(data, "FILE")


def own_files(job: Job) -> Results:
    """Each worker has its own data, and its epoch ends when that does."""
    return trained(job, files(job, [4 * ROWS] * 2 * job.workers))


def eager(job: Job) -> Results:
    return trained(job, dataset(job, 6), model=compiled(job, run_eagerly=True), epochs=2)


def loop(job: Job) -> Results:
    """A loop of the program's own, which says where an epoch ends."""
    model = compiled(job)
    loss_of = keras.losses.MeanSquaredError(reduction="sum_over_batch_size")

    @tf.function
    def step(batch: Structure) -> tf.Tensor:
        def replica(batch: Structure) -> tf.Tensor:
            inputs, targets = batch
            noted = tf.numpy_function(model._note, [inputs], tf.int32)
            with tf.GradientTape() as tape, tf.control_dependencies([noted]):
                loss = loss_of(targets, model(tf.identity(inputs), training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return job.tf_strategy.run(replica, args=(batch,))

    rows, weights = [], []
    distributed = job.tf_strategy.experimental_distribute_dataset(dataset(job))
    with job.scope():
        model(np.zeros((1, 3), np.float32))
        model.optimizer.build(model.trainable_variables)
    for _ in range(3):
        for batch in distributed:
            step(batch)
        synchronize(job)
        weights.append(b"".join(weight.tobytes() for weight in model.get_weights()))
        rows.append(list(model.rows))
        model.rows.clear()
        synchronize(job)  # nobody steps before all have looked
    return {"own rows": rows, "ranks weights": weights}


def synchronize(job: Job) -> None:
    assert job.strategy is not None
    job.strategy.synchronize()


def saved(job: Job) -> Results:
    """Weights and slots saved at the end of an epoch are those of one moment, on every rank, and can be restored."""
    model = compiled(job, keras.optimizers.Adam(0.01))
    path = job.own / "{epoch}.weights.h5"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    kept: list[list[np.ndarray]] = []

    def keep(epoch: int, logs: Logs | None = None) -> None:
        time.sleep(0.05 * job.rank)  # others would train meanwhile
        kept.append([each.numpy() for each in [*model.weights, *model.optimizer.variables]])

    trained(
        job,
        dataset(job, 6),
        model=model,
        callbacks=(checkpoint, keras.callbacks.LambdaCallback(on_epoch_end=keep)),
    )
    model.save_weights(job.own / "end.weights.h5")
    end = model.get_weights()
    trained(job, dataset(job, 6), model=model, epochs=1)
    model.load_weights(job.own / "end.weights.h5")
    for mine, other in zip(model.get_weights(), end, strict=True):
        np.testing.assert_array_equal(mine, other)
    results = trained(job, dataset(job, 6), model=model, epochs=1)
    assert any(not np.array_equal(*pair) for pair in zip(model.get_weights(), end, strict=True))
    return {
        "ranks kept": [each.tobytes() for state in kept for each in state],
        "ranks weights": results["ranks weights"],
    }


def backed_up(job: Job) -> Results:
    """A job that was stopped goes on from the end of its last epoch."""

    class Stop(Exception):
        pass

    def stop(epoch: int, logs: Logs) -> None:
        if epoch == 1:
            raise Stop

    results = []
    for callback in (keras.callbacks.LambdaCallback(on_epoch_begin=stop), keras.callbacks.Callback()):
        model = compiled(job, keras.optimizers.Adam(0.01))
        with job.scope():  # BackupAndRestore wants a model that is built, which its own step would do
            model(rows_and_targets(1)[0])
        backup = keras.callbacks.BackupAndRestore(job.shared / "backup")
        try:
            results = [trained(job, dataset(job, 6), model=model, epochs=3, callbacks=(backup, callback))]
        except Stop:
            results = []
    return {"own epochs": len(results[0]["own rows"]), "ranks weights": results[0]["ranks weights"]}


def options(job: Job) -> Results:
    """Moving averages, gradients that are accumulated, loss scaling, layers that are frozen: all ranks end alike."""
    ends = []
    for optimizer in (
        keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
        keras.optimizers.SGD(0.01, gradient_accumulation_steps=3, momentum=0.5),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    ):
        model = compiled(job, optimizer)
        swap = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if optimizer.use_ema else []
        stop = keras.callbacks.EarlyStopping(patience=5, monitor="loss")
        results = trained(job, dataset(job, 6), model=model, callbacks=(*swap, stop, keras.callbacks.TerminateOnNaN()))
        ends += results["ranks weights"]
        if optimizer.gradient_accumulation_steps:
            continue
        assert int(results["ranks steps"]) == 3 * 6, "each worker counts the mean of all"
    for trains, again in ((False, "sgd"), (True, keras.optimizers.Adam(0.01))):
        model.layers[0].trainable = trains
        with job.scope():
            model.compile(again, "mse")
        ends += trained(job, dataset(job, 6), model=model)["ranks weights"]
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    ends += trained(job, dataset(job, 6), model=model)["ranks weights"]
    return {"ranks weights": ends}


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except TfpsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(job: Job) -> Results:
    """What needs all workers at one batch is refused by name, and the job goes on."""
    errors = {}
    model = compiled(job, metrics=["mae"])
    checkpoint = keras.callbacks.ModelCheckpoint(job.own / "{batch}.weights.h5", save_freq=2, save_weights_only=True)
    backup = keras.callbacks.BackupAndRestore(job.own / "backup", save_freq=2)
    combine = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: job.tf_strategy.combine())
    for name, callback in (("ModelCheckpoint", checkpoint), ("BackupAndRestore", backup), ("combine", combine)):
        errors[f"ranks {name}"] = _error(
            functools.partial(trained, job, dataset(job), model=model, callbacks=(callback,))
        )
    errors.update(trained(job, dataset(job), model=model, epochs=1))
    return errors


def too_few_batches(job: Job) -> Results:
    """A worker without any data cannot take part."""
    data = files(job, [4 * ROWS] * (job.workers - 1) + [0])
    return {"own error": _error(lambda: trained(job, data))}


def dies(job: Job) -> Results:
    """A rank that dies within an epoch ends the others, with an error that names it."""
    import os

    def die(batch: int, logs: Logs) -> None:
        if job.rank == 1 and batch == 2:
            os._exit(3)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    return {"own error": _error(lambda: trained(job, dataset(job, 200), callbacks=(callback,)))}
