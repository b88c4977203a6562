"""Parts of traced functions: what XLA gets, what stays, and what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

from tfps.graph import kernels
from tfps.graph.ops import before, in_order
from tfps.graph.parts import NAME, Parts, Traced
from tfps.types import Argument, Structure, Value

CPU = "/device:CPU:0"


def in_parts(function: Callable[..., Structure]) -> tuple[Value, list[Parts]]:
    """`function`, whose ops are moved into parts when it is traced, and these."""
    made: list[Parts] = []

    def traced(*given: tf.Tensor) -> Structure:
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        results = function(*given)
        made.append(Parts(Traced(graph, begin, results), CPU))
        return made[-1].moved(results)

    return tf.function(traced, autograph=False), made


def deep(x: Value) -> Value:
    for _ in range(4):
        x = tf.sigmoid(x) * x + tf.reshape(tf.tanh(x), tf.shape(x))
    return x


def random(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape), tf.float32)


def check(function: Callable[..., Structure], *given: tf.Tensor) -> list[Parts]:
    """Compares with `function` as it is; returns the parts."""
    compiled, made = in_parts(function)
    for expected, found in zip(tf.nest.flatten(function(*given)), tf.nest.flatten(compiled(*given)), strict=True):
        np.testing.assert_allclose(expected, found, rtol=1e-5)
    return made


def types_in(parts: Parts) -> set[str]:
    """The types of the ops that functions of the parts have."""
    graph = parts.parts[0].call.graph.as_graph_def()
    functions = [each for each in graph.library.function if NAME in each.signature.name]
    return {node.op for each in functions for node in each.node_def}


def test_a_function_of_elementwise_ops_is_one_part_that_xla_compiles() -> None:
    (parts,) = check(deep, random(3, 4))
    (part,) = parts.parts
    assert part.call.get_attr("_XlaMustCompile")
    assert part.ops > 10
    assert {"Sigmoid", "Tanh", "Reshape"} <= types_in(parts)


def test_sizes_and_constants_are_made_in_each_part_so_that_rows_need_not_be_known() -> None:
    compiled, made = in_parts(lambda x: deep(tf.reshape(x, [-1, 2])))
    signature = tf.TensorSpec([None, 4], tf.float32)
    concrete = tf.function(compiled.python_function, autograph=False).get_concrete_function(signature)
    for rows in (3, 5):
        np.testing.assert_allclose(concrete(random(rows, 4)), deep(tf.reshape(random(rows, 4), [-1, 2])), rtol=1e-5)
    (part,) = made[0].parts  # which sizes do not divide
    assert {each.dtype for each in part.call.inputs} == {tf.float32}


def test_what_has_state_or_no_kernel_or_strings_stays() -> None:
    variable = tf.Variable(2.0)

    def function(x: Value) -> Value:
        x = deep(x)
        variable.assign_add(tf.reduce_sum(x))
        text = tf.strings.as_string(x)
        x = deep(tf.numpy_function(lambda value: value, [x], tf.float32))
        x = tf.ensure_shape(x, [3, 4])
        return deep(x) * variable, tf.strings.length(text)

    compiled, made = in_parts(function)
    compiled(random(3, 4))
    assert len(made[0].parts) > 1
    assert not types_in(made[0]) & {"PyFunc", "AsString", "ReadVariableOp", "AssignAddVariableOp", "StringLength"}
    np.testing.assert_allclose(variable, 2 + tf.reduce_sum(deep(random(3, 4))), rtol=1e-5)


def test_branches_and_loops_stay_and_take_what_parts_return() -> None:
    def function(x: Value) -> Value:
        x = deep(x)
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: deep(x), lambda: -deep(x))
        (x,) = tf.while_loop(lambda x: tf.reduce_sum(x) < 100.0, lambda x: (x + 1.0,), (x,))
        return deep(x)

    (parts,) = check(function, random(3, 4))
    assert len(parts.parts) == 2


@pytest.mark.parametrize(
    "select",
    [
        lambda x: tf.boolean_mask(x, x[:, 0] > 0),
        lambda x: tf.gather(x, tf.unique(tf.cast(x[:, 0] > 0, tf.int32))[0]),
        lambda x: tf.gather_nd(x, tf.where(x[:, 0] > 0)),
    ],
)
def test_what_returns_as_many_values_as_data_says_stays_until_its_size_is_known(
    select: Callable[[Value], Value],
) -> None:
    def function(x: Value) -> Value:
        chosen = deep(select(deep(x)))
        mean = tf.reduce_sum(chosen) / tf.cast(tf.shape(chosen)[0], tf.float32)
        return deep(mean * x)

    (parts,) = check(function, random(6, 4))
    assert parts.unsized
    assert len(parts.parts) == 2
    assert not types_in(parts) & {"Where", "Unique", "GatherNd"}
    compiled, _ = in_parts(function)
    unknown = tf.function(compiled.python_function, autograph=False, input_signature=[tf.TensorSpec([None, 4])])
    for rows in (6, 8):
        np.testing.assert_allclose(unknown(random(rows, 4)), function(random(rows, 4)), rtol=1e-5)


def padded(x: Value, unknown: bool) -> Value:
    by = [[0, 0], [1, 1]]
    return tf.pad(x, tf.cast(tf.reduce_max(x[:, :2], 0) > 9, tf.int32)[:, None] + by if unknown else by)


def chosen(x: Value, unknown: bool) -> Value:
    few = tf.cast(tf.reduce_sum(x) * 0, tf.int32) + 2
    boxes = [x, x[:, 0], few, 0.5, 0.0]
    return tf.raw_ops.NonMaxSuppressionV4(
        **dict(zip(("boxes", "scores", "max_output_size", "iou_threshold", "score_threshold"), boxes, strict=True)),
        pad_to_max_output_size=not unknown,
    )[0]


@pytest.mark.parametrize("order", [(False, True), (True, False)], ids=str)
@pytest.mark.parametrize("op", [padded, chosen], ids=("constant input", "attribute"))
def test_whether_data_decides_about_sizes_is_asked_for_each_op_in_any_order(
    op: Callable[[Value, bool], Value], order: tuple[bool, bool]
) -> None:
    kernels._found.clear()
    for unknown in order:
        with tf.Graph().as_default():
            made = op(tf.compat.v1.placeholder(tf.float32, [None, 4]), unknown).op
            assert kernels.is_sized_by_values(made, made.node_def) == unknown


def test_control_edges_into_and_out_of_a_part_hold() -> None:
    seen: list[str] = []

    def note(what: str) -> tf.Tensor:
        def noted() -> Value:
            seen.append(what)
            return np.float32(0)

        return tf.numpy_function(noted, [], tf.float32)

    def function(x: Value) -> Value:
        with tf.control_dependencies([note("before")]):
            x = tf.sigmoid(x)
        x = deep(x)
        with tf.control_dependencies([x]):
            return note("after")

    compiled, made = in_parts(lambda x: (function(x), deep(x)))
    compiled(random(3, 4))
    assert seen == ["before", "after"]
    (part,) = made[0].parts
    graph = part.call.graph
    before, after = (op for op in graph.get_operations() if "PyFunc" in op.type)
    assert before in part.call.control_inputs
    assert part.call in after.control_inputs


def test_a_read_after_an_assignment_of_what_a_part_computes_needs_no_circle() -> None:
    state = tf.Variable(tf.zeros([3, 4]))

    def function(x: Value) -> Value:
        before = deep(x)
        state.assign(before)  # TensorFlow orders the read behind it when the function is complete
        return deep(state.read_value()) + before

    (parts,) = check(function, random(3, 4))
    assert len(parts.parts) == 2


def test_a_large_constant_is_an_argument_and_not_in_each_part() -> None:
    table = np.ones([256, 256], np.float32)
    (parts,) = check(lambda x: deep(deep(x) @ tf.constant(table)), random(3, 256))
    assert sum(each.op.type == "Const" for each in parts.parts[0].call.inputs) == 1


@pytest.mark.parametrize("dtype", [tf.float64, tf.bfloat16, tf.int64])
def test_ops_are_compiled_by_their_types(dtype: Argument) -> None:
    def function(x: Value) -> Value:
        x = tf.cast(x, dtype)
        for _ in range(3):
            x = x * x + tf.cast(2, dtype)
        return tf.cast(x, tf.float32)

    (parts,) = check(function, tf.round(random(3, 4)))
    assert len(parts.parts) == 1


def test_what_a_program_puts_on_another_device_stays() -> None:
    def function(x: Value) -> Value:
        x = deep(x)
        with tf.device("GPU:0"):
            x = tf.exp(x)
        return deep(x)

    compiled, made = in_parts(function)
    compiled.get_concrete_function(tf.TensorSpec([3, 4]))
    assert len(made[0].parts) == 2
    assert "Exp" not in types_in(made[0])


def test_ops_in_order_come_after_what_was_made_later_and_is_before_them() -> None:
    compiled, _ = in_parts(lambda x: tf.strings.as_string(deep(tf.numpy_function(lambda x: x, [deep(x)], tf.float32))))
    graph = compiled.get_concrete_function(tf.TensorSpec([3, 4])).graph
    names = [op.name for op in in_order(graph)]
    assert sorted(names) == sorted(op.name for op in graph.get_operations())
    place = {name: number for number, name in enumerate(names)}
    assert all(place[each.name] < place[op.name] for op in graph.get_operations() for each in before(op))
    assert names != [op.name for op in graph.get_operations()]


def test_what_is_computed_from_the_values_of_a_ragged_batch_stays_until_its_size_is_that_of_the_rows() -> None:
    made: list[Parts] = []

    @tf.function(autograph=False, input_signature=[tf.RaggedTensorSpec([None, None], tf.float32)])
    def function(ragged: tf.RaggedTensor) -> Value:
        graph = tf.compat.v1.get_default_graph()
        begin = len(graph.get_operations())
        sums = tf.reduce_sum(ragged.with_flat_values(deep(ragged.flat_values)))
        results = deep(sums)
        made.append(Parts(Traced(graph, begin, results, arguments=ragged), CPU))
        return made[-1].moved(results)

    for rows in ([[1.0, 2.0], [3.0]], [[1.0], [2.0, 3.0, 4.0]]):
        ragged = tf.ragged.constant(rows)
        np.testing.assert_allclose(function(ragged), deep(tf.reduce_sum(deep(ragged.flat_values))), rtol=1e-5)
    (part,) = made[0].parts
    assert all(each.shape.is_fully_defined() for each in part.call.inputs)
