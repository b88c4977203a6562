"""Programs with tables of rows (`tfps.layers.Embedding`), which do what they do in one process; see program.py.

With MIRRORED in the environment those without tfps run under `tf.distribute.MirroredStrategy`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from program import DEVICES, Job, Results, history, sharded

import tfps
from tfps.types import Argument, Array, Layer, Library, Logs, Model, Optimizer, Structure, Value

L: Library = keras.layers
ROWS, DIM, BATCH = 60, 4, 12
SPEC = {"embeddings_initializer": keras.initializers.RandomUniform(seed=5)}
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adagrad": lambda: keras.optimizers.Adagrad(0.2),
}


def data(rows: int = 78) -> tuple[Array, Array]:
    """Words from 1 on, of which some are often there, and labels."""
    random = np.random.default_rng(0)
    words = np.minimum(random.geometric(0.07, (rows, 6)), ROWS - 2)
    return words, words.sum(1) % 10


def table(rows: int | None = ROWS, **options: Argument) -> Layer:
    return tfps.layers.Embedding(rows, DIM, **{**SPEC, **options})


def rows_of(*tables: Layer, ids: Array | None = None) -> Results:
    """All rows of tables."""
    ids = np.arange(ROWS) if ids is None else ids
    return {f"rows/{number}": each.read_rows(ids) for number, each in enumerate(tables)}


def scope(job: Job) -> contextlib.AbstractContextManager[object]:
    found: contextlib.AbstractContextManager[object] = _strategy(job).scope()
    return found


_mirrored: list[tf.distribute.Strategy] = []


def _strategy(job: Job) -> tf.distribute.Strategy:
    if job.strategy is None and "MIRRORED" in os.environ:
        if not _mirrored:
            _mirrored.append(tf.distribute.MirroredStrategy(DEVICES))
        return _mirrored[0]
    return job.tf_strategy


def compiled(job: Job, build: Callable[[], Model], optimizer: Callable[[], Optimizer], **options: Argument) -> Model:
    with scope(job):
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, **options)
    return model


def words_model(*tables: Layer) -> Model:
    """The mean of the rows of several tables' words, and a layer."""
    words = keras.Input((6,), dtype="int64")
    found = [L.GlobalAveragePooling1D()(each(words)) for each in tables]
    return keras.Model(words, L.Dense(10)(L.Concatenate()(found) if len(found) > 1 else found[0]))


def fitted(
    job: Job,
    optimizer: str | Callable[[], Optimizer] = "adam",
    rows: int = 78,
    tables: Callable[[], list[Layer]] = lambda: [table(), table(None)],
    batch: int = BATCH,
    **options: Argument,
) -> Results:
    x, y = data(rows)
    made: list[Layer] = []

    def build() -> Model:
        made.extend(tables())
        return words_model(*made)

    model = compiled(job, build, OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer, **options)
    fit = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, validation_data=(x[:13], y[:13]))
    ends = {f"weights/{n}": each for n, each in enumerate(model.get_weights())}
    return {**ends, **history(fit), **rows_of(*made), "predicted": model.predict(x[:7], verbose=0)}


def sgd(job: Job) -> Results:
    """Every batch divides."""
    return fitted(job, "sgd", 72)


def adam(job: Job) -> Results:
    """The last batch has 6 rows."""
    return fitted(job)


def one_row(job: Job) -> Results:
    """The last batch has one row: what stands for the rows of other replicas must not be trained, which Adam shows."""
    return fitted(job, rows=25)


def several_steps(job: Job) -> Results:
    return fitted(job, "adagrad", steps_per_execution=3)


def eagerly(job: Job) -> Results:
    return fitted(job, "adagrad", 37, run_eagerly=True)


def unseeded(job: Job) -> Results:
    """Initial values are those of rank 0's seed, before the first step as well."""
    made: list[Layer] = []

    def build() -> Model:
        made.extend([tfps.layers.Embedding(ROWS, DIM), tfps.layers.Embedding(None, DIM)])
        return words_model(*made)

    x, y = data(24)
    model = compiled(job, build, OPTIMIZERS["sgd"])
    predicted = [model.predict(x, batch_size=BATCH, verbose=0)]
    before = rows_of(*made)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    predicted.append(model.predict(x, batch_size=BATCH, verbose=0))
    after = rows_of(*made)
    for name, rows in before.items():
        assert len(np.unique(rows)) > ROWS
        assert 0 < (rows != after[name]).any(1).sum() < ROWS
    ends = {**after, **{f"before/{name}": rows for name, rows in before.items()}, "predicted": np.array(predicted)}
    return {f"ranks {name}": value for name, value in ends.items()}


def own_optimizer(job: Job) -> Results:
    """One with a schedule, made outside of the scope, of two tables, and the model's: each counts its steps."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    own, scaled = keras.optimizers.Adam(schedule), keras.optimizers.Adagrad(0.3)
    found = fitted(
        job,
        lambda: keras.optimizers.SGD(0.1, clipnorm=1.0),
        tables=lambda: [table(optimizer=own), table(None, optimizer=own), table(None, optimizer=scaled)],
    )
    return {**found, "steps": np.array([own.iterations.numpy(), scaled.iterations.numpy()])}


def several_optimizers(job: Job) -> Results:
    rules = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*rows": keras.optimizers.Adagrad(0.3)})
    found = fitted(job, lambda: keras.optimizers.MultiOptimizer(rules))
    return {**found, "steps": np.array([each.iterations.numpy() for each in rules.values()])}


def only_tables(job: Job) -> Results:
    """No other variable is trained."""
    x, y = data()
    made: list[Layer] = []

    def build() -> Model:
        made.append(tfps.layers.Embedding(None, 10, combiner="mean", **SPEC))
        return keras.Sequential([L.Input((6,), dtype="int64"), *made])

    model = compiled(job, build, OPTIMIZERS["adam"])
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**history(fit), **rows_of(*made), "steps": model.optimizer.iterations.numpy()}


def combined(job: Job) -> Results:
    """Padding is left out by a combiner and masked for an LSTM; features share a table; words have weights."""
    x, y = data()
    x[np.random.default_rng(1).random(x.shape) < 0.3] = 0
    weights = np.random.default_rng(2).random(x.shape).astype("float32")
    made: list[Layer] = []

    def build() -> Model:
        words, weighed = keras.Input((6,), dtype="int32"), keras.Input((6,))
        made.extend([table(mask_zero=True), table(None, combiner="sqrtn", mask_zero=True)])
        found = [L.LSTM(5)(made[0](words)), made[1](words, weighed), L.Flatten()(made[0](words[:, :2]))]
        return keras.Model([words, weighed], L.Dense(10)(L.Concatenate()([*found, made[1](words)])))

    model = compiled(job, build, OPTIMIZERS["adam"])
    fit = model.fit([x, weights], y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**history(fit), **rows_of(*made), **{f"weights/{n}": each for n, each in enumerate(model.get_weights())}}


def ragged(job: Job) -> Results:
    """Batches of rows of different length, from tf.data."""
    x, y = data()
    words = tf.RaggedTensor.from_row_lengths(x.reshape(-1)[: x.size - x.size % 4], [1, 7, 4] * (x.size // 12))
    words, y = words[:77], y[:77]
    made: list[Layer] = []

    def build() -> Model:
        made.append(table(None, combiner="mean"))
        words = keras.Input((None,), dtype="int64", ragged=True)
        return keras.Model(words, L.Dense(10)(made[0](words)))

    model = compiled(job, build, OPTIMIZERS["adagrad"])
    batches = sharded(tf.data.Dataset.from_tensor_slices((words, y)).batch(BATCH))
    fit = model.fit(batches, epochs=2, verbose=0)
    return {**history(fit), **rows_of(*made)}


def _in_half(job: Job, policy: str, optimizer: Callable[[], Optimizer], heavy: float) -> Results:
    x, y = data(72)
    weights = np.ones(len(x), "float32")
    weights[2 * BATCH - 1] = heavy
    made: list[Layer] = []

    def build() -> Model:
        made.extend([table(), table(None)])
        return words_model(*made)

    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(job, build, optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    fit = model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    found = {f"weights/{n}": each for n, each in enumerate(model.get_weights())}
    return {**found, **rows_of(*made), "steps": model.optimizer.iterations.numpy(), **history(fit)}


def float16(job: Job) -> Results:
    """One row's gradient overflows in each epoch: all replicas leave the step out, and the rows of its batch."""
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**12)  # noqa: E731
    found = _in_half(job, "mixed_float16", scaled, 1e6)
    assert found["steps"] == 10
    return {name: value for name, value in found.items() if not name.startswith("history")}


def bfloat16(job: Job) -> Results:
    return _in_half(job, "mixed_bfloat16", lambda: keras.optimizers.SGD(0.1), 1.0)


def own_step(job: Job) -> Results:
    """A step of one's own, which trains a table twice by different losses."""
    x, y = data()
    made: list[Layer] = []

    class Twice(keras.Model):
        def train_step(self, data: Structure) -> Structure:
            x, y = data
            for weight in (1.0, 0.5):
                with tf.GradientTape() as tape:
                    loss = weight * self.compute_loss(y=y, y_pred=self(x, training=True))
                self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def build() -> Model:
        made.append(table(None))
        model = words_model(*made)
        return Twice(model.inputs, model.outputs)

    model = compiled(job, build, OPTIMIZERS["adam"])
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**history(fit), **rows_of(*made), "steps": model.optimizer.iterations.numpy()}


def _loop(job: Job) -> tuple[Model, list[Layer], Callable[[Structure], Value], tf.data.Dataset]:
    made: list[Layer] = []

    def build() -> Model:
        made.extend([table(), table(None)])
        return words_model(*made)

    model = compiled(job, build, OPTIMIZERS["adam"])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(batch: Structure) -> Value:
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return model, made, step, sharded(tf.data.Dataset.from_tensor_slices(data(77)).batch(BATCH))


def loop(job: Job) -> Results:
    """A loop of one's own: a function for each step."""
    _, made, step, batches = _loop(job)
    strategy = _strategy(job)
    train = tf.function(lambda batch: strategy.run(step, args=(batch,)), autograph=False)
    batches = strategy.experimental_distribute_dataset(batches)
    losses = [strategy.reduce("SUM", train(batch), axis=None) for _ in range(2) for batch in batches]
    return {**rows_of(*made), "losses": np.array(losses)}


def loop_function(job: Job) -> Results:
    """All steps of an epoch in one function."""
    model, made, step, batches = _loop(job)
    strategy = _strategy(job)
    batches = strategy.experimental_distribute_dataset(batches)

    @tf.function
    def epoch() -> None:
        for batch in batches:
            strategy.run(step, args=(batch,))

    with scope(job):
        model.optimizer.build(model.trainable_variables)
    epoch()
    epoch()
    return rows_of(*made)


def loop_alike(job: Job) -> Results:
    """A loop that knows nothing of workers, in functions and eagerly: all ranks read the same batches."""
    _, made, step, batches = _loop(job)
    train = tf.function(step)
    for batch in batches:
        train(batch)
    for batch in batches:
        step(batch)
    return rows_of(*made)


def not_finite(job: Job) -> Results:
    """A batch with a NaN in the last rank's part is left out, in one process by hand."""
    x, y = data(72)
    heavy = np.ones(len(x), "float32")
    heavy[3 * BATCH - 1] = np.nan
    if job.strategy is None:
        x, y, heavy = (np.delete(each, np.r_[2 * BATCH : 3 * BATCH], 0) for each in (x, y, heavy))
    made: list[Layer] = []

    def build() -> Model:
        made.extend([table(), table(None, optimizer=OPTIMIZERS["adagrad"]())])
        return words_model(*made)

    model = compiled(job, build, OPTIMIZERS["adam"])
    model.fit(x, y, sample_weight=heavy, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    steps = [model.optimizer.iterations.numpy(), made[1].optimizer.iterations.numpy()]
    return {**rows_of(*made), "steps": np.array(steps)}


def learnable(job: Job) -> tuple[Model, list[Layer], Array, Array]:
    """A model of two tables, the tables, words, and labels that can be learnt."""
    made: list[Layer] = []

    def build() -> Model:
        made.extend([table(), table(None, optimizer=OPTIMIZERS["adagrad"]())])
        return words_model(*made)

    model = compiled(job, build, OPTIMIZERS["adam"])
    x, _ = data(240)
    return model, made, x, x[:, 0] % 10


def independent(job: Job) -> Results:
    """Workers step by themselves: training learns, and all read the same rows once they have met."""
    model, made, x, y = learnable(job)
    fit = model.fit(x, y, batch_size=BATCH, epochs=8, shuffle=False, verbose=0)
    assert job.strategy is not None
    job.strategy.synchronize()
    found = rows_of(*made)
    assert all(np.isfinite(each).all() for each in found.values())
    losses = fit.history["loss"]
    assert losses[-1] < 0.9 * losses[0], losses
    return {f"ranks {name}": each for name, each in found.items()}


def best(job: Job) -> Results:
    """Workers step by themselves until the validation gets worse, and go back to the epoch in which it was best."""
    model, made, x, y = learnable(job)
    others = x[:24], (y[:24] + np.arange(24) % 2) % 10  # of which half are as in training
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    more = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fit = model.fit(x, y, epochs=60, validation_data=others, callbacks=[stop], **more)
    assert stop.best_epoch < stop.stopped_epoch
    found = model.evaluate(*others, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(found, fit.history["val_loss"][stop.best_epoch], rtol=1e-5)
    return {f"ranks {name}": each for name, each in rows_of(*made).items()}


def lost(job: Job) -> Results:
    """The last rank dies in the middle of an epoch."""

    def die(batch: int, logs: Logs | None = None) -> None:
        if job.rank == job.workers - 1 and batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    model, made, x, y = learnable(job)
    dies = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    fit = model.fit(x, y, batch_size=BATCH, epochs=6, shuffle=False, verbose=0, callbacks=[dies])
    assert job.strategy is not None
    return {**rows_of(*made), **history(fit), "workers": np.array(job.strategy.num_workers), "ranks": _left(job)}


def _left(job: Job) -> Array:
    assert job.strategy is not None
    return np.array(job.strategy._runtime.exchange.view.ranks)


def _refused(job: Job, build: Callable[[], Model]) -> Results:
    """What `fit` raises: of which class, and what it says."""
    x, y = data(48)
    try:
        compiled(job, build, OPTIMIZERS["adagrad"]).fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    except Exception as error:
        return {"own refused": (type(error).__name__, str(error))}
    return {"own refused": ("", "")}


def different(job: Job) -> Results:
    """The ranks' tables have rows of different sizes."""

    def build() -> Model:
        words = keras.Input((6,), dtype="int64")
        users = tfps.layers.Embedding(None, DIM + job.rank, name="users", **SPEC)
        return keras.Model(words, L.Dense(10)(keras.ops.mean(users(words), -1)))

    return _refused(job, build)


def too_large(job: Job) -> Results:
    """A table that a pserver has no memory for."""
    return _refused(job, lambda: words_model(table(None, max_rows=10**10, name="users")))


def out_of_range(job: Job) -> Results:
    """The last rank's part of the third batch has an id that the table has not."""
    wrong = ROWS if job.rank == job.workers - 1 else ROWS - 1

    class Some(keras.layers.Layer):
        def call(self, words: Value) -> Value:
            return tf.where(tf.equal(words, ROWS - 1), tf.cast(wrong, words.dtype), words)

        def compute_output_shape(self, shape: Structure) -> Structure:
            return shape

    def build() -> Model:
        words = keras.Input((6,), dtype="int64")
        users = table(name="users")
        return keras.Model(words, L.Dense(10)(L.GlobalAveragePooling1D()(users(Some()(words)))))

    model, (x, y) = compiled(job, build, OPTIMIZERS["adam"]), data(60)
    x[3 * BATCH - 1, 2] = ROWS - 1
    try:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    except Exception as error:
        return {"own refused": (type(error).__name__, str(error))}
    return {"own refused": ("", "")}


def every_other_batch(job: Job) -> Results:
    """A step of one's own that leaves out the gradients of every other batch. Rank 0 is slow to look rows up."""
    x, y = data(240)
    made: list[Layer] = []

    def slowly(words: Array) -> Array:
        time.sleep(0.03 if job.rank == 0 and job.workers > 1 else 0.0)
        return words

    class Leaving(keras.Model):
        def train_step(self, data: Structure) -> Structure:
            x, y = data
            x = tf.ensure_shape(tf.numpy_function(slowly, [x], x.dtype), x.shape)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.number.assign_add(1)

            def apply() -> tf.Tensor:
                self.optimizer.apply(gradients, self.trainable_variables)
                return tf.constant(0)

            tf.cond(tf.equal(self.number % 2, 0), apply, lambda: tf.constant(0))
            return {"loss": loss}

    def build() -> Model:
        made.append(table(None))
        model = words_model(*made)
        model = Leaving(model.inputs, model.outputs)
        model.number = tf.Variable(0, trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        return model

    model = compiled(job, build, OPTIMIZERS["adagrad"])
    with scope(job):
        model.optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**rows_of(*made), "steps": model.optimizer.iterations.numpy()}
