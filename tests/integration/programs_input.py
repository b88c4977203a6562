"""Programs about what goes into fit, and when it stops; see program.py."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, SAMPLES, Job, Results, data, history, sharded, weights

from tfps.graph.patches import replaced
from tfps.graph.tf_private import in_order
from tfps.input import caches
from tfps.types import Argument, Logs, Options, Structure, Value

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def weighted(job: Job) -> Results:
    """class_weight, sample_weight, validation_split, validation_data."""
    x, y = data()
    by_class, by_sample = job.compiled("sgd"), job.compiled("sgd")
    fits = [
        by_class.fit(x, y, class_weight={digit: 1.0 + digit for digit in range(10)}, epochs=2, **OPTIONS),
        by_sample.fit(x, y, sample_weight=np.linspace(0.5, 2.0, len(x)), validation_split=1 / 3, **OPTIONS),
        by_sample.fit(x, y, validation_data=(x[:96], y[:96], np.ones(96)), validation_freq=2, epochs=2, **OPTIONS),
    ]
    return {**weights(by_class, by_sample), **history(*fits)}


def evaluated(job: Job) -> Results:
    """evaluate gives everybody the result of all."""
    top = keras.metrics.SparseTopKCategoricalAccuracy
    with job.scope():
        model = job.compiled("sgd", metrics=["accuracy", top(3)], weighted_metrics=[top(2, name="weighted")])
    x, y = data()
    results = [model.evaluate(x, y, sample_weight=np.linspace(0.5, 1.5, len(x)), batch_size=BATCH, verbose=0)]
    results += [model.evaluate(x[:96], y[:96], batch_size=BATCH, verbose=0)]
    return {f"results/{number}": result for number, result in enumerate(results)}


def steps_per_execution(job: Job) -> Results:
    model = job.compiled(steps_per_execution=4)
    fit = model.fit(*data(), epochs=2, **OPTIONS)
    return {**weights(model), **history(fit)}


def generator(job: Job) -> Results:
    """A generator without end: every rank makes the batches of the whole job and trains on its rows."""
    x, y = data()

    def batches() -> Iterator[Structure]:
        for start in itertools.cycle(range(0, SAMPLES, BATCH)):
            yield x[start : start + BATCH], y[start : start + BATCH]

    model = job.compiled()
    fit = model.fit(batches(), steps_per_epoch=4, epochs=2, validation_data=batches(), validation_steps=2, verbose=0)
    return {**weights(model), **history(fit)}


class Ahead(keras.callbacks.Callback):
    """Makes batches of sizes that do not divide; other ranks read ahead further than they train, rank 0 slowly."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.waits, self.allowed, self.read = job.rank == 0 and job.workers > 1, 0, 0
        self.changed = threading.Condition()

    def allow(self, batches: int) -> None:
        """Notes that so many more are about to be used."""
        with self.changed:
            self.allowed += batches
            self.changed.notify_all()

    def batches(self, begin: int = 0) -> Iterator[Structure]:
        x, y = data()
        for number in itertools.count(begin):
            with self.changed:
                if self.waits:
                    self.changed.wait_for(lambda: self.read < self.allowed, 0.3)
                self.read = number + 1
                self.changed.notify_all()
            start = 37 * number % (SAMPLES - BATCH)
            yield x[start : start + BATCH - number % 5], y[start : start + BATCH - number % 5]

    def on_train_end(self, logs: Logs | None = None) -> None:
        with self.changed:  # the others have read further than they have trained
            assert self.waits or self.changed.wait_for(lambda: self.read > self.allowed, 60)


def generator_again(job: Job) -> Results:
    """One generator for fit, fit and evaluate: each goes on after the last batch used, however far ranks read ahead.

    Plain Keras loses what it has read ahead: it gets a generator that begins there for each.
    """
    model, ahead = job.compiled(), Ahead(job)
    shared, begin = ahead.batches(), 0

    def source(batches: int) -> Iterator[Structure]:
        nonlocal begin
        ahead.allow(max(batches, 2))  # at least as many as Keras looks at
        begin += batches
        return shared if job.strategy else Ahead(job).batches(begin - batches)

    callbacks = [ahead] if job.strategy else []
    fits = [
        model.fit(source(3 * epochs), steps_per_epoch=3, epochs=epochs, callbacks=callbacks, verbose=0)
        for epochs in (1, 2)
    ]
    evaluated = model.evaluate(source(2), steps=2, verbose=0)
    fits.append(model.fit(source(4), steps_per_epoch=4, callbacks=callbacks, verbose=0))
    return {**weights(model), **history(*fits), "evaluated": evaluated}


def cached(job: Job) -> Results:
    """cache(FILE) with one path for all ranks, filled, read again, and filled by one process before."""
    x, y = data(3 * BATCH + 5)
    results: Results = {}
    before = str(job.shared / "before")
    if not job.strategy:
        before += " of plain Keras"
    elif job.rank == 0:  # as one process
        with replaced(caches._Own, "ending", ""):
            list(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).cache(before))
    if job.strategy:
        job.strategy.reduce("SUM", tf.constant(1.0), axis=None)  # all ranks meet
    for name in (str(job.shared / "cache") + ("" if job.strategy else " of plain Keras"), before):
        for _ in range(2):
            model = job.compiled("sgd")
            dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).cache(name)
            fit = model.fit(dataset, epochs=2, validation_data=dataset, verbose=0)
            results |= {f"{len(results)} {key}": each for key, each in {**weights(model), **history(fit)}.items()}
    return results


def in_any_order(job: Job) -> Results:
    """Datasets of which elements may come in any order: ranks read them in one, so each row is used once."""
    x, y = data()

    def rows(number: Value) -> tuple[Value, Value]:
        return tf.gather(x, number), tf.gather(y, number)

    def late(number: Value) -> Value:  # other numbers on each rank
        length = tf.where(number * (7 + 3 * job.rank) % 5 == 0, 100_000, 1)
        return number + 0 * tf.cast(tf.reduce_sum(tf.sort(tf.range(length))), tf.int64)

    any_order: Options = {"num_parallel_calls": 4, "deterministic": False}
    numbers = tf.data.Dataset.range(SAMPLES)
    kinds = [
        numbers.map(late, **any_order).map(rows).batch(BATCH),
        numbers.window(SAMPLES // 4).interleave(lambda part: part.map(late), 4, **any_order).map(rows).batch(BATCH),
    ]
    results: Results = {}
    for kind, dataset in enumerate(kinds):
        keras.utils.set_random_seed(1)
        model = job.compiled("sgd")
        fit = model.fit(dataset if job.strategy else in_order(dataset), verbose=0)
        results |= {f"{kind} {name}": value for name, value in {**weights(model), **history(fit)}.items()}
    return results


class Batches(keras.utils.PyDataset):
    """The batches of the whole job."""

    def __init__(self, **options: Argument) -> None:
        super().__init__(**options)
        self.x, self.y = data()

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __getitem__(self, index: int) -> Structure:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def py_dataset(job: Job) -> Results:
    """Every rank trains on its rows of each batch; with workers, Keras' own look at the first shifts the order."""
    model, parallel = job.compiled(), job.compiled()
    fits = [
        model.fit(Batches(), validation_data=Batches(), epochs=2, shuffle=False, verbose=0),
        parallel.fit(Batches(workers=2), validation_data=Batches(workers=2), epochs=2, shuffle=False, verbose=0),
    ]
    ends = {**weights(parallel), **history(fits[1])}
    return {**weights(model), **history(fits[0])} | {f"ranks {name}": value for name, value in ends.items()}


class EndlessBatches(keras.utils.PyDataset):
    """Without a number of batches; counts how many epochs end."""

    num_batches = None
    ended = 0

    def __getitem__(self, number: int) -> Structure:
        x, y = data()
        begin = (5 * number * BATCH) % SAMPLES
        return x[begin : begin + BATCH], y[begin : begin + BATCH]

    def on_epoch_end(self) -> None:
        self.ended += 1


def py_dataset_in_epochs(job: Job) -> Results:
    """Epochs of one stream that workers make: nothing is read between two of them, where Keras forbids it."""
    results: Results = {}
    for steps in (1, 2):
        model = job.compiled(steps_per_execution=steps)
        batches, validation = (EndlessBatches(workers=2, max_queue_size=3) for _ in range(2))
        options: Options = {"validation_data": validation, "validation_steps": 2, "verbose": 0}
        fit = model.fit(batches, epochs=3, steps_per_epoch=3, **options)
        ends = {**weights(model), **history(fit), "ended": [batches.ended, validation.ended]}
        results |= {f"{steps} {name}": value for name, value in ends.items()}
    return results


class Scaled(keras.Model):
    """Takes a scalar beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(10)

    def call(self, inputs: Structure) -> Value:
        rows, factor = inputs
        return self.out(rows) * factor


def scalar_beside_rows(job: Job) -> Results:
    """Every replica gets the scalar of its batch as it is; the last batch does not divide."""
    dataset = tf.data.Dataset.from_tensor_slices(data(4 * BATCH + 3)).batch(BATCH)
    dataset = dataset.map(lambda x, y: ((x, 1.0 + tf.reduce_mean(x)), y))
    results: Results = {}
    for policy in ("AUTO", "DATA"):
        model = job.compiled("sgd", build=Scaled)
        fit = model.fit(sharded(dataset, policy), epochs=2, validation_data=dataset, verbose=0)
        ends = {**weights(model), **history(fit), "predicted": model.predict(dataset, verbose=0)}
        results |= {f"{policy} {name}": value for name, value in ends.items()}
    return results


def autoshard_data(job: Job) -> Results:
    model = job.compiled()
    dataset = sharded(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH), "DATA")
    fit = model.fit(dataset, epochs=2, verbose=0)
    return {**weights(model), **history(fit)}


def autoshard_off(job: Job) -> Results:
    """Every rank reads everything, in batches of its size; Keras takes as many steps as the dataset has batches."""
    model = job.compiled()
    images, labels = data()
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
    if job.workers == 1:
        dataset = tf.data.Dataset.from_tensor_slices((images[: SAMPLES // 2], labels[: SAMPLES // 2])).batch(BATCH // 2)
    fit = model.fit(sharded(dataset, "OFF"), epochs=2, verbose=0)
    return {**weights(model), **history(fit), "iterations": int(model.optimizer.iterations.numpy())}


def autoshard_file(job: Job) -> Results:
    """Two files per rank; each rank reads its own."""
    x, y = data()
    files = [str(job.own / f"{number}.records") for number in range(2)]
    for number, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            for image, label in zip(x[number::2], y[number::2], strict=True):
                writer.write(tf.io.serialize_tensor(tf.concat([image, [float(label)]], 0)).numpy())

    def parse(record: tf.Tensor) -> Value:
        values = tf.io.parse_tensor(record, tf.float32)
        values.set_shape([65])
        return values[:64], tf.cast(values[64], tf.int64)

    records = tf.data.Dataset.from_tensor_slices(files)
    if job.workers == 1:
        records = records.interleave(tf.data.TFRecordDataset, cycle_length=2, block_length=BATCH // 2)
        # one process: the batch of the job is the files' halves one after the other
    else:
        records = tf.data.TFRecordDataset(files)
    dataset = sharded(records.map(parse).batch(BATCH), "FILE")
    if job.workers == 1:
        # Where plain Keras does not know how many batches come, the step that finds none counts in `iterations`, too,
        # and Adam's next epoch is another one. Under tfps such a step does not begin.
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(SAMPLES // BATCH))
    model = job.compiled()
    fit = model.fit(dataset, epochs=2, verbose=0)
    return {**weights(model), **history(fit)}


def from_function(job: Job) -> Results:
    """distribute_datasets_from_function in fit: the input context says which part."""

    def make(context: tf.distribute.InputContext) -> Value:
        size = context.get_per_replica_batch_size(BATCH)
        dataset = tf.data.Dataset.from_tensor_slices(data()).batch(size)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    model = job.compiled()
    dataset = make(tf.distribute.InputContext())
    if job.strategy:
        dataset = job.strategy.distribute_datasets_from_function(make)
    fit = model.fit(dataset, epochs=2, steps_per_epoch=SAMPLES // BATCH, verbose=0)
    return {**weights(model), **history(fit)}


def shuffled(job: Job) -> Results:
    """fit shuffles by itself: with one seed for all ranks the shards are those of one order."""
    keras.utils.set_random_seed(7)
    model = job.compiled()
    fit = model.fit(*data(), batch_size=BATCH, epochs=3, verbose=0)
    return {**weights(model), "own": history(fit)}


def stopping(job: Job) -> Results:
    """EarlyStopping, ReduceLROnPlateau, LearningRateScheduler, and a callback that sets stop_training in an epoch."""
    x, y = data()
    model = job.compiled(lambda: keras.optimizers.SGD(0.5))
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=0.2),
    ]
    first = model.fit(x, y, validation_data=(x[:96], y[95::-1]), epochs=8, callbacks=callbacks, **OPTIONS)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    second = model.fit(x, y, epochs=3, callbacks=[schedule], **OPTIONS)

    def stop(batch: int, logs: Logs) -> None:
        model.stop_training = batch == 3

    third = model.fit(x, y, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)], **OPTIONS)
    rate = float(model.optimizer.learning_rate.numpy())
    return {**weights(model), **history(first, second, third), "rate": rate, "epochs": len(first.epoch)}


def uneven(job: Job) -> Results:
    """A last batch that is smaller than one rank's part: the other rank computes with no rows, nobody waits."""
    x, y = data(SAMPLES + 10)
    model = job.compiled()
    fit = model.fit(x, y, epochs=2, validation_data=(x, y), **OPTIONS)
    ends = {**weights(model), **history(fit)}
    assert all(np.isfinite(value).all() for value in ends.values())
    return {f"ranks {name}": value for name, value in ends.items()} | {"steps": int(model.optimizer.iterations.numpy())}


def files_uneven(job: Job) -> Results:
    """Files of different lengths, one per rank: the longer one's rest is left out."""
    x, y = data()
    dataset = tf.data.Dataset.from_generator(
        lambda: zip(x[: 96 + 48 * job.rank], y, strict=False),
        output_signature=(tf.TensorSpec([64], tf.float32), tf.TensorSpec([], tf.int64)),
    )
    model = job.compiled()
    fit = model.fit(sharded(dataset.batch(BATCH), "OFF"), epochs=2, verbose=0)
    ends = {**weights(model), **history(fit)}
    return {f"ranks {name}": value for name, value in ends.items()}
