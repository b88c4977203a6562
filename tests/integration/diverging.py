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


def slot(model: keras.Model) -> None:
    momentum = model.optimizer.variables[-1]
    momentum.assign(momentum + 1)


def frozen(model: keras.Model) -> None:
    model.layers[0].set_weights([2 * weight for weight in model.layers[0].get_weights()])


def draw(model: keras.Model) -> None:
    model.layers[-1].seed_generator.next()


def _finetuned(act: Callable[[keras.Model], object]) -> Callable[..., None]:
    """A case with a frozen layer, a statistic and a seed generator."""

    def case(strategy: tfps.Strategy) -> None:
        with strategy.scope():
            layers = [
                keras.layers.Dense(16, trainable=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(10),
                keras.layers.Dropout(0.1),
            ]
            model = keras.Sequential([keras.layers.Input((64,)), *layers])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), LOSS)
        model.fit(*training.digits(), batch_size=16, epochs=2, verbose=0, callbacks=[Once(act, strategy.rank)])

    return case


def evaluated(strategy: tfps.Strategy) -> None:
    """Rank 1 alone loads weights between training and evaluation."""
    with strategy.scope():
        model, inputs, targets = training.mlp()
        model.compile("sgd", LOSS)
    model.fit(inputs, targets, batch_size=16, verbose=0)
    if strategy.rank == 1:
        set_weights(model)
    model.evaluate(inputs, targets, verbose=0)


def closed(strategy: tfps.Strategy) -> None:
    """A loop of one's own, at the end of which the ranks do not meet."""
    _loop(strategy, eager=False)
    strategy.close()


def alone(strategy: tfps.Strategy) -> None:
    """Rank 0 alone loads other weights once training is over, and predicts: nothing that others depend on."""
    with strategy.scope():
        model, inputs, targets = training.mlp()
        model.compile("sgd", LOSS, metrics=["accuracy"])
    model.fit(inputs, targets, batch_size=16, epochs=2, verbose=0, validation_data=(inputs, targets))
    if strategy.rank == 0:
        set_weights(model)
        model.predict(inputs, verbose=0)
    strategy.close()


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


def _without_run(strategy: tfps.Strategy, seed: int, batches: int) -> None:
    """A loop of one's own without `strategy.run`."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model, inputs, targets = training.mlp()
        optimizer = keras.optimizers.SGD(0.01)
    for _ in range(batches):
        with tf.GradientTape() as tape:
            losses = LOSS(targets, model(inputs, training=True))
        optimizer.apply(tape.gradient(losses, model.trainable_variables), model.trainable_variables)


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
    "other seed": lambda strategy: _without_run(strategy, seed=strategy.rank, batches=9),
    "fewer batches": lambda strategy: _without_run(strategy, seed=1, batches=3 + strategy.rank),
    "unnoticed": unnoticed,
    # Too late for what is compared every 100 steps.
    "late set_weights": fitted(set_weights),
    "late learning_rate": fitted(learning_rate, "SGD"),
    "late slot": _finetuned(slot),
    "late frozen": _finetuned(frozen),
    "late draw": _finetuned(draw),
    "late evaluated": evaluated,
    "late closed": closed,
    "late alone": alone,
}


def main(rank: str, workers: str, devices: str, *cases: str) -> None:
    os.environ["TFPS_RANK"], os.environ["TFPS_WORKERS"] = rank, workers
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * int(devices))
    for name, port in (each.split(":") for each in cases):
        keras.utils.set_random_seed(1)
        config = tfps.Config(check_every=100 if name.startswith("late") else EVERY, slice_bytes=4096, window_bytes=8192)
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
