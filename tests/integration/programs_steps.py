"""Programs whose steps are their own: training loops, and models with a train_step; see program.py."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, Job, Results, data, history, mlp, sharded, weights

import tfps
from tfps.types import Logs, Options, Structure, Value

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def _loop(job: Job, eager: bool) -> Results:
    strategy = job.tf_strategy
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        seen = keras.metrics.SparseCategoricalAccuracy()

    def step(images: Value, labels: Value) -> Value:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.nn.compute_average_loss(LOSS(labels, logits), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        seen.update_state(labels, logits)
        return loss

    def whole_step(batch: Structure) -> Value:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    run = whole_step if eager else tf.function(whole_step)
    dataset = sharded(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH))
    losses = []
    for _ in range(1 if eager else 2):
        losses += [float(run(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    return {**weights(model), "losses": losses, "accuracy": float(seen.result())}


def loop_eager(job: Job) -> Results:
    return _loop(job, eager=True)


def loop_function(job: Job) -> Results:
    return _loop(job, eager=False)


def loop_epoch_function(job: Job) -> Results:
    """A whole epoch in one tf.function, over the dataset, with gradients that the program computes with."""
    strategy = job.tf_strategy
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(images: Value, labels: Value) -> Value:
        with tf.GradientTape() as tape:
            losses = LOSS(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply([0.5 * gradient for gradient in gradients], model.trainable_variables)
        return loss

    @tf.function
    def epoch(batches: Structure) -> Value:
        total = tf.zeros([])
        for batch in batches:
            total += strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
        return total

    dataset = sharded(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH))
    batches = strategy.experimental_distribute_dataset(dataset)
    totals = [float(epoch(batches)) for _ in range(2)]
    return {**weights(model), "totals": totals}


class OwnStep(keras.Model):
    """A train_step with a loss of its own, a tracked mean and a value that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)
        self.tracker = keras.metrics.Mean(name="squares")

    def call(self, inputs: Structure) -> Value:
        return self.out(self.hidden(inputs))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, batch: Structure) -> Logs:
        images, labels = batch
        with tf.GradientTape() as tape:
            squares = tf.reduce_mean((self(images, training=True) - tf.one_hot(labels, 10)) ** 2, 1)
            loss = tf.nn.compute_average_loss(squares, global_batch_size=BATCH)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(squares)
        return {"squares": self.tracker.result()}


def own_train_step(job: Job) -> Results:
    with job.scope():
        model = OwnStep()
        model.compile("adam")
    fit = model.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


class OwnLogs(keras.Model):
    """A train_step that returns numbers instead of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(10)

    def call(self, inputs: Structure) -> Value:
        return self.out(inputs)

    def train_step(self, batch: Structure) -> Logs:
        images, labels = batch
        with tf.GradientTape() as tape:
            losses = LOSS(labels, self(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"mine": tf.reduce_mean(losses), "loss": tf.reduce_mean(losses)}


def own_logs(job: Job) -> Results:
    """Numbers of the last batch, and TerminateOnNaN, which goes by them: one rank's loss is not finite."""
    with job.scope():
        model = OwnLogs()
        model.compile(keras.optimizers.SGD(0.1))
    x, y = data()
    options: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fit = model.fit(x, y, epochs=2, **options)
    ends = {**weights(model), **history(fit)}
    broken = x.copy()
    broken[3 * BATCH - 1] = np.nan  # of the last rank, third step
    stopped = model.fit(broken, y, epochs=2, callbacks=[keras.callbacks.TerminateOnNaN()], **options)
    ends["stopped"] = [len(stopped.epoch), int(model.optimizer.iterations.numpy())]
    # Logs are agreed on after the last batch, whose rows do not divide, and again where its epoch ends.
    each = keras.callbacks.ModelCheckpoint(str(job.own / "{batch}.weights.h5"), save_freq=1, save_weights_only=True)
    with job.scope():
        model = OwnLogs()
        model.compile(keras.optimizers.SGD(0.1))
    uneven = model.fit(x[: 2 * BATCH + 3], y[: 2 * BATCH + 3], callbacks=[each], **options)
    return {**ends, **{f"uneven {key}": value for key, value in history(uneven).items()}}


class GuideStep(keras.Model):
    """The steps of Keras' guide: compiled metrics come as a nested dict. And numbers that are no metrics' results."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8), keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs: Structure) -> Value:
        return self.out(self.hidden(inputs))

    def _updated(self, loss: Value, y: Value, predicted: Value) -> Logs:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, batch: Structure) -> Logs:
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        last = {"of": (tf.reduce_mean(predicted), {"mean": tf.reduce_mean(predicted, 0)})}
        return {**self._updated(loss, y, predicted), "steps": self.optimizer.iterations + 0, "last": last}

    def test_step(self, batch: Structure) -> Logs:
        x, y = batch
        predicted = self(x, training=False)
        return self._updated(self.compute_loss(y=y, y_pred=predicted), y, predicted)


class Total(keras.metrics.Metric):
    """The sum of targets, whose result is its variable as it is."""

    def __init__(self) -> None:
        super().__init__(name="total")
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")

    def update_state(self, y: Value, predicted: Value, sample_weight: Value = None) -> None:
        self.total.assign_add(keras.ops.sum(y))

    def result(self) -> Value:
        return keras.ops.convert_to_tensor(self.total)


def guide_steps(job: Job) -> Results:
    """Callbacks decide by what is nested in the logs; all of it is what one process has."""
    metrics = ["mae", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1"), Total()]
    model = job.compiled(
        lambda: keras.optimizers.SGD(0.5), build=GuideStep, loss="binary_crossentropy", metrics=metrics
    )
    x, digits = data()
    y = (digits > 4).astype("float32").reshape(-1, 1)
    plateau = keras.callbacks.ReduceLROnPlateau("val_mae", patience=0, factor=0.5, min_delta=0.02)
    callbacks = [plateau, keras.callbacks.EarlyStopping("val_auc", patience=2, mode="max")]
    options: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fit = model.fit(x, y, validation_data=(x[:96], y[95::-1]), epochs=6, callbacks=callbacks, **options)
    nested = fit.history.pop("of")
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    rate = float(model.optimizer.learning_rate.numpy())
    results = keras.tree.flatten_with_path(evaluated)  # Keras 3.8 leaves them nested
    ends = {**weights(model), **history(fit), **{f"evaluated/{path[-1]}": value for path, value in results}}
    return {**ends, "rate": rate, "epochs": fit.epoch, "nested": [float(mean) for mean, _ in nested]}


class Reporting(keras.Model):
    """Reports what it is told to, and trains nothing."""

    logs: Logs | None = None

    def call(self, inputs: Structure) -> Value:
        return inputs

    def train_step(self, batch: Structure) -> Logs | None:
        return self.logs


def logs_that_differ(job: Job) -> Results:
    """What callbacks would decide by differently is refused on all ranks."""
    refused = []
    for logs in ({"text": f"of {job.rank}"}, {"a": 1.0, f"b{job.rank}": 1.0}, {"a": {"b": [1.0] * (1 + job.rank)}}):
        with job.scope():
            model = Reporting()
            model.compile("sgd")
        model.logs = tf.nest.map_structure(tf.constant, logs)
        try:
            model.fit(data()[0][:BATCH], batch_size=BATCH, verbose=0)
        except tfps.MismatchError as error:
            refused.append(str(error))
    return {"ranks refused": refused}


class OneName(keras.Model):
    """Three metrics with one name, of which the test step returns the first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.means = [keras.metrics.Mean(name="mean") for _ in range(3)]

    def call(self, inputs: Structure) -> Value:
        return self.out(inputs)

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.means

    def test_step(self, batch: Structure) -> Logs:
        for power, metric in enumerate(self.means, 1):
            metric.update_state(batch[0] ** power)
        return {"first": self.means[0].result()}


def metrics_of_one_name(job: Job) -> Results:
    with job.scope():
        model = OneName()
        model.compile("sgd")
    x, y = data()
    evaluated = model.evaluate(x[:97], y[:97], batch_size=BATCH, verbose=0, return_dict=True)
    return {"evaluated": float(evaluated["first"])}


class Gan(keras.Model):
    """Two models, two optimizers; each step trains the discriminator, then the generator."""

    def __init__(self) -> None:
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([dense(16, activation="tanh"), dense(64)])  # built in the first step
        self.discriminator = keras.Sequential([keras.Input((64,)), dense(16, activation="tanh"), dense(1)])
        self.means = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]

    def compile(self, d_optimizer: keras.optimizers.Optimizer, g_optimizer: keras.optimizers.Optimizer) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.means

    def train_step(self, images: Value) -> Logs:
        noise = images[:, :8]  # not random: comparable with one process

        def mean(logits: Value, label: float) -> Value:
            losses = tf.nn.sigmoid_cross_entropy_with_logits(tf.fill(tf.shape(logits), label), logits)[:, 0]
            return losses, tf.nn.compute_average_loss(losses, global_batch_size=BATCH)

        with tf.GradientTape() as tape:
            real, real_loss = mean(self.discriminator(images), 1.0)
            fake, fake_loss = mean(self.discriminator(self.generator(noise)), 0.0)
            loss = real_loss + fake_loss
        variables = self.discriminator.trainable_variables
        self.d_optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            fooled, loss = mean(self.discriminator(self.generator(noise)), 1.0)
        variables = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(loss, variables), variables)
        self.means[0].update_state(real + fake)
        self.means[1].update_state(fooled)
        return {metric.name: metric.result() for metric in self.means}


def gan(job: Job) -> Results:
    with job.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.002))
    fit = model.fit(data()[0], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**weights(model.generator, model.discriminator), **history(fit)}


def without_call(job: Job) -> Results:
    """Layers, metrics and slots are created in the first step: rank 0's values, and validation reads statistics."""
    model = job.compiled(lambda: keras.optimizers.Adam(0.01), build=WithoutCall)
    x, y = data()
    options: Options = {"batch_size": BATCH, "verbose": 0}
    fit = model.fit(x, y, epochs=2, shuffle=False, **options)
    return {**weights(model), **history(fit), "evaluated": model.evaluate(x, y, **options)}


class WithoutCall(keras.Model):
    """An encoder and a decoder in a step of its own, with the metrics and the loss that `compile` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="tanh")
        self.out = keras.Sequential([keras.layers.Dense(10)])

    def train_step(self, batch: Structure) -> Logs:
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self.out(self.hidden(x))
            loss = self.compute_loss(y=y, y_pred=predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self._measured(y, predicted, loss)

    def test_step(self, batch: Structure) -> Logs:
        x, y = batch
        predicted = self.out(self.hidden(x))
        return self._measured(y, predicted, self.compute_loss(y=y, y_pred=predicted))

    def _measured(self, y: Value, predicted: Value, loss: Value) -> Logs:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}
