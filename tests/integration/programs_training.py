"""Programs with several models, models compiled again, batches given by hand, special variables; see program.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from program import BATCH, SAMPLES, Job, Results, data, history, mlp, weights

import tfps
from tfps.types import Layer, Logs, Model, Options, Structure, Value


def shared_variables(job: Job) -> Results:
    """An encoder in two models, trained in turn; the second model freezes it later."""
    with job.scope():
        inputs = keras.Input((64,))
        encoder = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="tanh")])
        classifier = keras.Model(inputs, keras.layers.Dense(10)(encoder(inputs)))
        decoder = keras.Model(inputs, keras.layers.Dense(64)(encoder(inputs)))
        classifier.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        decoder.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data()
    options: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fits = []
    for _ in range(2):
        fits += [classifier.fit(x, y, **options), decoder.fit(x, x, **options)]
    before = encoder.get_weights()
    encoder.trainable = False
    with job.scope():
        decoder.compile("adam", "mse")
    fits.append(decoder.fit(x, x, **options))
    for old, new in zip(before, encoder.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    fits.append(classifier.fit(x, y, **options))  # compiled before: what Keras makes of it
    encoder.trainable = True
    with job.scope():
        classifier.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fits.append(classifier.fit(x, y, **options))
    return {**weights(classifier, decoder), **history(*fits)}


def gradients_none(job: Job) -> Results:
    """Variables that the loss does not reach, in fit and in a loop."""
    with job.scope():
        inputs = keras.Input((64,))
        used = keras.layers.Dense(10)(inputs)
        unused = keras.layers.Dense(3, name="unused")(inputs)
        model = keras.Model(inputs, [used, unused])
        model.compile("adam", [keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    x, y = data()
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def compile_again(job: Job) -> Results:
    """fit twice, recompile, another model in between."""
    first, second = job.compiled(), job.compiled(lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
    x, y = data()
    options: Options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    fits = [model.fit(x, y, **options) for model in (first, second, first, first)]
    with job.scope():
        first.compile("rmsprop", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fits += [model.fit(x, y, **options) for model in (first, second)]
    return {**weights(first, second), **history(*fits)}


def fine_tuning(job: Job) -> Results:
    """Frozen, compiled outside of the scope with an optimizer and metrics made there, unfrozen, compiled again."""
    model = job.compiled()
    x, y = data()
    options: Options = {"batch_size": BATCH, "shuffle": False, "validation_data": (x, y), "verbose": 0}
    fits = [model.fit(x, y, **options)]
    for trainable, optimizer in ((False, "adam"), (True, keras.optimizers.SGD(0.1, momentum=0.9)), (False, "rmsprop")):
        model.layers[0].trainable = trainable
        top = keras.metrics.SparseTopKCategoricalAccuracy(3, name="top")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy", top])
        fits.append(model.fit(x, y, **options))
    return {**weights(model), **history(*fits)}


def train_on_batch(job: Job) -> Results:
    """Batches given by hand are this worker's own: each rank passes its half."""
    model = job.compiled("sgd")
    x, y = data()
    size = BATCH // job.workers
    results = []
    for start in range(0, SAMPLES, BATCH):
        mine = slice(start + job.rank * size, start + (job.rank + 1) * size)
        results.append(model.train_on_batch(x[mine], y[mine], return_dict=True))
    tested = model.test_on_batch(x[:BATCH], y[:BATCH], return_dict=True)
    return {**weights(model), "own results": results, "own test": tested, "predicted": model.predict_on_batch(x[:8])}


def two_strategies(job: Job) -> Results:
    """Two strategies with the same pservers in one process, used in turn; the second ends earlier."""
    other = tfps.Strategy() if job.strategy else None
    first = job.compiled()
    with other.scope() if other else contextlib.nullcontext():
        second = mlp()
        second.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    fits = [model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0) for model in (first, second, first, second)]
    if other:
        other.close()
    fits.append(first.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0))
    return {**weights(first, second), **history(*fits)}


def helper_models(job: Job) -> Results:
    """Rank 0 builds models for itself before, and still holds one that the others have dropped before any training."""

    class Scaled(keras.layers.Layer):
        def build(self, shape: Sequence[int]) -> None:
            self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")  # without a name of its own

        def call(self, inputs: Structure) -> Value:
            return inputs * self.factor

    def build() -> Model:
        hidden = [keras.layers.Dense(16, activation="tanh"), Scaled(), keras.layers.Dense(16, name="hidden_2")]
        return keras.Sequential(
            [keras.Input((64,)), *hidden, keras.layers.LayerNormalization(), keras.layers.Dense(10)]
        )

    if job.rank == 0:
        for _ in range(2):
            helper = build()
            helper.compile(keras.optimizers.Adam(), "mse")
            helper.optimizer.build(helper.trainable_variables)
    dead = [job.compiled(build=build)]
    if job.rank != 0:
        dead.clear()
        gc.collect()
    model = job.compiled(build=build)
    x, y = data()
    fit = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {**weights(model), **history(fit)}


def captured_constant(job: Job) -> Results:
    """A functional model keeps what a layer has computed at once, from initial weights that differ between ranks."""
    with job.scope():
        inputs = keras.Input((64,))
        words = keras.layers.Embedding(8, 16)(keras.ops.arange(8))
        hidden = keras.layers.Dense(16)(inputs)
        inner = keras.Model(inputs, keras.ops.matmul(hidden, keras.ops.transpose(words)))
        model = keras.Sequential([inner, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    fit = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {**weights(model), **history(fit), "predicted": model.predict(x[:8], verbose=0)}


def strings(job: Job) -> Results:
    """Variables of strings, of other lengths on each rank; one whose number of strings differs; one of numbers."""
    words = ["", "a" * (job.rank + 1), "\u00e4\0", "b" * 3000]
    with job.scope():
        fixed = tf.Variable(words)
        free = tf.Variable(words * (2 - job.rank), shape=tf.TensorShape([None]))
        numbers = tf.Variable(tf.range(3 + job.rank), shape=tf.TensorShape(None))
    job.tf_strategy.run(lambda: None)
    texts = {"fixed": fixed.numpy(), "free": free.numpy()}
    ends = {name: np.frombuffer(b"|".join(text), np.uint8).astype(np.int64) for name, text in texts.items()}
    return {**ends, "numbers": numbers.numpy()}


def batch_normalization(job: Job) -> Results:
    """Moving statistics are those of all ranks when they are read."""

    def build() -> Model:
        layers = [keras.layers.Dense(16, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
        return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])

    model = job.compiled(build=build)
    x, y = data()
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, validation_data=(x[:96], y[:96]), verbose=0)
    ends = {**weights(model), **history(fit), "loss": model.evaluate(x, y, batch_size=BATCH, verbose=0)}
    return {f"ranks {name}": value for name, value in ends.items()}


def predicted_on_one_rank(job: Job) -> Results:
    """Rank 0 alone predicts within an epoch, after steps that have written metrics: nobody waits, nothing changes."""
    model = job.compiled()
    x, y = data()
    seen = []

    def predict(batch: int, logs: Logs) -> None:
        if job.rank == 0 and batch in (1, 4):
            seen.append(model.predict(x[:5], verbose=0))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=predict)
    fit = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    return {**weights(model), **history(fit), "own predictions": np.array(seen)}


def adapted(job: Job) -> Results:
    """Layers that ranks have adapted to different data are told apart by name; adapted to the same they train."""
    words = np.array([["a b"], ["b c"], ["c d"], ["d e"]] * 12, dtype=object)
    numbers = np.linspace(0.0, 1.0, 48, dtype=np.float32)
    text = tf.constant(words)
    y = np.arange(48) % 2

    def layers(part: slice) -> list[Layer]:
        vectors = keras.layers.TextVectorization(output_mode="tf_idf", max_tokens=8, name="words")
        vectors.adapt(text[part])
        scaled = keras.layers.Normalization(axis=None, name="scaled")
        scaled.adapt(numbers[part])
        return [vectors, scaled]

    def fitted(part: slice, which: int) -> Model:
        layer = layers(part)[which]
        kind = {"shape": (1,), "dtype": "string"} if which == 0 else {"shape": (1,)}
        build = lambda: keras.Sequential([keras.Input(**kind), layer, keras.layers.Dense(2)])  # noqa: E731
        model = job.compiled(lambda: keras.optimizers.SGD(0.1), build=build, metrics=[])
        model.fit(text if which == 0 else numbers[:, None], y, batch_size=12, shuffle=False, verbose=0)
        return model

    def counted(kind: type[Layer]) -> None:
        """Adapts to as many of each term on all ranks, but in more texts on one of them."""
        texts = ["a b", "a b", "a c"] if job.rank == 0 else ["a a", "b b", "a c"]
        layer = kind(output_mode="tf_idf", name="counted")
        layer.adapt(tf.constant(texts if kind is keras.layers.TextVectorization else [each.split() for each in texts]))
        build = lambda: keras.Sequential([keras.Input((1,), dtype="string"), layer, keras.layers.Dense(2)])  # noqa: E731
        job.compiled("sgd", build=build, metrics=[]).evaluate(text, y, verbose=0)

    told = []
    for which, name in enumerate(("words", "scaled")):
        if job.strategy is None:
            continue
        try:
            fitted(slice(2 * job.rank, 2 * job.rank + (24 if which else 2)), which)
        except tfps.errors.MismatchError as error:
            told.append(name in str(error) and "adapted to different data" in str(error))
    for kind in (keras.layers.TextVectorization, keras.layers.StringLookup):
        try:
            counted(kind)
        except tfps.errors.MismatchError as error:
            told.append("'counted' has adapted to different data" in str(error))
    assert told == ([True] * 4 if job.strategy else [])
    keras.utils.set_random_seed(1)
    return weights(*(fitted(slice(0, 48), which) for which in range(2)))
