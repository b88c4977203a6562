"""Tracebacks have the program's frames and not those of tfps, whatever fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps import errors
from tfps.types import Value

OWN = str(Path(tfps.__file__).parent)


class Broken(keras.layers.Layer):
    def call(self, inputs: Value) -> Value:
        return tf.reshape(inputs, (3, 5, 7))


class Checked(keras.layers.Layer):
    def call(self, inputs: Value) -> Value:
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_sum(inputs) < 0, ["too much"])]):
            return tf.identity(inputs)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        raise LookupError("the program's own")


class OwnStep(keras.Sequential):
    def train_step(self, data: object) -> Value:
        raise LookupError("the program's own")


def fit(
    strategy: tfps.Strategy,
    *layers: keras.layers.Layer,
    kind: type[keras.Sequential] = keras.Sequential,
    path: str = "",
    callbacks: tuple[keras.callbacks.Callback, ...] = (),
) -> None:
    x = np.ones((4, 2), "float32")
    with strategy.scope():
        model = kind([keras.Input((2,)), *layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, x[:, :1], verbose=0, callbacks=list(callbacks))
    model.save(path)


def loop(strategy: tfps.Strategy) -> None:
    numbers: dict[str, int] = {}
    strategy.run(lambda: numbers["the program's own"])


def closed(strategy: tfps.Strategy) -> None:
    strategy.close()
    fit(strategy)


WAYS = {
    "a callback": lambda strategy: fit(strategy, callbacks=(Stop(),)),
    "a step": lambda strategy: fit(strategy, kind=OwnStep),
    "a layer": lambda strategy: fit(strategy, Broken()),
    "a graph": lambda strategy: fit(strategy, Checked()),
    "a file": lambda strategy: fit(strategy, path="/nowhere/model.keras"),
    "a loop": loop,
    "a setting": lambda strategy: tfps.Config(slice_bytes=-1),
    "an address": lambda strategy: tfps.Strategy("localhost:1"),
    "a closed strategy": closed,
}


@pytest.mark.parametrize("what", WAYS)
def test_an_error_that_ends_the_program_is_shown_without_frames_of_tfps(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = tfps.Strategy()
    try:
        with pytest.raises(Exception) as caught:  # each of its own class
            WAYS[what](strategy)
        capsys.readouterr()
        sys.excepthook(caught.type, caught.value, caught.value.__traceback__)  # what Python calls at the end
        shown = capsys.readouterr().err.partition("Graph execution error")[0]  # whose text has where ops were made
        assert f'File "{__file__}"' in shown
        assert OWN not in shown, shown
    finally:
        strategy.close()


def test_all_frames_are_shown_once_filtering_is_off(capsys: pytest.CaptureFixture[str]) -> None:
    tf.debugging.disable_traceback_filtering()
    try:
        with pytest.raises(tfps.ConfigError) as caught:
            tfps.Strategy("localhost:1")
        sys.excepthook(caught.type, caught.value, caught.value.__traceback__)
        assert OWN in capsys.readouterr().err
    finally:
        tf.debugging.enable_traceback_filtering()


def test_a_program_that_catches_an_error_of_fit_gets_it_with_one_frame_of_tfps_at_most() -> None:
    strategy = tfps.Strategy()
    try:
        with pytest.raises(LookupError) as caught:
            fit(strategy, kind=OwnStep)
        assert sum(str(each.path).startswith(OWN) for each in caught.traceback) <= 1
    finally:
        strategy.close()


def test_a_fault_of_tfps_keeps_the_frames_that_tell_where_it_is() -> None:
    with pytest.raises(TypeError) as caught:
        errors.in_graph_error(5)  # type: ignore[arg-type]
    assert any(str(each.path).startswith(OWN) for each in caught.traceback)
    errors.outlined(caught.value)
    trace = caught.value.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_frame.f_code.co_filename == errors.__file__
