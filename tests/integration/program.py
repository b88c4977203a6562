"""Worker: runs programs as their users write them, and saves what each of them ends with.

program.py FOLDER MODULE.NAME ...      functions of modules beside this file; without TFPS_PSERVERS they run without a
                                       strategy, as plain Keras

A program takes a Job and returns values by name, which have to be the same on all ranks and, within rounding, in plain
Keras. Names that begin with "own" belong to the rank; with "ranks", they are compared between ranks only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import training

import tfps
from tfps.types import Argument, Callback, Model, Value

DEVICES = [f"CPU:{number}" for number in range(int(os.environ.get("DEVICES", "1")))]
BATCH = 48  # of the whole job
SAMPLES = 6 * BATCH

Results = dict[str, Value]  # what a program ends with, by names


class Job:
    """What a program runs with: its strategy, if any, and folders."""

    def __init__(self, folder: Path) -> None:
        self.strategy = tfps.Strategy(devices=DEVICES) if "TFPS_PSERVERS" in os.environ else None
        self.rank = self.strategy.rank if self.strategy else 0
        self.workers = self.strategy.num_workers if self.strategy else 1
        self.shared = folder  # one for all ranks
        self.own = folder / f"rank{self.rank}"
        self.own.mkdir(parents=True, exist_ok=True)

    def scope(self) -> contextlib.AbstractContextManager[object]:
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    @property
    def tf_strategy(self) -> tf.distribute.Strategy:
        """For programs that are written for tf.distribute."""
        return self.strategy or tf.distribute.get_strategy()

    def compiled(
        self, optimizer: Argument = "adam", *, build: Callable[[], Model] | None = None, **options: Argument
    ) -> Model:
        """A model and what Keras' `fit` needs beside the data."""
        with self.scope():
            model = build() if build else mlp()
            options.setdefault("metrics", ["accuracy"])
            options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            # An optimizer belongs to the scope in which it is created.
            model.compile(optimizer() if callable(optimizer) else optimizer, **options)
        return model


def mlp(units: int = 16, dtype: str | keras.DTypePolicy | None = None) -> Model:
    layers = [keras.layers.Dense(units, activation="tanh", dtype=dtype) for _ in range(2)]
    return keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(10, dtype=dtype)])


def data(samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    return training.digits(samples)


def sharded(dataset: tf.data.Dataset, policy: str = "DATA") -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return dataset.with_options(options)


def weights(*models: Model) -> Results:
    return {
        f"weights/{m}/{w}": weight for m, model in enumerate(models) for w, weight in enumerate(model.get_weights())
    }


def history(*fits: Callback) -> Results:
    return {f"history/{f}/{name}": np.asarray(v) for f, fit in enumerate(fits) for name, v in fit.history.items()}


def main(folder: str, *programs: str) -> None:
    results: dict[str, Value] = {}
    started = time.monotonic()
    for program in programs:
        module, _, name = program.rpartition(".")
        keras.backend.clear_session()
        job = Job(Path(folder) / name)
        keras.utils.set_random_seed(1 + job.rank)  # rank 0's initial values must win, or the ranks differ
        try:
            results[name] = getattr(importlib.import_module(module), name)(job)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        if job.strategy:
            job.strategy.close()
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
    out = Path(folder) / f"results_{os.environ.get('TFPS_RANK', 'plain')}.pickle"
    out.write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration() for _ in DEVICES]
    )
    main(*sys.argv[1:])
