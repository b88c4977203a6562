"""Losses of every kind, in `compile` and in steps; see taught.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results
from taught import OPTIONS, ROWS, L, digits, ends, images, roughly

from tfps.types import Argument, Logs, Model, Structure, Value

K = keras.ops


def small() -> Model:
    return keras.Sequential([keras.Input((64,)), L.Dense(8, activation="tanh"), L.Dense(10)])


def fitted(job: Job, loss: Argument, **options: Argument) -> Results:
    """Trained, evaluated and trained on, with targets from 0 to 1."""
    x, y = digits()
    targets = np.eye(10, dtype="float32")[y]
    model = job.compiled(lambda: keras.optimizers.SGD(0.2), build=small, loss=loss, metrics=["mse"])
    held = (x[:10], targets[:10])
    fits = [model.fit(x, targets, epochs=2, validation_data=held, **options, **OPTIONS)]
    evaluated = model.evaluate(x, targets, batch_size=7, verbose=0)
    fits.append(model.fit(x, targets, **OPTIONS))
    return ends(model, fits=fits, evaluated=evaluated)


def scalar_function(job: Job) -> Results:
    return fitted(job, lambda y, outputs: tf.reduce_mean(tf.square(y - outputs)))


def scalar_function_of_keras(job: Job) -> Results:
    def huber_mean(y: Value, outputs: Value) -> Value:
        return K.mean(keras.losses.huber(y, outputs)) + 0.1 * K.mean(K.abs(outputs))

    return fitted(job, huber_mean)


class MeanOfAll(keras.losses.Loss):
    """`call` returns one number, as many do."""

    def call(self, y: Value, outputs: Value) -> Value:
        return K.mean(K.square(y - outputs))


class OfRows(keras.losses.Loss):
    """`call` returns a number for each row."""

    def __init__(self, factor: float = 0.1) -> None:
        super().__init__(name="of_rows")
        self.factor = factor

    def call(self, y: Value, outputs: Value) -> Value:
        return K.mean(K.square(y - outputs), -1) + self.factor * K.mean(K.abs(0.5 - outputs), -1)


def scalar_subclass(job: Job) -> Results:
    return fitted(job, MeanOfAll())


def subclass_of_rows(job: Job) -> Results:
    return fitted(job, OfRows(), sample_weight=np.linspace(0.5, 2, ROWS))


def rows_function(job: Job) -> Results:
    return fitted(job, lambda y, outputs: tf.reduce_mean(tf.square(y - outputs), -1))


def weighted_mean(job: Job) -> Results:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    x, y = digits()
    targets = np.eye(10, dtype="float32")[y]
    model = job.compiled(lambda: keras.optimizers.SGD(0.2), build=small, loss=loss, metrics=[])
    fit = model.fit(x, targets, epochs=2, sample_weight=np.linspace(0, 2, ROWS), **OPTIONS)
    return ends(model, fits=[fit])


def summed(job: Job) -> Results:
    x, y = digits()
    targets = np.eye(10, dtype="float32")[y]
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = job.compiled(lambda: keras.optimizers.SGD(0.02), build=small, loss=loss, metrics=["mae"])
    return ends(model, fits=[model.fit(x, targets, epochs=2, **OPTIONS)])


def segmenter() -> Model:
    layers = [L.Conv2D(4, 3, padding="same", activation="relu"), L.Conv2D(1, 1, activation="sigmoid")]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def _segmented(job: Job, loss: keras.losses.Loss) -> Results:
    x = images()
    y = (x > 0.5).astype("float32")
    model = job.compiled(lambda: keras.optimizers.Adam(0.01), build=segmenter, loss=loss, metrics=["binary_accuracy"])
    fit = model.fit(x, y, epochs=2, validation_data=(x[:10], y[:10]), **OPTIONS)
    return ends(model, fits=[fit])


def dice_of_rows(job: Job) -> Results:
    return _segmented(job, keras.losses.Dice(axis=(1, 2, 3)))


def dice_of_batches(job: Job) -> Results:
    """A quotient of sums over a replica's rows."""
    return roughly(_segmented(job, keras.losses.Dice()))


def tversky_of_rows(job: Job) -> Results:
    return _segmented(job, keras.losses.Tversky(alpha=0.3, beta=0.7, axis=(1, 2, 3)))


def mixed_outputs(job: Job) -> Results:
    """Losses of three kinds, and an output without one."""
    x, y = digits()
    with job.scope():
        inputs = keras.Input((64,))
        h = L.Dense(8, activation="tanh")(inputs)
        outputs = [L.Dense(10, name="kind")(h), L.Dense(64, name="copy")(h), L.Dense(1, name="sum")(h), h]
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.1),
            loss=[
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                lambda y, outputs: tf.reduce_mean(tf.abs(y - outputs)),
                MeanOfAll(),
                None,
            ],
            loss_weights=[1.0, 0.5, 0.2, None],
        )
    targets = [y, x, x.mean(1, keepdims=True), np.zeros((ROWS, 8), "float32")]
    fit = model.fit(x, targets, epochs=2, **OPTIONS)
    return ends(model, fits=[fit])


class Tracked(keras.Model):
    """A step that tracks what a loss object returns, by a tracker and by a number."""

    def __init__(self, loss: keras.losses.Loss, *, tested: bool = False) -> None:
        super().__init__()
        self.inner, self.own_loss, self.tested = small(), loss, tested
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def call(self, inputs: Value) -> Value:
        return self.inner(inputs)

    def train_step(self, batch: Structure) -> Logs:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = self.own_loss(y, self.inner(x), sample_weight=weights)
        variables = self.inner.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result(), "loss": loss}


def _tracked(job: Job, loss: keras.losses.Loss, **options: Argument) -> Results:
    x, y = digits()
    with job.scope():
        model = Tracked(loss)
        model.compile(keras.optimizers.SGD(0.2))
    return ends(model.inner, fits=[model.fit(x, np.eye(10, dtype="float32")[y], epochs=2, **options, **OPTIONS)])


def tracked(job: Job) -> Results:
    return _tracked(job, keras.losses.MeanSquaredError())


def tracked_with_weights(job: Job) -> Results:
    return _tracked(job, keras.losses.Huber(0.5), sample_weight=np.linspace(0, 2, ROWS).astype("float32"))


def tracked_scalar(job: Job) -> Results:
    return _tracked(job, MeanOfAll())


class Function(Tracked):
    """As `Tracked`, with a mean that no loss of Keras has made, and a penalty on weights."""

    def train_step(self, batch: Structure) -> Logs:
        x, y = batch
        with tf.GradientTape() as tape:
            squares = tf.reduce_mean(tf.square(y - self.inner(x)))
            loss = squares + 0.01 * tf.add_n([tf.nn.l2_loss(weight) for weight in self.inner.trainable_variables])
        variables = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(squares)
        return {"tracked": self.tracker.result(), "loss": loss}


def mean_of_a_function(job: Job) -> Results:
    x, y = digits()
    with job.scope():
        model = Function(MeanOfAll())
        model.compile(keras.optimizers.Adam(0.005, epsilon=0.01))
    return ends(model.inner, fits=[model.fit(x, np.eye(10, dtype="float32")[y], epochs=2, **OPTIONS)])


class Computed(keras.Model):
    """`compute_loss` is overridden by a mean of its own; the steps are Keras'."""

    def compute_loss(self, x: Value = None, y: Value = None, y_pred: Value = None, *_: Value, **__: Value) -> Value:
        return K.mean(K.square(y - y_pred)) + sum(self.losses)


def computed(job: Job) -> Results:
    x, y = digits()
    with job.scope():
        inputs = keras.Input((64,))
        model = Computed(inputs, L.Dense(10, kernel_regularizer="l2")(inputs))
        model.compile(keras.optimizers.SGD(0.2))
    targets = np.eye(10, dtype="float32")[y]
    fit = model.fit(x, targets, epochs=2, validation_data=(x[:10], targets[:10]), **OPTIONS)
    return ends(model, fits=[fit])


class Accumulating(keras.Model):
    """Two gradients of halves of a replica's rows, clipped by the program, in one update."""

    def train_step(self, batch: Structure) -> Logs:
        x, y = batch
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            one, two = (keras.losses.mean_squared_error(part(y), part(outputs)) for part in (first, second))
            losses = tf.reduce_mean(one), tf.reduce_mean(two)
        gradients = [
            0.5 * (a + b)
            for a, b in zip(tape.gradient(losses[0], variables), tape.gradient(losses[1], variables), strict=True)
        ]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"mine": 0.5 * (losses[0] + losses[1])}


def first(values: Value) -> Value:
    return values[:, :5]


def second(values: Value) -> Value:
    return values[:, 5:]


def two_gradients(job: Job) -> Results:
    """One tape is asked twice, and the program computes with gradients before the update."""
    x, y = digits()
    with job.scope():
        inner = small()
        model = Accumulating(inner.inputs, inner.outputs)
        model.compile(keras.optimizers.SGD(0.2, momentum=0.9))
    return ends(model, fits=[model.fit(x, np.eye(10, dtype="float32")[y], epochs=2, **OPTIONS)])
