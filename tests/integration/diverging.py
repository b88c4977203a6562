"""Worker: trains in one job after the other, in each of which rank 1 does something that the others do not.

diverging.py RANK WORKERS DEVICES NAME:PORT ...     names of CASES, for each a pserver on this host

It prints what became of each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.types import Argument, Logs

EVERY = 2
WHEN = 3  # batches before it happens
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Once(keras.callbacks.Callback):
    """Does something after some batches, on rank 1 only."""

    def __init__(self, act: Callable[[keras.Model], object], rank: int) -> None:
        super().__init__()
        self._act, self._rank = act, rank

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if batch == WHEN and self._rank == 1:
            self._act(self.model)


def fitted(act: Callable[[keras.Model], object], optimizer: str = "Adam", **options: Argument) -> Callable[..., None]:
    """A case: `fit`, in the course of which rank 1 does `act`."""

    def case(strategy: tfps.Strategy) -> None:
        compile_options = {key: options.pop(key) for key in ("run_eagerly", "steps_per_execution") if key in options}
        with strategy.scope():
            model, inputs, targets = training.mlp()
            model.compile(getattr(keras.optimizers, optimizer)(0.01, **options), LOSS, **compile_options)
        model.fit(inputs, targets, batch_size=16, epochs=2, verbose=0, callbacks=[Once(act, strategy.rank)])

    return case


def set_weights(model: keras.Model) -> None:
    model.set_weights([weight + np.float32(1e-3) for weight in model.get_weights()])


def permute(model: keras.Model) -> None:
    kernel = model.trainable_variables[0]
    kernel.assign(kernel.numpy()[::-1])


def load_weights(model: keras.Model) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "own.weights.h5")
        before = model.get_weights()
        model.set_weights([2 * weight for weight in before])
        model.save_weights(path)
        model.set_weights(before)
        model.load_weights(path)


def learning_rate(model: keras.Model) -> None:
    model.optimizer.learning_rate = 0.005


def iterations(model: keras.Model) -> None:
    model.optimizer.iterations.assign(1000)


def _loop(strategy: tfps.Strategy, eager: bool) -> None:
    """A loop of one's own with two models in turns (GAN); the second one's learning rate changes on rank 1."""
    with strategy.scope():
        models = [training.mlp()[0] for _ in range(2)]
        optimizers = [keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01)]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.build(model.trainable_variables)
    inputs, targets = training.digits(32)

    def train() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                losses = LOSS(targets, model(inputs, training=True))
            gradients = tape.gradient(losses, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def step_of_all() -> None:
        strategy.run(train)

    run = step_of_all if eager else tf.function(step_of_all)
    for step in range(20):
        if step == WHEN and strategy.rank == 1:
            optimizers[1].learning_rate = 0.005
        run()


def unnoticed(strategy: tfps.Strategy) -> None:
    """What may differ between ranks: moving statistics, metrics, dropout, a frozen layer's call, own accumulators."""
    with strategy.scope():
        layers = [
            keras.layers.Input((64,)),
            keras.layers.Dense(16, trainable=False),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=strategy.rank),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3)
        )
        model.compile(scaled, LOSS, metrics=["accuracy"])
    model.fit(*training.digits(), batch_size=16, epochs=2, verbose=0)
    with strategy.scope():
        words, inputs, targets = training.embedding_sparse()
        words.compile(keras.optimizers.Adam(0.01), LOSS)
    words.fit(inputs, targets, batch_size=16, epochs=1, verbose=0)
    words.set_weights([2 * weight for weight in words.get_weights()])  # on all ranks
    words.fit(inputs, targets, batch_size=16, epochs=1, verbose=0)


CASES: dict[str, Callable[[tfps.Strategy], None]] = {
    "set_weights": fitted(set_weights),
    "permuted": fitted(permute, "SGD"),
    "load_weights": fitted(load_weights),
    "learning_rate": fitted(learning_rate, "SGD"),
    "several_steps": fitted(learning_rate, steps_per_execution=2),
    "iterations": fitted(iterations),
    "accumulating": fitted(learning_rate, gradient_accumulation_steps=2),
    "eager": fitted(learning_rate, run_eagerly=True),
    "eager_weights": fitted(set_weights, run_eagerly=True),
    "loop": lambda strategy: _loop(strategy, eager=False),
    "loop_eager": lambda strategy: _loop(strategy, eager=True),
    "unnoticed": unnoticed,
}


def main(rank: str, workers: str, devices: str, *cases: str) -> None:
    os.environ["TFPS_RANK"], os.environ["TFPS_WORKERS"] = rank, workers
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * int(devices))
    for name, port in (each.split(":") for each in cases):
        keras.utils.set_random_seed(1)
        config = tfps.Config(check_every=EVERY, slice_bytes=4096, window_bytes=8192)
        local = [f"CPU:{device}" for device in range(int(devices))]
        strategy = tfps.Strategy([f"127.0.0.1:{port}"], config=config, devices=local)
        try:
            CASES[name](strategy)
            end = "trained"
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        failure = strategy._runtime.exchange.failure
        print(f"{name}, {type(failure).__name__}: {end}".replace("\n", " "), flush=True)
        strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
