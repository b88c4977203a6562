"""Notes of the clock in a traced step: where they are, and that they leave the ops that they observe alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.graph.ops import PASS, SEND, called

NOTE = "tfps_now"


def convolutions() -> keras.Model:
    """What TensorFlow likes to fuse: convolutions and products with bias and activation."""
    layers = [
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.Conv2D(8, 3, activation="relu", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])


def embedded_words() -> keras.Model:
    layers = [keras.layers.Embedding(20, 8), keras.layers.LSTM(8), keras.layers.LayerNormalization()]
    return keras.Sequential([keras.layers.Input((8,)), *layers, keras.layers.Dense(10)])


@pytest.fixture(scope="module", params=[convolutions, embedded_words], ids=lambda build: build.__name__)
def graph(request: pytest.FixtureRequest) -> Iterator[tf.Graph]:
    """The graph of a training step whose buckets have one variable or two."""
    strategy = tfps.Strategy(config=tfps.Config(slice_bytes=1024))
    strategy.extended.scheduler._first_bytes = 64
    with strategy.scope():
        model = request.param()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.ones((16, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros(16, "int64"), verbose=0)
    (reference,) = strategy.extended.scheduler.graphs.values()
    yield reference()
    strategy.close()


def test_a_note_waits_for_nothing_that_could_be_fused(graph: tf.Graph) -> None:
    notes = [op for op in graph.get_operations() if called(op) == NOTE]
    assert len(notes) > 6
    for note in notes:
        assert note.type == "PartitionedCall", "a stateful call would be ordered with all others"
        for waited in note.control_inputs:
            assert waited.type in ("StridedSlice", "Placeholder") or called(waited) == PASS, waited
            if waited.type == "StridedSlice":
                probed = waited.inputs[0]
                others = [op for op in probed.consumers() if op.type != "StridedSlice"]
                # Of ops with several results none is fused; others have another use in the backward pass.
                assert len(others) >= 2 or len(probed.op.outputs) > 1, probed
                assert waited.outputs[0].consumers() == []


def test_sends_know_when_their_variable_was_wanted_and_one_knows_the_step(graph: tf.Graph) -> None:
    sends = [op for op in graph.get_operations() if called(op) == SEND]
    known = []
    for send in sends:
        times = send.inputs[5].op
        assert times.type == "Pack", "nearly every layer computes with something else besides its variables"
        known.append([tf.get_static_value(each) is None for each in times.inputs])
    assert sorted(known)[-1] == [True, True, True, True], "the first layer's says when the forward pass was"
    assert known.count([True] * 4) == 1
    assert known.count([False, False, True, True]) == len(sends) - 1


def test_a_read_is_wanted_when_what_it_is_computed_with_is_there(graph: tf.Graph) -> None:
    wanted_after: list[str] = []
    for send in (op for op in graph.get_operations() if called(op) == SEND):
        _, _, wanted, opened = (each.op for each in send.inputs[5].op.inputs)
        assert [called(op) for op in opened.control_inputs] == [PASS]
        before = [op.inputs[0].op if op.type == "StridedSlice" else op for op in wanted.control_inputs]
        assert not any("gradient_tape" in op.name for op in before)
        wanted_after += [op.type for op in before]
    if "conv2d" in str([op.name for op in graph.get_operations()]):
        # Each layer computes with what the one before it has made.
        assert wanted_after[:3] == ["Placeholder", "Placeholder", "Relu"]
        assert wanted_after[-2:] == ["Reshape", "Relu"]
