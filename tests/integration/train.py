"""Worker: trains the models named on the command line one after the other and saves all weights to a file.

train.py OUT NAME ...      NAME is one of PROGRAMS; without TFPS_PSERVERS it trains without a strategy; with DEVICES in
                           the environment on so many logical CPU devices, whose replicas must end bitwise equal;
                           with OP_DETERMINISM TensorFlow's ops are deterministic
"""

from __future__ import annotations

import contextlib
import os
import sys

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.keras_hooks.variables import RemoteVariable

STEPS, GLOBAL_BATCH = 50, 48


def data() -> tf.data.Dataset:
    images, labels = training.digits(GLOBAL_BATCH * STEPS // 2)
    images += 0.1  # Adafactor divides by zero where a gradient is 0 for good: no empty pixels, no dead units
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(GLOBAL_BATCH, drop_remainder=True).repeat(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def embedding() -> keras.Model:
    layers = [keras.layers.Embedding(17, 4), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.layers.Input((64,)), keras.layers.Rescaling(16.0, -1.0), *layers])


def smooth() -> keras.Model:
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.layers.Input((64,)), *layers])


PROGRAMS = {
    "adam": (lambda: training.mlp()[0], lambda: keras.optimizers.Adam(1e-3)),
    "wide": (lambda: training.mlp(256)[0], lambda: keras.optimizers.Adam(1e-3)),
    "adafactor": (smooth, lambda: keras.optimizers.Adafactor(1e-3)),
    "embedding": (embedding, lambda: keras.optimizers.Adam(1e-3)),
    "embedding_sgd": (embedding, lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
}


def main(out: str, *names: str) -> None:
    results = {}
    distributed = "TFPS_PSERVERS" in os.environ
    if "OP_DETERMINISM" in os.environ:
        keras.utils.set_random_seed(1)
        tf.config.experimental.enable_op_determinism()
    devices = [f"CPU:{each}" for each in range(int(os.environ.get("DEVICES", "1")))]
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * len(devices))
    for name in names:
        build, optimizer = PROGRAMS[name]
        strategy = tfps.Strategy(devices=devices) if distributed else None
        if strategy:
            assert training.is_chief(strategy) == (strategy.rank == 0)
        # Ranks start from different values: rank 0's must win, or the weights cannot be equal.
        keras.utils.set_random_seed(1 + (strategy.rank if strategy else 0))
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = build()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer(), loss, metrics=["accuracy"])
        callbacks = [tfps.callbacks.Metrics(f"{out}.logs")] if strategy else []
        history = model.fit(data(), epochs=1, verbose=0, callbacks=callbacks).history
        for index, weight in enumerate(model.get_weights()):
            results[f"{name}/{index}"] = weight
        for key, value in history.items():
            results[f"{name}/history/{key}"] = np.asarray(value)
        if strategy:
            here = [each for each in model.optimizer.variables if not isinstance(each, RemoteVariable)]
            for variable in [*model.weights, *here]:
                replicas = [np.asarray(each).tobytes() for each in strategy.experimental_local_results(variable.value)]
                assert len(replicas) == len(devices)
                assert len(set(replicas)) == 1, f"{variable.path}: the replicas differ"
            strategy.close()
    np.savez(out, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
