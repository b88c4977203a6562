"""Captures in local modes: every inner step is a step, and shows what it waits for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from jobs import Cluster
from recorded import captured

import tfps
from tests.runtime.test_trace_run import by_kind
from tfps.types import Argument, Array, Value

INNER_STEPS, STEPS = 3, 10


class Signals(keras.layers.Layer):
    """Calls `reached` when the forward pass comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = lambda: None

    def call(self, inputs: Value) -> Value:
        def reached(values: Array) -> Array:
            self.reached()
            return values

        @tf.custom_gradient
        def same(values: Value) -> Value:
            return tf.ensure_shape(
                tf.numpy_function(reached, [values], tf.float32, stateful=False), values.shape
            ), lambda up: up

        return same(inputs)


def fit(strategy: tfps.Strategy, signals: Signals, callback: keras.callbacks.Callback | None = None) -> None:
    with strategy.scope():
        layers = [signals, keras.layers.Dense(8), keras.layers.Dense(4)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8 * STEPS, 4), np.float32)
    model.fit(x, x, batch_size=8, shuffle=False, verbose=0, callbacks=[callback] if callback else None)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "overlap_steps": 1}])
def test_each_inner_step_is_recorded_under_its_number(
    settings: dict[str, Argument], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFPS_TRACE", f"{tmp_path}:2-7")
    strategy = tfps.Strategy(config=tfps.Config(mode="diloco", inner_steps=INNER_STEPS, **settings))
    fit(strategy, Signals())
    strategy.close()
    capture = captured(tmp_path)
    assert capture.steps == (2, 3, 4, 5, 6, 7)
    for step in capture.steps:
        kinds = by_kind(capture, step)
        (one,), (forward,), (backward,) = kinds["step"], kinds["forward"], kinds["backward"]
        assert one.begin_ns <= forward.begin_ns <= forward.end_ns == backward.begin_ns <= backward.end_ns == one.end_ns


def test_the_step_after_an_exchange_shows_how_long_it_waits(tmp_path: Path) -> None:
    with Cluster() as cluster:
        server = cluster.pserver(1)
        config = tfps.Config(mode="diloco", inner_steps=INNER_STEPS)
        strategy = tfps.Strategy([server.address], config=config)
        signals, reached = Signals(), threading.Event()

        def release(held: threading.Condition) -> None:
            reached.wait(jobs.DEADLINE_S)
            threading.Event().wait(2.0)  # the forward pass stands in front of the first Dense, also if busy
            held.release()

        class HoldsTheReply(keras.callbacks.Callback):
            """Of the exchange after step 6, until the next step wants what it brings."""

            def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
                if batch == 5:
                    strategy._runtime.settle(jobs.DEADLINE_S)
                    held = server._job._state.queues[0]._changed
                    taken = threading.Event()
                    threading.Thread(target=self._hold, args=(held, taken), daemon=True).start()
                    taken.wait(jobs.DEADLINE_S)
                if batch == 6:
                    signals.reached = reached.set

            @staticmethod
            def _hold(held: threading.Condition, taken: threading.Event) -> None:
                held.acquire()
                taken.set()
                release(held)

        with strategy.trace(tmp_path):
            fit(strategy, signals, HoldsTheReply())
        strategy.close()
    capture = captured(tmp_path)
    waited = [span for span in by_kind(capture)["gate"] if span.end_ns - span.begin_ns > 1_000_000_000]
    (step,) = by_kind(capture, 7)["step"]
    assert waited
    assert all(step.begin_ns <= span.begin_ns <= span.end_ns <= step.end_ns for span in waited)
