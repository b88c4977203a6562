"""Programs in mode "diloco", in which workers train alone for 4 steps; see program.py.

What they return is the same on all ranks, but for names that begin with "own".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, Job, Results, data, history, sharded, weights
from programs_compression import wide

import tfps
from tfps.errors import UnsupportedError
from tfps.types import Callback, Logs, Model, Options, Value

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
STEPS = 6  # of an epoch: two after the exchange


def named(name: str, model: Model) -> Results:
    return {f"{name}/{place}": value for place, value in enumerate(model.get_weights())}


def evaluated_and_saved(job: Job) -> Results:
    """At the end of an epoch workers differ; what they evaluate, predict and save does not."""
    x, y = data()
    ends: Results = {}

    def end(epoch: int, logs: Logs) -> None:
        before = named(f"own before {epoch}", model)
        ends[f"evaluated {epoch}"] = model.evaluate(x, y, verbose=0)
        ends[f"predicted {epoch}"] = model.predict(x[:BATCH], verbose=0)
        model.save(job.shared / f"{epoch}.keras")
        ends.update(named(f"saved {epoch}", keras.models.load_model(job.shared / f"{epoch}.keras")))
        after = named(f"own before {epoch}", model)
        assert all(np.array_equal(before[name], after[name]) for name in before)
        ends.update(before)

    model = job.compiled("sgd")
    checkpoint = keras.callbacks.ModelCheckpoint(str(job.shared / "{epoch}.weights.h5"), save_weights_only=True)
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=end), checkpoint]
    fit = model.fit(x, y, epochs=2, validation_data=(x, y), callbacks=callbacks, **OPTIONS)
    for epoch in range(2):
        assert abs(fit.history["val_loss"][epoch] - ends[f"evaluated {epoch}"][0]) < 1e-6
    return {**ends, **history(fit), **weights(model), "last": model.evaluate(x, y, verbose=0)}


def saved_by_one_rank(job: Job) -> Results:
    """Rank 0 alone saves, in the middle of a round: nobody waits for others."""
    x, y = data()

    def save(batch: int, logs: Logs) -> None:
        if job.rank == 0 and batch in (1, 3, 4):
            model.save_weights(job.own / f"{batch}.weights.h5")
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(job.own / f"{batch}"))

    model = job.compiled("adam")
    fit = model.fit(x, y, epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=save)], **OPTIONS)
    return {**weights(model), **history(fit)}


def saved_by_one_rank_after_fit(job: Job) -> Results:
    """Rank 0 alone saves in `on_epoch_end`, `on_train_end` and after `fit`; restored, training is what went on."""
    x, y = data()
    model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=wide)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def save(*arguments: object) -> None:
        if job.rank == 0:
            checkpoint.write(str(job.shared / "checkpoint"))

    model.fit(x, y, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=save, on_train_end=save)], **OPTIONS)
    save()
    model.fit(x, y, **OPTIONS)  # on no rank before rank 0 has saved
    went_on = [weight.tobytes() for weight in model.get_weights()]
    checkpoint.read(str(job.shared / "checkpoint")).assert_consumed()
    model.fit(x, y, **OPTIONS)
    assert [weight.tobytes() for weight in model.get_weights()] == went_on
    return weights(model)


def saved_by_one_rank_in_fit(job: Job) -> Results:
    """One rank alone saves in `on_epoch_end` while the other goes on: to `reduce`, or to the next epoch.

    Restored, training is what went on. Residuals travel only then, and at the end of `fit`.
    """
    strategy = job.strategy
    assert strategy is not None
    x, y = data(8 * BATCH)
    model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=wide)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    compressing, state = strategy.extended.compressing, strategy.extended.exchange.state
    rounds: list[list[int]] = []  # of each compressed bucket, at the end of each epoch

    def end(epoch: int, logs: Logs) -> None:
        rounds.append([state.steps(number) for number in sorted(compressing._buckets)])
        if (job.rank, epoch) in ((1, 1), (0, 2)):
            model.predict(x[:BATCH], verbose=0)  # alone, too
            checkpoint.write(str(job.shared / f"checkpoint {job.rank}"))
        if epoch == 1:
            strategy.reduce(tf.distribute.ReduceOp.SUM, 1.0, axis=None)
            model.evaluate(x, y, verbose=0)

    model.fit(x, y, epochs=4, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=end)], **OPTIONS)
    assert rounds == [[each] * len(rounds[0]) for each in (2, 4, 7, 10)], rounds  # two exchanges an epoch
    went_on = [weight.tobytes() for weight in model.get_weights()]
    save_again = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epoch or compressing.collect())
    for rank, epochs, saves in ((1, 2, [save_again]), (0, 1, [])):
        checkpoint.read(str(job.shared / f"checkpoint {rank}")).assert_consumed()
        model.fit(x, y, epochs=epochs, callbacks=saves, **OPTIONS)
        assert [weight.tobytes() for weight in model.get_weights()] == went_on, rank
    return weights(model)


def custom_loop(job: Job) -> Results:
    """Workers take different numbers of steps, and meet in `synchronize`."""
    strategy = job.strategy
    assert strategy is not None
    model = job.compiled("adam")
    x, y = data()

    def one_step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x, y: strategy.run(one_step, args=(x, y)))
    ends: Results = {}
    for epoch, counts in enumerate([(3, 13), (9, 2), (1, 1)]):
        for batch in range(counts[job.rank]):
            part = slice(batch * 16, batch * 16 + 16)
            step(tf.constant(x[part]), tf.constant(y[part]))
        strategy.synchronize()
        ends.update(named(f"epoch {epoch}", model))
    before = named("", model)
    strategy.synchronize()  # there is nothing to do
    assert all(np.array_equal(before[name], value) for name, value in named("", model).items())
    return {**ends, "evaluated": model.evaluate(x, y, verbose=0)}


def epoch_without_batches(job: Job) -> Results:
    """In the second epoch only rank 0 has batches: the others take part in its exchanges, and in its metrics."""
    model = job.compiled("sgd")
    x, y = data()
    epochs = iter([6, 7 * (job.rank == 0), 6])

    def batches() -> Iterator[tuple[Value, Value]]:
        for batch in range(next(epochs)):
            yield x[batch * BATCH : (batch + 1) * BATCH], y[batch * BATCH : (batch + 1) * BATCH]

    kinds = tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int64)
    dataset = sharded(tf.data.Dataset.from_generator(batches, output_signature=kinds), "OFF")
    taken = [0, 0, 0]

    def count(batch: int, logs: Logs) -> None:
        taken[len(model.history.epoch)] += 1

    fit = model.fit(dataset, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=count)], verbose=0)
    return {**weights(model), **history(fit), "own batches": taken}


def moving(job: Job) -> list[Callback]:
    """What saving at the end of epochs does to training: with a codec it moves residuals, as `combine()` does."""
    if "TFPS_COMPRESSION" not in os.environ or job.strategy is None:
        return []
    combine = job.strategy.combine
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: combine())]


class Stopped(Exception):
    """Ends training as a machine that goes away does."""


def backup(job: Job) -> Results:
    """What rank 0 restores every rank has, and training ends where it ends without a stop."""
    x, y = data(8 * BATCH)
    stopped: list[bool] = []

    def stop(epoch: int, logs: Logs) -> None:
        if epoch == 2 and not stopped:
            stopped.append(True)
            raise Stopped

    def fit(*callbacks: Callback) -> Model:
        model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=wide)
        random = np.random.default_rng(1)
        model.set_weights([random.normal(0, 0.1, each.shape).astype("float32") for each in model.get_weights()])
        with contextlib.suppress(Stopped):
            model.fit(x, y, epochs=4, callbacks=list(callbacks), **OPTIONS)
        return model

    def backed_up() -> Model:
        return fit(
            keras.callbacks.BackupAndRestore(str(job.shared / "backup"), delete_checkpoint=False),
            keras.callbacks.LambdaCallback(on_epoch_begin=stop),
        )

    backed_up()
    resumed, whole = backed_up(), fit(*moving(job))
    for mine, expected in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)
    return weights(resumed)


def no_backup_yet(job: Job) -> Results:
    """Where there is no backup to restore, BackupAndRestore changes nothing: each rank keeps its own slots."""
    x, y = data()

    def fit(*callbacks: Callback) -> Model:
        model = job.compiled(lambda: keras.optimizers.Adam(0.01), build=wide)
        random = np.random.default_rng(1)
        model.set_weights([random.normal(0, 0.1, each.shape).astype("float32") for each in model.get_weights()])
        for _ in range(2):
            model.fit(x, y, callbacks=list(callbacks), **OPTIONS)
        return model

    backed_up, plain = fit(keras.callbacks.BackupAndRestore(str(job.shared / "backup"))), fit(*moving(job))
    for mine, expected in zip(backed_up.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, expected)
    slots = [each.numpy() for each in backed_up.optimizer.variables]
    for slot, other in zip(slots, plain.optimizer.variables, strict=True):
        np.testing.assert_array_equal(slot, other.numpy())
    return {**weights(backed_up), "own slots": slots[-1]}


def loss_scaling(job: Job) -> Results:
    """A step that one rank skips counts there, too: exchanges stay together."""
    x, y = data()
    if job.rank == 1:
        x[BATCH : 2 * BATCH] = np.inf
    model = job.compiled(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    model.fit(x, y, epochs=2, **OPTIONS)
    return {**weights(model), "own iterations": int(model.optimizer.inner_optimizer.iterations.numpy())}


def refused(job: Job) -> Results:
    """Saving within an epoch, where the others are at another step."""
    model = job.compiled("sgd")
    x, y = data()
    texts = []
    for callback in (
        keras.callbacks.ModelCheckpoint(str(job.own / "{batch}.keras"), save_freq=2),
        keras.callbacks.BackupAndRestore(str(job.own / "backup"), save_freq=2),
    ):
        try:
            model.fit(x, y, callbacks=[callback], **OPTIONS)
        except UnsupportedError as error:
            texts.append(str(error))
    return {"refused": texts}


def traced(job: Job) -> Results:
    """A report has rounds for steps, a capture has inner steps."""
    strategy = job.strategy
    assert strategy is not None
    x, y = data()
    model = job.compiled("sgd")
    model.fit(x, y, **OPTIONS)
    with strategy.trace(job.shared / "traced", "run"):
        model.fit(x, y, epochs=4, **OPTIONS)
    report = strategy.report()
    return {"own report": str(report), "own files": sorted(path.name for path in (job.shared / "traced").rglob("*.*"))}


def one_rank_meets(job: Job) -> Results:
    """A rank that calls `synchronize` alone is told what to do."""
    model = job.compiled("sgd")
    x, y = data()
    model.fit(x, y, **OPTIONS)
    strategy = job.strategy
    if job.rank == 1 or strategy is None:
        return {"own error": ""}
    try:
        strategy.synchronize()
    except tfps.TfpsError as error:
        return {"own error": str(error)}
    return {"own error": "none"}
