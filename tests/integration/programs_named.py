"""Losses and metrics that are no mean over rows are named once, and others are not; see program.py."""

from __future__ import annotations

import logging
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results

from tfps.errors import UnsupportedError
from tfps.types import Argument, Logs, Model, Structure, Value

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
SUM = tf.distribute.ReduceOp.SUM


class Stepped(keras.Model):
    """A step whose target is what `loss` makes of the model, inputs and targets."""

    def __init__(self, loss: Callable[[Model, Value, Value], Value], sources: Callable[[Model, Value], list[Value]]):
        super().__init__()
        self.dense, self.target, self.sources = keras.layers.Dense(1), loss, sources

    def call(self, x: Value) -> Value:
        return self.dense(x)

    def train_step(self, data: Structure) -> Logs:
        x, y = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.target(self, x, y)
        gradients = tape.gradient(loss, self.sources(self, x))[: len(self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"shown": tf.reduce_mean(loss)}


class Heard(logging.Handler):
    """What is logged of losses and metrics that are no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "each replica computes it" in record.getMessage():
            self.messages.append(record.getMessage())


def said(job: Job, build: Callable[[], Model], compiled: Argument = None, **options: Argument) -> list[str]:
    """What is logged while a model trains and is evaluated."""
    heard = Heard()
    logging.getLogger("tfps").addHandler(heard)
    try:
        with job.scope():
            model = build()
            model.compile(keras.optimizers.SGD(0.01), **(compiled or {}))
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, **options)
        if compiled:
            model.evaluate(X, Y, batch_size=4, verbose=0)
    finally:
        logging.getLogger("tfps").removeHandler(heard)
    return heard.messages


def stepped(loss: Callable[[Model, Value, Value], Value], more: bool = False) -> Callable[[], Model]:
    def sources(model: Model, x: Value) -> list[Value]:
        return [*model.trainable_variables, x] if more else model.trainable_variables

    return lambda: Stepped(loss, sources)


def dense() -> Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def squares(model: Model, x: Value, y: Value) -> tf.Tensor:
    """[rows]."""
    return tf.square(model(x) - y)[:, 0]


def masked(model: Model, x: Value, y: Value) -> tf.Tensor:
    weights = tf.cast(y[:, 0] > 0, tf.float32)
    return tf.reduce_sum(squares(model, x, y) * weights) / tf.reduce_sum(weights)


class Weighted(keras.Sequential):
    """As detectors do."""

    def compute_loss(self, x: Value = None, y: Value = None, y_pred: Value = None, *_: Value, **__: Value) -> Value:
        positive = tf.cast(y[:, 0] > 0, tf.float32)
        weights = positive / tf.maximum(tf.reduce_sum(positive), 1.0)
        weights = keras.ops.cond(tf.reduce_sum(positive) > 0, lambda: weights, lambda: tf.zeros_like(weights))
        return super().compute_loss(x, y, y_pred, sample_weight=weights)


class ByTheBatch(keras.losses.Loss):
    def call(self, y: Value, outputs: Value) -> Value:
        return (y - outputs) ** 2 / tf.reduce_sum(y**2)


NO_MEANS: dict[str, tuple[str, Callable[[], Model], Argument]] = {
    "a sum": ("is a sum over rows", stepped(lambda *given: tf.reduce_sum(squares(*given)) / 8.0), None),
    "a root of a mean": (
        "is not linear in means",
        stepped(lambda *given: tf.sqrt(tf.reduce_mean(squares(*given)))),
        None,
    ),
    "a vector by a sum": (
        "is divided by a number",
        stepped(lambda model, x, y: squares(model, x, y) / tf.reduce_sum(tf.abs(y))),
        None,
    ),
    "a function of compile": (
        "is computed from sums",
        dense,
        {"loss": lambda y, p: tf.reduce_sum((y - p) ** 2 * tf.abs(y)) / tf.reduce_sum(tf.abs(y))},
    ),
    "rows by a sum, given to Keras to sum": (
        "is divided by a number",
        dense,
        {"loss": ByTheBatch(reduction="sum")},
    ),
    "sample weights by a count": (
        "what a loss gets as sample weights is divided by a number",
        lambda: Weighted([keras.Input((3,)), keras.layers.Dense(1)]),
        {"loss": keras.losses.MeanSquaredError(reduction="sum")},
    ),
    "a metric": (
        "metric 'largest' gets one number for a batch, which is computed from numbers over all rows",
        dense,
        {"loss": "mse", "metrics": [keras.metrics.MeanMetricWrapper(lambda y, p: tf.reduce_max(p), name="largest")]},
    ),
    "a metric of Python": (
        "metric 'python' gets one number for a batch, which may be no mean",
        dense,
        {
            "loss": "mse",
            "metrics": [
                keras.metrics.MeanMetricWrapper(
                    lambda y, p: tf.ensure_shape(tf.numpy_function(lambda y, p: np.float32(0), [y, p], tf.float32), []),
                    name="python",
                )
            ],
        },
    ),
}


def normalized() -> Model:
    layers = [keras.layers.Dense(4, kernel_regularizer="l2"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dropout(0.5), keras.layers.Dense(1)])


def of_all(model: Model, x: Value, y: Value) -> tf.Tensor:
    weights = tf.cast(y[:, 0] > 0, tf.float32)
    sums = [tf.reduce_sum(squares(model, x, y) * weights), tf.reduce_sum(weights)]
    total, count = tf.distribute.get_replica_context().all_reduce(SUM, sums)
    return total / count


def slopes(model: Model, x: Value, y: Value) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = tf.square(model(x))
    return tf.reduce_mean(tf.square(tf.norm(tape.gradient(outputs, x), axis=1) - 1.0))


MEANS: dict[str, tuple[Callable[[], Model], Argument]] = {
    "a mean": (stepped(lambda *given: tf.reduce_mean(squares(*given))), None),
    "a vector": (stepped(squares), None),
    "sums of all replicas": (stepped(of_all), None),
    "a penalty of gradients": (stepped(slopes), None),
    "pairs of rows": (
        stepped(lambda model, x, y: tf.reduce_mean(tf.reduce_logsumexp(model(x) @ tf.transpose(model(x)), 1))),
        None,
    ),
    "batch normalization and regularizers": (normalized, {"loss": "mse", "metrics": ["mae", "mse"]}),
    "masked sums of Keras": (normalized, {"loss": keras.losses.Huber(reduction="sum")}),
    "means of batches": (
        dense,
        {"loss": lambda y, p: tf.reduce_mean((y - p) ** 2), "metrics": [lambda y, p: tf.reduce_mean(y - p)]},
    ),
    "a metric that is a quotient of sums": (
        dense,
        {"loss": "mse", "metrics": [lambda y, p: tf.reduce_sum(tf.abs(p - y)) / tf.reduce_sum(tf.abs(y))]},
    ),
    "numbers of rows": (dense, {"loss": lambda y, p: (y - p) ** 2, "metrics": [lambda y, p: tf.abs(y - p)]}),
}


def named(job: Job) -> Results:
    """Once each, with the place and what to do."""
    found = said(job, stepped(masked), epochs=2)
    if not job.strategy:
        return {}
    assert len(found) == 1, found
    assert found[0].startswith("tfps: a loss is computed from sums over rows and is no mean of all rows, computed at ")
    assert "programs_named.py:" in found[0]
    assert "(return tf.reduce_sum(squares(model, x, y) * weights) / tf.reduce_sum(weights))" in found[0]
    assert "all_reduce(tf.distribute.ReduceOp.SUM, [" in found[0]
    for name, (expected, build, compiled) in NO_MEANS.items():
        found = said(job, build, compiled)
        assert len(found) == 1, (name, found)
        assert expected in found[0], (name, found)
    try:
        said(job, stepped(squares, more=True))
    except UnsupportedError as error:
        assert "call it twice" in str(error)
    else:
        raise AssertionError("gradients of a vector by variables and by inputs at once were not refused")
    return {}


def not_named(job: Job) -> Results:
    """Means, and what is done about others already."""
    for name, (build, compiled) in MEANS.items():
        for more in [{}, {"sample_weight": np.linspace(0, 1, 10).astype("float32")}] if compiled else [{}]:
            found = said(job, build, compiled, **more)
            assert found == [], (name, more, found)
    return {}
