"""Worker: a program of several stages; one rank leaves in one of them (SIGTERM, so no row is lost) and comes back.

staged.py FOLDER KIND     what it ends with goes to FOLDER/<rank>.npz, or plain.npz without pservers

The environment says who leaves and when, and comes back: LEAVES="rank fit epoch batch"; who leaves for good: GOES, the
same way; DIFFERS: what is different on who comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from jobs import poll

import tfps
from tfps.types import Argument, Model

FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]
RANK = os.environ.get("TFPS_RANK", "plain")
LEAVER, FIT, EPOCH, BATCH = map(int, os.environ.get("LEAVES", "9 0 0 0").split())
GOES = tuple(map(int, os.environ.get("GOES", "9 0 0 0").split()))
AGAIN = (FOLDER / "left").exists() and str(LEAVER) == RANK
DIFFERS = os.environ.get("DIFFERS", "") if AGAIN else ""
strategy = tfps.Strategy()
fits = 0


class LeavesAndWaits(keras.callbacks.Callback):
    """The leaver leaves after a step of a fit; the others wait there until it is back."""

    epoch = 0

    def on_train_begin(self, logs: Argument = None) -> None:
        global fits
        fits += 1

    def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        if RANK == "plain" or AGAIN:
            return
        now = int(RANK), fits, self.epoch, batch
        if now == (LEAVER, FIT, EPOCH, BATCH):
            (FOLDER / "left").touch()
        if now in (GOES, (LEAVER, FIT, EPOCH, BATCH)):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_begin(self, batch: int, logs: Argument = None) -> None:
        """The others wait until it is back, once it has ended the steps that they had agreed on."""
        if (fits, self.epoch, batch) == (FIT, EPOCH, BATCH + 4) and RANK not in ("plain", str(LEAVER)):
            joining = strategy._runtime.exchange.joining
            poll(lambda: bool(joining.joiners(fits)) or (FOLDER / "refused").exists())


class Decays(keras.callbacks.Callback):
    """A schedule of the program's own, which changes the learning rate by what it is."""

    def on_epoch_begin(self, epoch: int, logs: Argument = None) -> None:
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate.numpy()) * 0.8


class Counts(keras.callbacks.Callback):
    """Has a state of its own, by which it decides."""

    steps = 0

    def on_train_batch_end(self, batch: int, logs: Argument = None) -> None:
        self.steps += 1
        if self.steps % 5 == 0:
            self.model.optimizer.learning_rate = 0.05 / self.steps

    def get_state(self) -> Argument:
        return {"steps": self.steps}

    def set_state(self, state: Argument) -> None:
        self.steps = state["steps"]


class Distiller(keras.Model):
    """A student whose loss is the distance from its teacher."""

    def __init__(self, student: Model, teacher: Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.student(inputs)

    def train_step(self, data: Argument) -> Argument:
        x, _ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, self.teacher(x), self.student(x))
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


class Two(keras.Model):
    """Two parts that are trained by turns in each step, each by an optimizer of its own, as in a GAN."""

    def __init__(self, first: Model, second: Model) -> None:
        super().__init__()
        self.first, self.second = first, second

    def compile(self, first: Argument, second: Argument) -> None:
        super().compile(loss="mse")
        self.of_first, self.of_second = first, second

    def train_step(self, data: Argument) -> Argument:
        x, y = data
        for part, optimizer in ((self.first, self.of_first), (self.second, self.of_second)):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self.second(self.first(x)))
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def dense(*units: int) -> Model:
    layers = [keras.layers.Dense(each, activation="tanh") for each in units]
    return keras.Sequential([keras.Input((8,)), *layers[:-1], keras.layers.Dense(units[-1])])


def compiled(model: Model, optimizer: Argument = None) -> Model:
    rate = 0.04 if "rate" in DIFFERS else 0.05
    beta = 0.8 if "beta" in DIFFERS else 0.9
    model.compile(optimizer or keras.optimizers.Adam(rate, beta_1=beta), "mse", metrics=["mae"])
    return model


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = x[:, :1] + np.sin(x[:, 1:2])
if "data" in DIFFERS:
    y = y + 1
options: dict[str, Argument] = {"batch_size": 6, "verbose": 0, "shuffle": False, "callbacks": [LeavesAndWaits()]}
found: list[np.ndarray] = []
losses: list[list[float]] = [[]]  # of epochs; in the one in which a rank leaves, what it has counted is missing
with strategy.scope():
    if KIND == "loop":
        model = compiled(dense(16, 1))
        for _ in range(4):
            history = model.fit(x, y, **options)
            losses.append(history.history["loss"])
            found.append(np.array(model.evaluate(x, y, batch_size=24, verbose=0)))
    elif KIND in ("distilled", "labels"):
        teacher = compiled(dense(16, 1))
        teacher.fit(x, y, epochs=3, **options)
        if KIND == "labels":
            model = compiled(dense(4, 1))
            model.fit(x, teacher.predict(x, verbose=0), epochs=3, **options)
        else:
            model = Distiller(dense(4, 1), teacher)
            model.compile(keras.optimizers.SGD(0.05), "mse")
            model.fit(x, y, epochs=3, **options)
    elif KIND == "eager":  # with batches that do not divide, and another iterator
        model = dense(16, 1)
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        model.fit(x, y, epochs=3, **{**options, "batch_size": 7, "validation_data": (x[:10], y[:10])})
    elif KIND == "batches":  # eager steps of its own before
        model = dense(16, 1)
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        for at in range(0, 24, 12):
            part = at + np.arange(12)[strategy.rank :: strategy.num_workers]
            model.train_on_batch(x[part], y[part])
        model.fit(x, y, epochs=3, **options)
    elif KIND == "caught":  # an exception of the program's own, on all ranks
        model = compiled(dense(16, 1))
        fails = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: 1 // 0)
        with contextlib.suppress(ZeroDivisionError):
            model.fit(x, y, **{**options, "callbacks": [*options["callbacks"], fails]})
        model.fit(x, y, epochs=3, **options)
    elif KIND == "head":
        encoder = dense(16, 4)
        whole = compiled(keras.Sequential([encoder, keras.layers.Dense(8)]))
        whole.fit(x, x, epochs=3, **options)
        encoder.trainable = False
        model = compiled(keras.Sequential([encoder, keras.layers.Dense(1)]))
        model.fit(x, y, epochs=3, **options)
    elif KIND == "table":  # with an optimizer of its own, and rows that are loaded before
        ids = np.random.default_rng(1).integers(0, 50, (96, 3))
        table = tfps.layers.Embedding(None, 4, optimizer=keras.optimizers.Adagrad(0.1))
        parts = [keras.Input((3,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        model = compiled(keras.Sequential(parts))
        table.load_rows(np.arange(50), np.random.default_rng(2).normal(size=(50, 4)))
        model.fit(ids, y, epochs=3, **options)
        found.append(table.read_rows(np.arange(50)))
    elif KIND == "two":
        model = Two(dense(6), keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]))
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05, momentum=0.9))
        model.fit(x, y, epochs=3, **options)
    else:
        model = compiled(dense(16, 1))
        callbacks = {"decays": [Decays()], "counts": [Counts()], "here": []}[KIND]
        if RANK == "0":  # one that others have not
            callbacks.append(keras.callbacks.ModelCheckpoint(FOLDER / "model.keras"))
        callbacks.append(keras.callbacks.CSVLogger(FOLDER / f"{RANK}.csv"))
        if "variable" in DIFFERS:
            tf.Variable(1.0, name="another")
        if "assigned" in DIFFERS:
            kernel = model.layers[0].kernel
            change = keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda *_, **__: kernel.assign_add(tf.ones_like(kernel))
            )
            callbacks.append(change)
        if "waits" in DIFFERS:
            lost = partial(poll, lambda: strategy._runtime.exchange.failure is not None)
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: lost()))
        if "reduces" in DIFFERS:
            reduce = partial(strategy.reduce, "SUM", tf.constant([1.0]), axis=None)
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: reduce()))
        fitted = model.fit(x, y, epochs=4, **{**options, "callbacks": [*options["callbacks"], *callbacks]})
        losses.append(fitted.history["loss"])
found += model.get_weights()
np.savez(FOLDER / f"{RANK}.npz", *found, losses=np.concatenate(losses))
strategy.close()
