"""Programs that call tf.config.experimental.enable_op_determinism, which refuses the clock that steps are timed by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import training
from tensorflow.python.framework import config as framework  # the public module cannot turn it off again

import tfps
from tfps.types import Value


@pytest.fixture(autouse=True)
def op_determinism() -> Iterator[None]:
    tf.config.experimental.enable_op_determinism()
    yield
    framework.disable_op_determinism()


def trained(strategy: tfps.Strategy | None, table: bool = False) -> tuple[list[bytes], Value]:
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    images, labels = training.digits(75)
    words = (images[:, :6] * 16).astype("int64")
    with strategy.scope() if strategy else contextlib.nullcontext():
        rows, ids = keras.Input((64,)), keras.Input((6,), dtype="int64")
        embedding = tfps.layers.Embedding(17, 4) if table else keras.layers.Embedding(17, 4)
        dense = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="relu")(rows))
        both = [keras.layers.Dropout(0.2)(dense), keras.layers.Flatten()(embedding(ids))]
        model = keras.Model([rows, ids], keras.layers.Dense(10)(keras.layers.Concatenate()(both)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices(((images, words), labels)).shuffle(75).batch(16)
    history = model.fit(dataset, epochs=2, verbose=0).history
    return [np.asarray(weight).tobytes() for weight in model.get_weights()], history


def test_training_and_a_recording_of_it_are_bitwise_plain_keras(
    strategy: tfps.Strategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(None)
    with caplog.at_level("INFO", "tfps"), strategy.trace(tmp_path):
        assert trained(strategy) == expected
    assert "no steps and no waits" in caplog.text  # a capture that lacks them says so
    assert "recorded no training step" in caplog.text
    assert strategy.report().step_s > 0  # this needs no clock in the graph


@pytest.mark.long
def test_two_runs_with_a_table_and_updates_on_the_server_are_bitwise_equal() -> None:
    runs = []
    for _ in range(2):
        strategy = tfps.Strategy(config=tfps.Config(update="server"))
        runs.append(trained(strategy, table=True))
        strategy.close()
    assert runs[0] == runs[1]
