"""Twenty small Keras 3 programs, as their authors would write them: only the strategy is not theirs.

Each trains for a few steps on made-up data and returns what has to be the same with and without a strategy. Global
batches are the same everywhere, so the results of synchronous training must be those of one process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfps.types import Logs, Structure, Value
from tools.strategies.job import (
    BATCH,
    CLASSES,
    EPOCHS,
    EXAMPLES,
    FEATURES,
    Job,
    Results,
    batches,
    compiled,
    crossentropy,
    dataset,
    examples,
    fitted,
    held_out,
    mlp,
    momentum,
    results,
)


def fit(job: Job) -> Results:
    return fitted(compiled(job))


def evaluate(job: Job) -> Results:
    model = compiled(job)
    found = fitted(model, validation_data=held_out())
    after = model.evaluate(held_out(), verbose=0, return_dict=True)
    return {**found, **{f"evaluated {key}": np.asarray(value) for key, value in after.items()}}


def predict(job: Job) -> Results:
    model = compiled(job)
    found = fitted(model)
    predictions = model.predict(dataset(examples(2)[0]), verbose=0)
    return {**found, "predictions": np.asarray(predictions)}


class InHalves(keras.layers.BatchNormalization):
    """What two workers compute, in one process: each half of a batch is normalized by itself."""

    def call(self, inputs: Structure, training: bool | None = None) -> Value:
        if not training:
            return super().call(inputs, training=training)
        halves = keras.ops.split(inputs, 2)
        moments = [keras.ops.moments(half, axes=[0]) for half in halves]
        for moving, values in (
            (self.moving_mean, [mean for mean, _ in moments]),
            (self.moving_variance, [variance for _, variance in moments]),
        ):
            moving.assign(moving * self.momentum + sum(values) / 2 * (1 - self.momentum))
        normalized = [
            (half - mean) / keras.ops.sqrt(variance + self.epsilon) * self.gamma + self.beta
            for half, (mean, variance) in zip(halves, moments, strict=True)
        ]
        return keras.ops.concatenate(normalized)


def batch_normalization(job: Job) -> Results:
    layer = keras.layers.BatchNormalization if job.strategy is not None else InHalves
    return fitted(compiled(job, lambda: mlp(layer())))


def dropout(job: Job) -> Results:
    found = fitted(compiled(job, lambda: mlp(keras.layers.Dropout(0.3, seed=1))), epochs=4)
    if not found["loss"][-1] < found["loss"][0]:
        raise ValueError(f"the loss must fall, got {found['loss']}")
    return found


def embedding(job: Job) -> Results:
    """Its gradient is sparse (IndexedSlices)."""
    words = np.random.default_rng(0).integers(0, 50, (EXAMPLES, 6))

    def build() -> keras.Model:
        layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.layers.Input((6,), dtype="int32"), *layers])

    model = compiled(job, build, lambda: keras.optimizers.Adam(1e-2))
    history = model.fit(dataset(words, words.sum(1) % CLASSES), epochs=EPOCHS, verbose=0).history
    return results(model, history)


def gradient_accumulation(job: Job) -> Results:
    return fitted(compiled(job, optimizer=lambda: momentum(gradient_accumulation_steps=2)))


def mixed(job: Job, policy: str) -> Results:
    keras.mixed_precision.set_global_policy(policy)
    try:
        return fitted(compiled(job))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def mixed_float16(job: Job) -> Results:
    return mixed(job, "mixed_float16")


def mixed_bfloat16(job: Job) -> Results:
    return mixed(job, "mixed_bfloat16")


def clipping(job: Job) -> Results:
    found = {}
    for name in ("clipnorm", "global_clipnorm"):
        model = compiled(job, optimizer=functools.partial(momentum, **{name: 0.1}))
        found.update({f"{name}: {key}": value for key, value in fitted(model).items()})
    return found


def moving_average(job: Job) -> Results:
    def optimizer() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4)

    return fitted(compiled(job, optimizer=optimizer))


def steps_per_execution(job: Job) -> Results:
    return fitted(compiled(job, steps_per_execution=4))


def class_weight(job: Job) -> Results:
    return fitted(compiled(job), class_weight={0: 3.0, 1: 0.5, 2: 1.0, 3: 1.0, 4: 2.0})


class Penalized(keras.Model):
    """Adds a penalty on the outputs, in a `train_step` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp()

    def call(self, inputs: Structure, training: bool | None = None) -> Value:
        return self.network(inputs, training=training)

    def train_step(self, data: Structure) -> Logs:
        inputs, targets = data
        with tf.GradientTape() as tape:
            outputs = self(inputs, training=True)
            loss = self.compute_loss(y=targets, y_pred=outputs)
            loss += 1e-3 * tf.reduce_sum(tf.square(outputs)) / BATCH
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(inputs, targets, outputs)


def train_step(job: Job) -> Results:
    def build() -> keras.Model:
        model = Penalized()
        model.build((None, FEATURES))
        return model

    return fitted(compiled(job, build))


def custom_loop(job: Job) -> Results:
    with job.scope():
        model, optimizer = mlp(), keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
    loss_of = crossentropy(reduction=None)

    def step(batch: Structure) -> None:
        inputs, targets = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(targets, model(inputs, training=True))) / BATCH
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    job.train(step)
    return results(model)


class Gan(keras.Model):
    """A generator and a discriminator, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.layers.Input((4,)), dense(16, activation="tanh"), dense(FEATURES)])
        self.discriminator = keras.Sequential([keras.layers.Input((FEATURES,)), dense(16, activation="tanh"), dense(1)])
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)
        self.mean_score = keras.metrics.Mean(name="score")

    def compile(self, generators: keras.optimizers.Optimizer, discriminators: keras.optimizers.Optimizer) -> None:
        super().compile(jit_compile=False)
        self.generators, self.discriminators = generators, discriminators

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.mean_score]

    def call(self, samples: Value) -> Value:
        """Keras asks for it: under any strategy it builds a model by a call before it trains."""
        return self.discriminator(samples)

    def judged(self, samples: Value, real: bool) -> Value:
        judgement = self.discriminator(samples, training=True)
        wanted = tf.ones_like(judgement) if real else tf.zeros_like(judgement)
        return tf.reduce_sum(self.loss_of(wanted, judgement)) / BATCH

    def train_step(self, data: Structure) -> Logs:
        real, noise = data
        with tf.GradientTape() as tape:
            loss = self.judged(real, True) + self.judged(self.generator(noise), False)
        variables = self.discriminator.trainable_variables
        self.discriminators.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = self.judged(self.generator(noise, training=True), True)
        variables = self.generator.trainable_variables
        self.generators.apply(tape.gradient(loss, variables), variables)
        self.mean_score.update_state(self.discriminator(real))
        return {"score": self.mean_score.result()}


def gan(job: Job) -> Results:
    with job.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
    noise = np.random.default_rng(3).normal(size=(EXAMPLES, 4)).astype("float32")
    history = model.fit(dataset(examples()[0], noise), epochs=EPOCHS, verbose=0).history
    return results(model, history)


def model_checkpoint(job: Job) -> Results:
    """The best weights are written while training, and loaded after it."""
    path = job.folder / "best.weights.h5"
    callback = keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True, save_weights_only=True)
    model = compiled(job)
    found = fitted(model, epochs=3, validation_data=held_out(), callbacks=[callback])
    model.load_weights(path)
    return {**found, **{f"loaded {key}": value for key, value in results(model).items()}}


class Stop(keras.callbacks.Callback):
    """Interrupts training in the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if epoch == 1:
            raise KeyboardInterrupt


def backup_and_restore(job: Job) -> Results:
    """Training is interrupted after the first epoch, and goes on with a new model."""
    model = compiled(job)
    backup = keras.callbacks.BackupAndRestore(job.folder / "backup")
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(batches(), epochs=3, verbose=0, callbacks=[backup, Stop()])
    model = compiled(job)
    backup = keras.callbacks.BackupAndRestore(job.folder / "backup")
    found = fitted(model, epochs=3, callbacks=[backup])
    if len(found["loss"]) != 2:
        raise ValueError(f"the second fit must begin at the second epoch of 3, trained {len(found['loss'])}")
    return found


def early_stopping(job: Job) -> Results:
    """Stops after a few of many epochs, and brings the best weights back."""
    callback = keras.callbacks.EarlyStopping("val_accuracy", patience=1, restore_best_weights=True)
    model = compiled(job, optimizer=lambda: keras.optimizers.SGD(0.3))
    found = fitted(model, epochs=30, validation_data=held_out(), callbacks=[callback])
    if not 2 <= len(found["loss"]) < 30:
        raise ValueError(f"training must stop early, ended after {len(found['loss'])} epochs")
    return found


def save_and_load(job: Job) -> Results:
    """A saved model with its optimizer goes on training."""
    path = job.folder / f"model-{job.rank}.keras"
    model = compiled(job)
    fitted(model)
    model.save(path)
    with job.scope():
        loaded = keras.models.load_model(path)
    return fitted(loaded)


@dataclass(frozen=True)
class Program:
    """
    Args:
        what: for the table.
        tolerance: of the results, of the largest item of each.
        compared: with one process; False where each worker draws random numbers of its own.
    """

    what: str
    run: Callable[[Job], Results]
    tolerance: float = 1e-4
    compared: bool = True


# Half precision rounds each worker's gradients: results agree as well as its 11 and 8 bits allow.
PROGRAMS = {
    "fit": Program("`fit`", fit),
    "evaluate": Program("`validation_data`, `evaluate`", evaluate),
    "predict": Program("`predict`", predict),
    "batch_normalization": Program("BatchNormalization", batch_normalization),
    "dropout": Program("Dropout", dropout, compared=False),
    "embedding": Program("Embedding (sparse gradient)", embedding),
    "gradient_accumulation": Program("`gradient_accumulation_steps`", gradient_accumulation),
    "mixed_float16": Program("`mixed_float16`, loss scaling", mixed_float16, tolerance=5e-3),
    "mixed_bfloat16": Program("`mixed_bfloat16`", mixed_bfloat16, tolerance=4e-2),
    "clipping": Program("`clipnorm`, `global_clipnorm`", clipping),
    "moving_average": Program("`use_ema`", moving_average),
    "steps_per_execution": Program("`steps_per_execution`", steps_per_execution),
    "class_weight": Program("`class_weight`", class_weight),
    "train_step": Program("custom `train_step`", train_step),
    "custom_loop": Program("custom training loop", custom_loop),
    "gan": Program("GAN with two optimizers", gan),
    "model_checkpoint": Program("ModelCheckpoint", model_checkpoint),
    "backup_and_restore": Program("BackupAndRestore", backup_and_restore),
    "early_stopping": Program("EarlyStopping", early_stopping),
    "save_and_load": Program("`save`, `load_model`", save_and_load),
}
