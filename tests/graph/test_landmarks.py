"""What is found in a traced step: TensorFlow's names and graphs may change with every version of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

from tfps.graph.timestamps import Landmarks
from tfps.types import Array, Value

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense() -> keras.Model:
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(8, use_bias=False), keras.layers.Dense(10)]
    return keras.Sequential([keras.layers.Input((4,)), *layers])


def convolutions() -> keras.Model:
    layers = [
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
    return keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])


def embedded_words() -> keras.Model:
    layers = [keras.layers.Embedding(20, 8), keras.layers.LSTM(8), keras.layers.LayerNormalization()]
    return keras.Sequential([keras.layers.Input((6,)), *layers, keras.layers.Dense(10)])


def forward(model: keras.Model, x: Value, y: Value) -> Value:
    return LOSS(y, model(x, training=True))


def tape(model: keras.Model, x: Value, y: Value) -> Value:
    with tf.GradientTape() as tape:
        loss = forward(model, x, y)
    return tape.gradient(loss, [variable.value for variable in model.trainable_variables])


def gradients(model: keras.Model, x: Value, y: Value) -> Value:
    return tf.gradients(forward(model, x, y), [variable.value for variable in model.trainable_variables])


def named_scope(model: keras.Model, x: Value, y: Value) -> Value:
    with tf.name_scope("step"):
        return tape(model, x, y)


Step = Callable[[keras.Model, Array, Array], Value]
WAYS: list[Step] = [tape, gradients, named_scope]
by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
by_model = pytest.mark.parametrize("build", [dense, convolutions, embedded_words], ids=lambda build: build.__name__)


def traced(model: keras.Model, step: Step) -> tuple[tf.Graph, list[tf.Tensor]]:
    """The graph of `step`, and its inputs."""
    specs = [tf.TensorSpec((16, *model.input_shape[1:])), tf.TensorSpec((16,), tf.int64)]
    function = tf.function(lambda x, y: step(model, x, y), autograph=False)
    concrete = function.get_concrete_function(*specs)
    return concrete.graph, concrete.inputs[: len(specs)]


def types(operations: Sequence[tf.Operation]) -> list[str]:
    """Without constants, and without calls: a tape calls other functions, which keep what it needs."""
    return [op.type for op in operations if op.type not in ("Const", "NoOp", "Identity") and not calls(op)]


def calls(op: tf.Operation) -> bool:
    return "PartitionedCall" in op.type or "While" in op.type


@by_way
@by_model
def test_backward_begins_after_all_of_forward(build: Callable[[], keras.Model], way: Step) -> None:
    model = build()
    alone, _ = traced(model, forward)
    graph, inputs = traced(model, way)
    found = Landmarks(graph, inputs).backward
    assert found is not None
    assert types(graph.get_operations()[:found]) == types(alone.get_operations())


@by_model
def test_a_forward_pass_alone_has_no_backward_pass(build: Callable[[], keras.Model]) -> None:
    landmarks = Landmarks(*traced(build(), forward))
    assert landmarks.backward is None
    assert landmarks.last_of_forward() == []


@by_way
@by_model
def test_forward_ends_with_tensors_that_backward_uses(build: Callable[[], keras.Model], way: Step) -> None:
    graph, inputs = traced(build(), way)
    landmarks = Landmarks(graph, inputs)
    assert landmarks.backward is not None
    operations = graph.get_operations()
    before, after = set(operations[: landmarks.backward]), set(operations[landmarks.backward :])
    found = landmarks.last_of_forward()
    assert 0 < len(found) <= 4
    for tensor in found:
        assert tensor.op in before
        assert after & set(tensor.consumers())
        assert tensor.shape.rank


def uses(model: keras.Model, way: Step) -> dict[str, list[str]]:
    """By trainable variable: the types of ops of what it is first computed with."""
    graph, inputs = traced(model, way)
    landmarks = Landmarks(graph, inputs)
    handles = {id(outer): inner for outer, inner in graph.captures}
    return {
        variable.path: [each.op.type for each in landmarks.first_use(handles[id(variable.value.handle)])]
        for variable in model.trainable_variables
    }


@by_way
def test_a_layer_uses_its_variables_with_what_the_layer_before_has_made(way: Step) -> None:
    found = uses(dense(), way)
    assert list(found.values()) == [
        ["Placeholder"],  # the first kernel
        ["Placeholder"],  # its bias: the product is fused with it, so what counts is the product's input
        ["Relu"],
        ["MatMul"],
        ["MatMul"],
    ]


@by_way
def test_convolutions_and_normalizations_use_their_variables_with_activations(way: Step) -> None:
    kernel, bias, *normalization, last_kernel, last_bias = uses(convolutions(), way).values()
    assert [kernel, bias, last_kernel, last_bias] == [["Placeholder"], ["Placeholder"], ["Reshape"], ["Reshape"]]
    assert all(normalization), "with what depends on the version"


def test_every_use_is_found_in_models_with_loops() -> None:
    found = uses(embedded_words(), tape)
    assert [name for name, types in found.items() if not types] == []


@by_way
def test_a_second_step_in_a_graph_is_looked_at_alone(way: Step) -> None:
    model = dense()
    alone, inputs = traced(model, way)
    once = Landmarks(alone, inputs)

    def twice(model: keras.Model, x: Value, y: Value) -> Value:
        return [way(model, x, y), way(model, x, y)]

    graph, inputs = traced(model, twice)
    second = Landmarks(graph, inputs, since=once.ops)
    assert once.backward is not None
    assert second.backward is not None
    assert second.backward > once.ops
    own = set(graph.get_operations()[once.ops : second.backward])
    assert second.last_of_forward()
    assert {each.op for each in second.last_of_forward()} <= own
    assert Landmarks(graph, inputs, since=second.ops).backward is None
