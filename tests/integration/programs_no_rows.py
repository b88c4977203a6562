"""Programs in which what a replica computes of no rows is NaN, where Keras' losses do not see it; see program.py."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from program import Job, Results, data, history, sharded, weights

from tfps.types import Argument, Library, Logs, Structure, Value

L: Library = keras.layers
SGD = keras.optimizers.SGD
ROWS, BATCH = 9, 8  # of the last batch, the last replicas have none


def summed(values: Value) -> tf.Tensor:
    """The sum of `values`, which is NaN of no rows."""
    return tf.cast(tf.size(values), values.dtype) * tf.reduce_mean(values)


class Nested(L.Layer):
    """A function within the replica's, with a statistic that stays 1 and a metric."""

    def build(self, shape: Sequence[int]) -> None:
        self.level = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.total = keras.metrics.Sum(name="total")

    def compute_output_spec(self, inputs: Structure) -> Structure:
        return keras.KerasTensor(inputs.shape, inputs.dtype)  # else Keras traces `call` without effects

    @tf.function
    def call(self, inputs: Structure) -> Value:
        self.level.assign(0.9 * self.level + 0.1 * tf.reduce_mean(tf.ones_like(inputs)))
        self.total.update_state(summed(inputs))
        return inputs


def layer(job: Job, **options: Argument) -> Results:
    """One trace serves training and evaluation."""
    x, y = data(ROWS)
    build = lambda: keras.Sequential([L.Input((64,)), Nested(), L.Dense(10)])  # noqa: E731
    model = job.compiled(lambda: SGD(0.1), build=build, **options)
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return {**weights(model), **history(fit)}


def layer_eagerly(job: Job) -> Results:
    return layer(job, run_eagerly=True)


def sparse(job: Job) -> Results:
    """TensorFlow cannot read the parts without rows that it makes of sparse batches."""
    x, y = data(ROWS)
    batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(BATCH)

    def build() -> keras.Model:
        inputs = L.Input((64,), sparse=True)
        return keras.Model(inputs, L.Dense(10)(inputs))

    model = job.compiled(lambda: SGD(0.1), build=build)
    return {**history(model.fit(batches, epochs=2, verbose=0)), **weights(model)}


class Counted(keras.Model):
    """Returns an array of one number, which looks like the value of a row."""

    def train_step(self, batch: Structure) -> Logs:
        return {**super().train_step(batch), "own": tf.ones([1])}


def number_eagerly(job: Job) -> Results:
    """A metric's array of one number, eagerly, when its size is that of the row in place of none."""
    x, y = data(ROWS)
    y = (y[:, None] > 4).astype("float32")
    inputs = L.Input((64,))
    build = lambda: Counted(inputs, L.Dense(1, activation="sigmoid")(inputs))  # noqa: E731
    metrics = [keras.metrics.F1Score(threshold=0.5)]
    options: Argument = {"loss": "binary_crossentropy", "metrics": metrics, "run_eagerly": True}
    model = job.compiled(lambda: SGD(0.1), build=build, **options)
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    return {**weights(model), **history(fit)}


def step(job: Job) -> Results:
    """The whole step is a function within the replica's, in a loop of a function and outside of any."""
    model = job.compiled(lambda: SGD(0.1, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    with job.scope():
        factor = keras.Variable(0.0)
        trained = [*model.trainable_variables, factor]
        model.optimizer.build(trained)

    @tf.function
    def nested(x: Value, y: Value) -> None:
        with tf.GradientTape() as tape:
            value = (summed(loss(y, model(x, training=True))) + factor * summed(x)) / BATCH
        model.optimizer.apply(tape.gradient(value, trained), trained)

    def replica(batch: Structure) -> None:
        nested(*batch)

    @tf.function
    def epoch() -> None:
        for batch in batches:
            job.tf_strategy.run(replica, args=(batch,))

    train = tf.function(lambda batch: job.tf_strategy.run(replica, args=(batch,)), autograph=False)
    batches = distributed(job)
    epoch()
    for batch in batches:
        train(batch)
    return {**weights(model), "factor": factor.numpy()}


def aggregated(job: Job) -> Results:
    """Variables that replicas sum, or average, whenever they assign them."""
    aggregation = tf.VariableAggregation
    with job.scope():
        added, assigned = (tf.Variable(0.0, trainable=False, aggregation=aggregation.SUM) for _ in range(2))
        mean, moved = (tf.Variable(0.0, aggregation=aggregation.MEAN) for _ in range(2))
    sums = []

    def replica(batch: Structure) -> None:
        x, _ = batch
        added.assign_add(summed(x))
        assigned.assign(summed(x))
        mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(x))
        moved.assign_sub(0.1 * tf.reduce_mean(x))

    train = tf.function(lambda batch: job.tf_strategy.run(replica, args=(batch,)), autograph=False)
    for batch in distributed(job):
        train(batch)
        if not tf.__version__.startswith("2.18."):  # where variables with SUM are ON_READ: replicas keep their parts
            sums.append(assigned.numpy())
    return {"added": added.numpy(), "assigned": sums, "mean": mean.numpy(), "moved": moved.numpy()}


def distributed(job: Job) -> tf.distribute.DistributedDataset:
    dataset = sharded(tf.data.Dataset.from_tensor_slices(data(ROWS)).batch(BATCH))
    return job.tf_strategy.experimental_distribute_dataset(dataset)


class Uncertain(L.Layer):
    """Adds a loss with a learned weight, whose gradient is NaN of no rows."""

    def build(self, shape: Sequence[int]) -> None:
        self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, inputs: Structure) -> Value:
        self.add_loss(keras.ops.exp(-self.weight) * keras.ops.mean(inputs**2) + self.weight)
        return inputs


def scaled(job: Job) -> Results:
    """A step is not skipped for what a replica computes of no rows."""
    optimizer = lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=4.0)  # noqa: E731
    build = lambda: keras.Sequential([L.Input((64,)), Uncertain(), L.Dense(10)])  # noqa: E731
    model = job.compiled(optimizer, build=build)
    model.fit(*data(ROWS), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    steps = int(model.optimizer.inner_optimizer.iterations.numpy())
    return {**weights(model), "scale": float(model.optimizer.dynamic_scale.numpy()), "steps": steps}
