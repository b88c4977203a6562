"""Programs whose batches do not divide by the replicas, down to replicas without rows; see program.py."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from program import Job, Results, data, history, sharded, weights

from tfps.types import Argument, Function, Library, Logs, Model, Structure, Value

L: Library = keras.layers
SGD = keras.optimizers.SGD


class Added(L.Layer):
    """Adds a mean over rows to the loss, which is NaN of no rows."""

    def call(self, inputs: Structure) -> Value:
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


def dense() -> Model:
    layers = [L.Dense(8, activation="relu", kernel_regularizer="l2"), L.LayerNormalization(), Added(), L.Dense(10)]
    return keras.Sequential([L.Input((64,)), *layers])


def fitted(job: Job, rows: int, batch: int, **options: Argument) -> Results:
    x, y = data(rows)
    model = job.compiled(lambda: SGD(0.1), build=dense, **options)
    fit = model.fit(x, y, batch_size=batch, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
    return {**weights(model), **history(fit)}


def arrays(job: Job) -> Results:
    return fitted(job, 29, 8)


def every_batch_uneven(job: Job) -> Results:
    return fitted(job, 30, 5)


def last_batch_of_one_row(job: Job) -> Results:
    return fitted(job, 9, 8)


def last_batch_of_four_rows(job: Job) -> Results:
    return fitted(job, 16, 12)


def fewer_rows_than_replicas(job: Job) -> Results:
    return fitted(job, 2, 8)


def residual() -> Model:
    inputs = L.Input((64,))
    hidden = L.Add()([inputs, L.Dense(64)(inputs)])
    return keras.Model(inputs, L.Dense(10)(hidden))


def one_row_in_all(job: Job) -> Results:
    """Graphs of replicas that never have any rows: Keras takes what has none for other shapes (Add)."""
    x, y = data(1)
    model = job.compiled(lambda: SGD(0.1), build=residual)
    fit = model.fit(x, y, epochs=2, verbose=0, validation_data=(x, y))
    return {**weights(model), **history(fit), "predicted": model.predict(x, verbose=0)}


def eagerly(job: Job) -> Results:
    return fitted(job, 13, 6, run_eagerly=True)


def several_steps(job: Job) -> Results:
    return fitted(job, 29, 8, steps_per_execution=2)


def tf_data(job: Job) -> Results:
    """As in the report that val_loss was NaN: 32 rows in batches of 31."""
    x, y = data(32)
    dataset = sharded(tf.data.Dataset.from_tensor_slices((x, y)).batch(31))
    model = job.compiled("adam", build=dense)
    fit = model.fit(dataset, epochs=2, verbose=0, validation_data=dataset)
    return {**weights(model), **history(fit), "evaluated": model.evaluate(dataset, verbose=0)}


class Batches(keras.utils.PyDataset):
    """Batches of 5, 5, and 1 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = data(11)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Structure:
        return self.x[5 * index : 5 * index + 5], self.y[5 * index : 5 * index + 5]


def py_dataset(job: Job) -> Results:
    model = job.compiled(lambda: SGD(0.1), build=dense)
    fit = model.fit(Batches(), epochs=2, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def accumulated(job: Job) -> Results:
    x, y = data(29)
    model = job.compiled(lambda: SGD(0.1, gradient_accumulation_steps=2), build=dense)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return weights(model)


def updated_in_the_step(job: Job) -> Results:
    """Adafactor reads other state between its slots, so its updates are not deferred."""
    x, y = data(16)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.7)
    model = job.compiled(lambda: keras.optimizers.Adafactor(schedule), build=dense)
    fit = model.fit(x, y, batch_size=9, epochs=3, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def embedding() -> Model:
    return keras.Sequential([L.Input((64,)), L.Embedding(20, 4), L.GlobalAveragePooling1D(), L.Dense(10)])


def worker_without_rows(job: Job) -> Results:
    """All replicas of a worker have empty sparse gradients, which crash TensorFlow's collectives."""
    x, y = data(7)
    model = job.compiled(lambda: SGD(0.5), build=embedding)
    fit = model.fit(x.astype("int32") % 20, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def masked(job: Job) -> Results:
    """A mean over unmasked positions counts by these, not by rows."""
    random = np.random.default_rng(0)
    words = random.integers(1, 20, (29, 6))
    for row, length in enumerate(random.integers(0, 7, 29)):
        words[row, length:] = 0

    def build() -> Model:
        layers = [L.Embedding(20, 4, mask_zero=True), L.LSTM(5, return_sequences=True), L.Dense(10)]
        return keras.Sequential([L.Input((6,)), *layers])

    model = job.compiled(lambda: SGD(0.5), build=build)
    fit = model.fit(words, words % 10, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def _weighted(job: Job, *reductions: str) -> Results:
    loss, ends = keras.losses.SparseCategoricalCrossentropy, {}
    for reduction in reductions:
        x, y = data(29)
        model = job.compiled(lambda: SGD(0.01), build=dense, loss=loss(from_logits=True, reduction=reduction))
        fit = model.fit(*(x, y), sample_weight=np.linspace(0, 3, 29), batch_size=8, epochs=2, shuffle=False, verbose=0)
        ends.update({f"{reduction}/{name}": value for name, value in {**weights(model), **history(fit)}.items()})
    return ends


def by_sample_weights(job: Job) -> Results:
    """So does one that is divided by the sum of sample weights."""
    return _weighted(job, "mean_with_sample_weight")


def other_reductions(job: Job) -> Results:
    """Other losses divide by rows, also where samples have weights."""
    return _weighted(job, "sum_over_batch_size", "sum")


class Guide(keras.Model):
    """The steps of Keras' guide, which track what compute_loss returns."""

    def train_step(self, data: Structure) -> Logs:
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs)
        return {"last": loss}

    def test_step(self, data: Structure) -> Logs:
        x, y = data
        outputs = self(x, training=False)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(self.compute_loss(y=y, y_pred=outputs))
            else:
                metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


def guide() -> Model:
    model = dense()
    return Guide(model.inputs, model.outputs)


def tracked_loss(job: Job) -> Results:
    x, y = data(29)
    model = job.compiled(lambda: SGD(0.1), build=guide)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    tracked = {metric.name: metric.result() for metric in model.metrics}
    return {**weights(model), "loss": np.array(tracked["loss"])}


def evaluated_evenly_after_an_uneven_batch(job: Job) -> Results:
    """Of the last batch to train on, some replicas have as many rows as of the batch to evaluate, and some fewer."""
    x, y = data(17)
    model = job.compiled(lambda: SGD(0.1), build=guide)
    return history(model.fit(x, y, batch_size=12, shuffle=False, verbose=0, validation_data=(x[:6], y[:6])))


def train_on_batch(job: Job) -> Results:
    """Each worker passes its part; the parts differ in size."""
    x, y = data(29)
    model = job.compiled(lambda: SGD(0.1), build=dense)
    for start in range(0, 29, 8):
        size = len(x[start : start + 8])
        first, end = (start - (-size * rank // job.workers) for rank in (job.rank, job.rank + 1))
        model.train_on_batch(x[first:end], y[first:end])
    return weights(model)


def _loop(
    job: Job, build: Function = dense, optimizer: Function = lambda: SGD(0.1), rows: int = 29, batch: int = 8
) -> tuple[Model, Function, tf.distribute.DistributedDataset]:
    model = job.compiled(optimizer, build=build)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(batch: Structure) -> Value:
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
            scaled = model.optimizer.scale_loss(value)
        model.optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return value

    x, y = data(rows)
    dataset = sharded(tf.data.Dataset.from_tensor_slices((x if build is dense else x * 16 % 20, y)).batch(batch))
    return model, step, job.tf_strategy.experimental_distribute_dataset(dataset)


def loop_eager(job: Job) -> Results:
    """Batches are taken outside of the function that trains: replicas sum their rows."""
    model, step, batches = _loop(job)
    train = tf.function(lambda batch: job.tf_strategy.run(step, args=(batch,)), autograph=False)
    losses = [job.tf_strategy.reduce("SUM", train(batch), axis=None) for _ in range(2) for batch in batches]
    return {**weights(model), "losses": np.array(losses)}


def loop_function(job: Job) -> Results:
    return weights(_looped(job, *_loop(job)))


def loop_of_sparse_gradients(job: Job) -> Results:
    """The iterations of a loop in a graph have different numbers of rows; also in a branch of tf.cond."""
    momentum = lambda: SGD(0.5, momentum=0.9)  # noqa: E731
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=1024.0)  # noqa: E731
    return weights(*(_looped(job, *_loop(job, embedding, each, rows=22, batch=9)) for each in (momentum, scaled)))


def _looped(job: Job, model: Model, step: Function, batches: tf.distribute.DistributedDataset) -> Model:
    """Trains `model` for two epochs, each in a function."""

    @tf.function
    def epoch() -> None:
        for batch in batches:
            job.tf_strategy.run(step, args=(batch,))

    with job.scope():
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    epoch()
    epoch()
    return model


def loss_scale(job: Job) -> Results:
    """The scale is alike on all replicas, whatever their rows: it doubles every other step."""
    scaled = lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2)  # noqa: E731
    model = job.compiled(scaled)
    model.fit(*data(13), batch_size=5, epochs=3, shuffle=False, verbose=0)
    return {**weights(model), "scale": float(model.optimizer.dynamic_scale.numpy())}


def normalized(job: Job) -> Results:
    """Statistics of no rows, which are NaN, reach neither variables nor metrics."""

    def build() -> Model:
        return keras.Sequential([L.Input((64,)), L.Dense(8), L.BatchNormalization(), L.Dense(10)])

    x, y = data(9)
    model = job.compiled(lambda: SGD(0.1), build=build)
    fit = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))
    ends = {**weights(model), **history(fit)}
    finite = float(all(np.isfinite(value).all() for value in ends.values()))
    return {"finite": finite} | {f"ranks {name}": value for name, value in ends.items()}


class Scaled(L.Layer):
    """Divides by a moving mean of its inputs, which does not show in them."""

    def build(self, shape: Sequence[int]) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, inputs: Structure, training: bool = False) -> Value:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs, 0))
        return inputs


def moving_mean(job: Job) -> Results:
    """A moving mean of rows is that of the global batch."""

    def build() -> Model:
        return keras.Sequential([L.Input((64,)), Scaled(), L.Dense(10)])

    x, y = data(8)
    model = job.compiled(lambda: SGD(0.1), build=build)
    model.fit(x[:5], y[:5], batch_size=5, epochs=1, shuffle=False, verbose=0)
    return weights(model)


class Following(Scaled):
    """A moving mean of what is trained, and others of numbers that are the same on all replicas."""

    def build(self, shape: Sequence[int]) -> None:
        super().build(shape)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")
        self.level = self.add_weight(shape=(), initializer="ones", trainable=False, name="level")

    def call(self, inputs: Structure, training: bool = False) -> Value:
        if training:
            self.steps.assign_add(0.1)
            # Constant where the number of rows is fixed, as in a function that has got the batch.
            self.level.assign(0.9 * self.level + 0.1 * keras.ops.mean(keras.ops.ones_like(inputs)))
        return super().call(inputs, training=training)


def moving_means_in_loops(job: Job) -> Results:
    """A program divides its loss itself, so nobody asks how many rows the replicas have but the moving mean."""
    return weights(*(_following(job, form) for form in ("eager", "step", "iterator", "epoch")))


def _following(job: Job, form: str) -> Model:
    keras.utils.set_random_seed(1)
    build = lambda: keras.Sequential([L.Input((64,)), L.Dense(6), Following(), L.Dense(10)])  # noqa: E731
    model, strategy = job.compiled(lambda: SGD(0.1), build=build), job.tf_strategy
    with job.scope():
        model.optimizer.build(model.trainable_variables)

    def step(x: Value, y: Value) -> None:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=8)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train(batch: Structure) -> None:
        strategy.run(step, args=batch)

    @tf.function
    def epoch(batches: Structure) -> None:
        for batch in batches:
            train(batch)

    in_function = tf.function(train, autograph=False)
    following = tf.function(lambda iterator: train(next(iterator)), autograph=False)
    for rows in (9, 13):  # the last batch has 1 row, then 5
        dataset = sharded(tf.data.Dataset.from_tensor_slices(data(rows)).batch(8))
        batches = strategy.experimental_distribute_dataset(dataset)
        if form == "epoch":
            epoch(batches)
        elif form == "iterator":
            iterator = iter(batches)
            following(iterator)
            following(iterator)
        else:
            for batch in batches:
                (train if form == "eager" else in_function)(batch)
    return model
