"""Step time with input batches staged ahead (`staging_depth=2`) and without (0), in one process, interleaved.

Input is a generator that sleeps for each batch, computation a layer that sleeps; a model that is bound by its input,
one bound by computation, and one where both take equally long. The pipeline has no prefetch of its own, and
TensorFlow's option to inject one is off: where it does, the host's part of the sum is hidden without staging, too.
`over_max` is the step over the longer of the two as they were measured (sleeping takes longer than asked for on a busy
machine), `over_sum` over both together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.types import Array, Json, Logs, Structure, Value
from tools.benchmarks.common import Outcome, median

CASES = {"input": (0.2, 0.1), "balanced": (0.15, 0.15), "compute": (0.1, 0.2)}  # seconds: input, computation
DEPTHS = (0, 2)
WARMUP_STEPS, STEPS = 4, 16
SHAPE = (32, 16)


class Clock(keras.callbacks.Callback):
    """When each step ended."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.ends.append(time.perf_counter())


class Sleeper:
    """Sleeps, and knows how long it took each time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.took: list[float] = []

    def sleep(self) -> None:
        since = time.perf_counter()
        time.sleep(self.seconds)
        self.took.append(time.perf_counter() - since)


class Sleeping(keras.layers.Layer):
    """Passes its input on when `sleeper` has slept."""

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self._sleeper = sleeper

    def call(self, inputs: Structure) -> Value:
        def sleep(values: Structure) -> Value:
            self._sleeper.sleep()
            return values

        outputs = tf.numpy_function(sleep, [inputs], tf.float32)
        outputs.set_shape(inputs.shape)
        return tf.stop_gradient(outputs)


class Subject:
    """A model under a strategy with one depth."""

    def __init__(self, depth: int, input_s: float, compute_s: float) -> None:
        self.strategy = tfps.Strategy(config=tfps.Config(staging_depth=depth))
        self.input, self.compute = Sleeper(input_s), Sleeper(compute_s)
        with self.strategy.scope():
            layers = [Sleeping(self.compute), keras.layers.Dense(1)]
            self.model = keras.Sequential([keras.layers.Input(SHAPE[1:]), *layers])
            self.model.compile("sgd", "mse", jit_compile=False)
        self.data = tf.data.Dataset.from_generator(
            self._batches, output_signature=(tf.TensorSpec(SHAPE), tf.TensorSpec([SHAPE[0], 1]))
        )
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        self.data = self.data.with_options(options)

    def _batches(self) -> Iterator[tuple[Array, Array]]:
        while True:
            self.input.sleep()
            yield np.zeros(SHAPE, np.float32), np.zeros([SHAPE[0], 1], np.float32)

    def run(self, steps: int) -> dict[str, float]:
        """Seconds per step, and what input and computation took."""
        clock = Clock()
        self.input.took, self.compute.took = [], []
        self.model.fit(self.data, steps_per_epoch=WARMUP_STEPS + steps, callbacks=[clock], verbose=0)
        figures = {
            "step_s": (clock.ends[-1] - clock.ends[WARMUP_STEPS - 1]) / steps,
            "input_s": float(np.mean(self.input.took[WARMUP_STEPS:])),
            "compute_s": float(np.mean(self.compute.took[WARMUP_STEPS:])),
        }
        longest, both = max(figures["input_s"], figures["compute_s"]), figures["input_s"] + figures["compute_s"]
        return {**figures, "over_max": figures["step_s"] / longest, "over_sum": figures["step_s"] / both}


def run(quick: bool) -> Outcome:
    """Depths alternate; figures are medians over rounds."""
    headline: dict[str, float] = {}
    runs: list[dict[str, Json]] = []
    for case, (input_s, compute_s) in CASES.items():
        subjects = {depth: Subject(depth, input_s, compute_s) for depth in DEPTHS}
        for number in range(-1, 3 if quick else 9):  # the first round traces
            for depth, subject in subjects.items():
                found = subject.run(1 if number < 0 else STEPS)
                if number >= 0:
                    runs.append({"case": case, "depth": depth, "round": number, **found})
        for depth, subject in subjects.items():
            same = [each for each in runs if (each["case"], each["depth"]) == (case, depth)]
            headline |= {
                f"{case}_{depth}_ms": median(same, "step_s") * 1e3,
                f"{case}_{depth}_over_max": median(same, "over_max"),
                f"{case}_{depth}_over_sum": median(same, "over_sum"),
            }
            subject.strategy.close()
        print(" ".join(f"{k}={v:.4g}" for k, v in headline.items() if k.startswith(case)), flush=True)
    return Outcome(headline, runs)
