"""Programs whose third batch has a NaN in the last rank's part; with DROP=1 they leave it out. See program.py."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf
import training
from program import BATCH, SAMPLES, Job, Results, data, weights

from tfps.errors import NonFiniteError
from tfps.types import Array, Model, Options, Structure, Value

OPTIONS: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
DROP = "DROP" in os.environ
BAD = slice(2 * BATCH, 3 * BATCH)


def without_batch(*arrays: Array) -> list[Array]:
    return [np.delete(each, np.r_[BAD], 0) if DROP else each for each in arrays]


def spoiled(x: Array, y: Array) -> tuple[Array, Array, Array]:
    heavy = np.ones(len(x), np.float32)
    heavy[BAD.stop - 1] = np.nan
    x, y, heavy = without_batch(x, y, heavy)
    return x, y, heavy


def state(model: Model) -> Results:
    values = {f"slots/{place}": each.numpy() for place, each in enumerate(model.optimizer.variables)}
    return {**weights(model), **{name: value for name, value in values.items() if value.dtype != object}}


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "is skipped" in (line := record.getMessage()):
            self.lines.append(line)


@contextlib.contextmanager
def said(job: Job) -> Iterator[list[str]]:
    """The lines about skipped steps, complete after the block."""
    kept = _Kept()
    logging.getLogger("tfps").addHandler(kept)
    yield kept.lines
    if job.strategy:
        assert job.strategy._runtime.settle(60.0)
        assert job.strategy._runtime.skipped_steps == len(kept.lines)
    logging.getLogger("tfps").removeHandler(kept)


def trained(job: Job, model: Model, x: Array, y: Array) -> Results:
    x, y, heavy = spoiled(x, y)
    with said(job) as lines:
        model.fit(x, y, sample_weight=heavy, epochs=2, **OPTIONS)
    return {**state(model), "own lines": lines}


def fitted(job: Job) -> Results:
    return trained(job, job.compiled(lambda: keras.optimizers.Adam(0.01)), *data())


def decayed(job: Job) -> Results:
    """A schedule, weight decay, moving averages of weights: they do not go on in a step that is skipped."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 12)
    model = job.compiled(
        lambda: keras.optimizers.AdamW(schedule, weight_decay=0.01, use_ema=True, ema_overwrite_frequency=4)
    )
    return trained(job, model, *data())


def accumulated(job: Job) -> Results:
    return trained(job, job.compiled(lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)), *data())


def eagerly(job: Job) -> Results:
    return trained(job, job.compiled(lambda: keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True), *data())


def several_steps(job: Job) -> Results:
    return trained(job, job.compiled(lambda: keras.optimizers.Adam(0.01), steps_per_execution=2), *data())


def sparse(job: Job) -> Results:
    with job.scope():
        model, words, targets = training.embedding_sparse()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    return trained(job, model, words[:SAMPLES], targets[:SAMPLES])


def uneven(job: Job) -> Results:
    """The batch is one row, of rank 0: the other rank has none, and its filler does not count."""
    model = job.compiled(lambda: keras.optimizers.Adam(0.01))
    x, y = data(2 * BATCH + 1)
    heavy = np.ones(len(x), np.float32)
    heavy[-1] = np.nan
    with said(job) as lines:
        until = -1 if DROP else len(x)
        model.fit(x[:until], y[:until], sample_weight=heavy[:until], epochs=2, **OPTIONS)
    return {**state(model), "own lines": lines}


def without_run(job: Job) -> Results:
    """A loop as Keras' guides have them; all ranks read the same."""
    model = job.compiled(lambda: keras.optimizers.Adam(0.01))
    x, y, heavy = spoiled(*data())

    @tf.function
    def step(x: Value, y: Value, heavy: Value) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), heavy)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with said(job) as lines:
        for start in range(0, len(x), BATCH):
            step(*(tf.constant(each[start : start + BATCH]) for each in (x, y, heavy)))
    return {**state(model), "own lines": lines}


def named(job: Job) -> Results:
    """Each rank has another first variable with such a gradient; the second of the model is the first of all."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [self.add_weight(shape=(2,), name=name) for name in "abcd"]

        def train_step(self, batch: Structure) -> dict[str, Value]:
            bad = [3, 1][job.rank]  # d, b
            gradients = [tf.fill([2], np.nan if place >= bad else 1.0) for place in range(4)]
            self.optimizer.apply(gradients, self.parts)
            return {"loss": 0.0}

    with job.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.5))
    with said(job) as lines:
        model.fit(np.zeros((BATCH, 1)), epochs=1, **OPTIONS)
    return {**weights(model), "ranks lines": lines}


def too_large(job: Job) -> Results:
    """Two numbers whose sum is infinite, in a replica function of the program's own; in each second step."""
    with job.scope():
        variable = tf.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(1e-30)
        optimizer.build([variable])

    @tf.function
    def step(size: Value) -> None:
        job.tf_strategy.run(lambda: optimizer.apply([size * tf.constant([1.0, 0.5])], [variable]))

    with said(job) as lines:
        for size in (1e30, 3e38, 1e30):
            step(tf.constant(size))
    return {"variable": variable.numpy(), "ranks lines": lines}


def large_mean(job: Job) -> Results:
    """In a step of Keras gradients are averaged, so these two do not overflow."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.part = self.add_weight(shape=(2,), initializer="zeros", name="part")

        def train_step(self, batch: Structure) -> dict[str, Value]:
            self.optimizer.apply([tf.fill([2], 3e38)], [self.part])
            return {"loss": 0.0}

    with job.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(1e-30))
    with said(job) as lines:
        model.fit(np.zeros((BATCH, 1)), epochs=1, **OPTIONS)
    return {**weights(model), "ranks lines": lines}


def raised(job: Job) -> Results:
    """All ranks raise; what was trained before remains, and training may go on."""
    model, message = job.compiled(lambda: keras.optimizers.Adam(0.01)), ""
    x, y, heavy = spoiled(*data())
    until = BAD.start if DROP else len(x)
    try:
        model.fit(x[:until], y[:until], sample_weight=heavy[:until], epochs=1, **OPTIONS)
    except NonFiniteError as error:
        message = str(error)
    before = state(model)
    rest = slice(BAD.start if DROP else BAD.stop, len(x))
    model.fit(x[rest], y[rest], epochs=1, **OPTIONS)
    return {"ranks message": message, **{f"before {name}": value for name, value in before.items()}, **state(model)}


def scaled(job: Job) -> Results:
    """Loss scaling skips steps by itself: nothing is raised, and nothing is counted."""
    model = job.compiled(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))
    x, y, heavy = spoiled(*data())
    model.fit(x, y, sample_weight=heavy, epochs=1, **OPTIONS)
    counted = job.strategy._runtime.skipped_steps if job.strategy else 0
    return {**weights(model), "counted": counted, "scale": float(model.optimizer.dynamic_scale.numpy())}


def alone(job: Job) -> Results:
    """Where workers do not step together, only the one that has the batch skips it."""
    model = job.compiled(lambda: keras.optimizers.SGD(0.1))
    with said(job) as lines:
        x, y, heavy = spoiled(*data())
        model.fit(x, y, sample_weight=heavy, epochs=1, **OPTIONS)
    return {**weights(model), "own lines": lines}
