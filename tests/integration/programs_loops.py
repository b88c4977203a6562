"""Training loops without `strategy.run`, as Keras' guides have them; see program.py."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, Job, Results, data, weights

from tfps.types import Library, Model, Optimizer, Structure, Value

L: Library = keras.layers
M: Library = keras.metrics
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Counts(M.Metric):
    """Sums of integers: of rows, and of numbers below zero."""

    def __init__(self) -> None:
        super().__init__(name="counts")
        self.counts = self.add_variable((2,), "zeros", dtype="int64", name="counts")

    def update_state(self, y: Value, logits: Value, sample_weight: Value = None) -> None:
        rows = tf.size(y, tf.int64)
        self.counts.assign(self.counts + tf.stack([rows, -rows]))

    def result(self) -> Value:
        return self.counts.value


def normalized() -> Model:
    # Without the activation, some gradients and means would be nothing but rounding.
    hidden = [L.BatchNormalization(momentum=0.9), L.Dense(16, activation="tanh"), L.BatchNormalization()]
    return keras.Sequential([keras.Input((64,)), *hidden, L.Dense(10)])


def step_of(model: Model, optimizer: Optimizer, *metrics: keras.metrics.Metric) -> Callable[[Value, Value], Value]:
    def step(x: Value, y: Value) -> Value:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = LOSS(y, logits)
        for metric in metrics:
            metric.update_state(y, logits)
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss

    return step


def batches(job: Job, rows: int = BATCH, *, divided: bool) -> Structure:
    """The batches of the whole job, or this rank's rows of each."""
    mine = slice(job.rank, None, job.workers) if divided else slice(None)
    return [(x[mine], y[mine]) for x, y in tf.data.Dataset.from_tensor_slices(data()).batch(rows)]


def loop_alike(job: Job) -> Results:
    """In a function; every rank reads all batches, of an odd number of rows."""
    keras.utils.set_random_seed(1)
    with job.scope():
        model, optimizer = normalized(), keras.optimizers.SGD(0.1, momentum=0.9)
        seen, counts = keras.metrics.SparseCategoricalAccuracy(), Counts()
    step = tf.function(step_of(model, optimizer, seen, counts))
    losses = [float(step(*batch)) for batch in batches(job, 47, divided=False)]
    return {**weights(model), "losses": losses, "seen": float(seen.result()), "counts": np.asarray(counts.result())}


def loop_divided(job: Job) -> Results:
    """Each rank reads its rows of each batch: statistics are of all rows, on all ranks."""
    return {**_divided(job, in_function=True), **_divided(job, in_function=False)}


def _divided(job: Job, *, in_function: bool) -> Results:
    keras.utils.set_random_seed(1)
    with job.scope():
        model, optimizer, counts = normalized(), keras.optimizers.SGD(0.1), Counts()
    step = step_of(model, optimizer, counts)
    step = tf.function(step) if in_function else step
    for batch in batches(job, divided=True):
        step(*batch)
    first = model.layers[0]  # its mean, of equal parts of the rows, is that of one process
    ends = {"moving_mean": first.moving_mean.numpy(), "counts": np.asarray(counts.result()) * job.workers}
    step(*(each[job.rank :] for each in batches(job, divided=True)[0]))  # rank 0 has traced a function for as many
    ends.update({f"ranks {name}": value for name, value in weights(model).items()})
    return {f"{name} {'in a function' * in_function}": value for name, value in ends.items()}
