"""Step time under `tfps.Strategy()` (embedded, no wire) relative to plain Keras, in one process, interleaved.

Also with a capture being recorded, relative to the same program without (`..._recording_ratio`).

`small`: 160 small variables, where what each variable and bucket costs is all there is; `resnet50`: ResNet-50 on
    96x96 images, batch 8.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tfps
from tfps.types import Array, Json
from tools.benchmarks import common

SMALL_LAYERS = 80  # two variables each


def small() -> tuple[keras.Model, Array, Array, int]:
    """80 dense layers of 16 units."""
    layers = [keras.layers.Dense(16, activation="tanh") for _ in range(SMALL_LAYERS)]
    return keras.Sequential([keras.layers.Input((16,)), *layers]), *_examples((8, 16), (8, 16)), 50


def resnet50() -> tuple[keras.Model, Array, Array, int]:
    """ResNet-50 without the pretrained weights."""
    model = keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3), classes=10)
    return model, *_examples((8, 96, 96, 3), (8, 10)), 8


def _examples(*shapes: tuple[int, ...]) -> list[Array]:
    """Noise: with zeros, gradients vanish, and what a step costs is that of another model."""
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype("float32") for shape in shapes]


class Clock(keras.callbacks.Callback):
    """What the steps of a `fit` took, from the first's begin until the last's updates are there.

    Not the whole `fit`: when it drops its dataset, tf.data may wait more than a second for its own tuning thread.
    """

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not batch:
            self.began_s, self.began_cpu_s = time.perf_counter(), _cpu()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        weights = self.model.trainable_weights
        for weight in (weights[-1], weights[0]):
            weight.numpy()  # the last updates may still be under way
        self.step_s = (time.perf_counter() - self.began_s) / self.params["steps"]
        self.cpu_s = (_cpu() - self.began_cpu_s) / self.params["steps"]


class Subject:
    """A compiled model that can run some steps and say what they cost."""

    def __init__(
        self, build: Callable[[], tuple[keras.Model, Array, Array, int]], strategy: tfps.Strategy | None
    ) -> None:
        self.strategy = strategy
        with strategy.scope() if strategy else contextlib.nullcontext():
            self.model, x, y, self.steps = build()
            self.model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=False)
        self.x, self.y = np.repeat(x, self.steps, 0), np.repeat(y, self.steps, 0)
        self.batch = len(x)
        self.run()

    def run(self, recorded: bool = False) -> dict[str, float]:
        """Seconds and CPU seconds per step, updates included."""
        if recorded and self.strategy:
            self.strategy._runtime.recorder.start()
        clock = Clock()
        self.model.fit(self.x, self.y, batch_size=self.batch, shuffle=False, verbose=0, callbacks=[clock])
        if recorded and self.strategy:
            self.strategy._runtime.recorder.stop()
        return {"step_s": clock.step_s, "cpu_s": clock.cpu_s}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run(quick: bool) -> common.Outcome:
    """Interleaves plain Keras and tfps; ratios are medians over pairs."""
    headline: dict[str, float] = {}
    runs: list[dict[str, Json]] = []
    for build, pairs in ((small, 10 if quick else 30), (resnet50, 8 if quick else 24)):
        strategy = tfps.Strategy()
        subjects = {"plain": Subject(build, None), "tfps": Subject(build, strategy)}
        of_model: list[dict[str, Json]] = []
        for number in range(pairs):
            pair = {name: subject.run() for name, subject in subjects.items()}
            # In turns, and not right behind plain Keras, which has filled the caches with its own.
            for recorded in (True, False) if number % 2 else (False, True):
                pair["recorded" if recorded else "unrecorded"] = subjects["tfps"].run(recorded=recorded)
            of_model.append(
                {
                    "model": build.__name__,
                    **{f"{name}_{key}": value for name, figures in pair.items() for key, value in figures.items()},
                    "ratio": pair["tfps"]["step_s"] / pair["plain"]["step_s"],
                    "cpu_ratio": pair["tfps"]["cpu_s"] / pair["plain"]["cpu_s"],
                    "recording_ratio": pair["recorded"]["step_s"] / pair["unrecorded"]["step_s"],
                    "recording_cpu_ratio": pair["recorded"]["cpu_s"] / pair["unrecorded"]["cpu_s"],
                    "extra_cpu_s": pair["tfps"]["cpu_s"] - pair["plain"]["cpu_s"],
                }
            )
        updates = strategy._runtime.update_buckets()
        variables = len(subjects["tfps"].model.trainable_variables)
        extra = common.median(of_model, "extra_cpu_s") * 1e3
        headline |= {
            f"{build.__name__}_ratio": common.median(of_model, "ratio"),
            f"{build.__name__}_cpu_ratio": common.median(of_model, "cpu_ratio"),
            f"{build.__name__}_recording_ratio": common.median(of_model, "recording_ratio"),
            f"{build.__name__}_recording_cpu_ratio": common.median(of_model, "recording_cpu_ratio"),
            f"{build.__name__}_plain_ms": common.median(of_model, "plain_step_s") * 1e3,
            f"{build.__name__}_tfps_ms": common.median(of_model, "tfps_step_s") * 1e3,
            f"{build.__name__}_variables": variables,
            f"{build.__name__}_buckets": updates,
            f"{build.__name__}_cpu_ms_per_variable": extra / variables,
            f"{build.__name__}_cpu_ms_per_bucket": extra / updates,
        }
        print(
            f"{build.__name__}: "
            + " ".join(f"{k}={v:.4g}" for k, v in headline.items() if k.startswith(build.__name__)),
            flush=True,
        )
        runs += of_model
        strategy.close()
    return common.Outcome(headline, runs)
