"""Trains the model of a `Work` with Keras: worker.py KIND --work JSON.

Kinds: `tfps` (rows on pservers, as the environment has them), `local` (the same layer without a strategy), `keras`
(keras.layers.Embedding without a strategy, compiled as Keras does it by itself), `keras_plain` (the same without XLA).
It answers lines of its stdin with a line of JSON: `prepare JSON` makes batches of a `Work`, `fit` takes the steps of a
round with them: seconds per step behind the first ones, and how long the graph of a step waited for its rows.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfps
from tfps.embeddings import host, prefetch
from tfps.exchange.interface import Reply
from tfps.types import Argument, Array, Logs, Optimizer, Value
from tools.tables import work as works
from tools.tables.work import Work, say

KINDS = ("tfps", "local", "keras", "keras_plain")
SETTLE_S = 60.0


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """When steps ended, and how long lookups had waited until then."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits
        self.ends: list[float] = []
        self.waited: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.ends.append(time.perf_counter())
        self.waited.append(self._waits.total_s)


class Waits:
    """How long graphs have waited for rows, from when they asked on; those of all lookups are added."""

    def __init__(self) -> None:
        self.total_s = 0.0
        asks: Callable[..., None] = host._Lookups._look_up

        def ask(lookups: Argument, *arguments: Argument) -> None:
            *others, finish = arguments
            since_s = time.perf_counter()

            def done(reply: Reply) -> None:
                self.total_s += time.perf_counter() - since_s
                finish(reply)

            asks(lookups, *others, done)

        host._Lookups._look_up = ask  # type: ignore[assignment,method-assign]


class Asleep(keras.layers.Layer):  # type: ignore[misc]
    """Passes its input on when it has slept."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def call(self, inputs: Value) -> Value:
        def sleep(_: Value) -> None:
            time.sleep(self._seconds)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def passed(values: Value) -> Value:
            with tf.control_dependencies([tf.numpy_function(sleep, [values[0, 0]], [])]):
                return tf.identity(values), lambda upstream: upstream

        return passed(inputs)


def build(kind: str, work: Work) -> keras.Model:
    """A table, and two dense layers on the rows of all features."""
    if kind in ("tfps", "local"):
        table = tfps.layers.Embedding(work.rows if work.bounded else None, work.dim)
    else:
        table = keras.layers.Embedding(work.rows, work.dim)
    asleep = [Asleep(work.sleep_s)] if work.sleep_s else []
    dense = [keras.layers.Dense(works.UNITS, activation="relu"), keras.layers.Dense(1)]
    layers = [table, keras.layers.Flatten(), *asleep, *dense]
    model = keras.Sequential([keras.layers.Input((work.features,), dtype="int64"), *layers])
    model.compile(
        adagrad(),
        keras.losses.BinaryCrossentropy(from_logits=True),
        jit_compile="auto" if kind == "keras" else False,
    )
    return model


def adagrad() -> Optimizer:
    """As peers have it."""
    return keras.optimizers.Adagrad(works.LEARNING_RATE, works.ACCUMULATOR, works.EPSILON)


def _fit(model: keras.Model, x: Array, y: Array, batch: int, warmup: int, waits: Waits) -> dict[str, float]:
    clock = Clock(waits)
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0, callbacks=[clock])
    steps = len(clock.ends) - warmup
    return {
        "step_s": (clock.ends[-1] - clock.ends[warmup - 1]) / steps,
        "wait_s": (clock.waited[-1] - clock.waited[warmup - 1]) / steps,
    }


def main() -> None:
    """The program."""
    parser = works.parser("Trains embeddings with Keras.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--no-prefetch", action="store_true", help="ask for rows when a step begins, not before")
    options = parser.parse_args()
    work, strategy, workers = options.work, None, 1
    if options.no_prefetch:
        nothing = functools.wraps(prefetch.Prefetcher.staged)(lambda ahead, batch: None)
        prefetch.Prefetcher.staged = nothing  # type: ignore[assignment,method-assign]
    waits = Waits()
    if options.kind == "tfps":
        strategy = tfps.Strategy()
        workers = strategy.num_workers
        with strategy.scope():
            model = build(options.kind, work)
    else:
        model = build(options.kind, work)
    x: Array = np.empty(0)
    y: Array = np.empty(0)
    rounds = 0
    for line in sys.stdin:
        what, _, argument = line.strip().partition(" ")
        if what == "prepare":
            given = Work.from_json(argument)
            (x, y), rounds = given.examples(rounds, options.warmup + options.steps, workers), rounds + 1
            say({})
            continue
        found = _fit(model, x, y, work.batch * workers, options.warmup, waits)
        if strategy is not None:
            strategy._runtime.settle(SETTLE_S)
        say(found)


if __name__ == "__main__":
    main()
