"""Bytes of tensors, gates, and pulls that are pruned when nothing uses them."""

from __future__ import annotations

import gc
import threading

import jobs
import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.graph import ops as graph_ops
from tfps.types import Value

EXACT = [tf.float32, tf.float64, tf.int32, tf.int64, tf.int16, tf.int8, tf.uint8, tf.float16, tf.bfloat16]


@pytest.mark.parametrize("dtype", EXACT, ids=lambda dtype: dtype.name)
def test_bytes_of_a_tensor_come_back_as_the_same_values(dtype: tf.DType) -> None:
    values = tf.cast(tf.constant([[0, 1, 2], [3, 100, 7]]), dtype)
    data = graph_ops.to_bytes(values)
    assert data.dtype == tf.uint8
    assert data.shape == [6 * graph_ops.wire_dtype(dtype).size]
    back = tf.cast(graph_ops.from_bytes(data, dtype), dtype)
    np.testing.assert_array_equal(tf.reshape(back, [2, 3]), values)


def test_half_precision_travels_as_float32_so_that_a_sum_rounds_once() -> None:
    assert graph_ops.wire_dtype(tf.float16) == graph_ops.wire_dtype(tf.bfloat16) == tf.float32


def test_a_dtype_that_cannot_be_summed_is_refused_by_name() -> None:
    with pytest.raises(tfps.UnsupportedError, match="string"):
        graph_ops.to_bytes(tf.constant(["a"]))


def test_what_goes_to_a_gpu_is_copied_on_the_host_first_and_nothing_else_is() -> None:
    def copies(*devices: str) -> list[str]:
        function = tf.function(lambda data: tf.identity(graph_ops.for_devices(data, devices)), autograph=False)
        made = function.get_concrete_function(tf.TensorSpec([None], tf.uint8))
        assert made(tf.constant([3, 5], tf.uint8)).numpy().tolist() == [3, 5]
        return [op.device for op in made.graph.get_operations() if op.type == "DeepCopy"]

    assert copies("/job:localhost/replica:0/task:0/device:CPU:0") == []
    assert copies("/device:CPU:0", "/job:localhost/replica:0/task:0/device:GPU:1") == [graph_ops.HOST]


@pytest.mark.parametrize("offset", [0, 1, 8], ids=lambda offset: f"offset {offset}")
def test_an_array_becomes_a_tensor_whatever_its_alignment(offset: int) -> None:
    raw = np.arange(256, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + offset
    array = raw[start : start + 64]
    np.testing.assert_array_equal(graph_ops.tensor_of(array), array)
    array.flags.writeable = False
    np.testing.assert_array_equal(graph_ops.tensor_of(array), array)


def test_a_closed_gate_holds_eager_readers_until_it_opens() -> None:
    gate = graph_ops.Gate("v")
    assert not gate.closed
    assert gate.wait() == ""
    gate._queue.dequeue()
    assert gate.closed
    tokens: list[str] = []
    reader = threading.Thread(target=lambda: tokens.append(gate.wait()))
    reader.start()
    gate.open("why not")
    reader.join(30)
    assert tokens == ["why not"]
    assert gate.wait() == "why not", "every later reader is told as well"


def test_a_gate_with_an_error_raises_it_in_the_graph() -> None:
    gate = graph_ops.Gate("v")
    variable = tf.Variable([1.0])

    @tf.function(autograph=False)
    def read() -> Value:
        graph_ops.pass_gate(gate, [variable.handle], [])
        return variable.read_value()

    assert read() == [1.0]
    gate._queue.dequeue()
    gate.open("rank 1 is gone")
    with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1 is gone"):
        read()


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
def test_a_pull_sends_only_if_its_result_is_used(used: bool) -> None:
    messages = tf.queue.FIFOQueue(10, graph_ops.MESSAGE)

    def reply() -> None:
        _, graph_run, _, indices, _, results = messages.dequeue()
        graph_ops.answer(results, ["", graph_run, np.array([7], np.uint8), indices])

    if used:
        threading.Thread(target=reply, daemon=True).start()

    @tf.function(autograph=False)
    def step(value: Value) -> Value:
        data, _ = graph_ops.pull(messages.queue_ref, 3, graph_ops.to_bytes(value), tf.constant([], tf.uint8))
        return (data if used else value), tf.constant(1)

    np.testing.assert_array_equal(step(tf.constant([5], tf.uint8))[0], [7 if used else 5])
    assert int(messages.size()) == 0


def test_a_pull_refuses_the_reply_that_a_stopped_step_has_left_behind() -> None:
    messages = tf.queue.FIFOQueue(10, graph_ops.MESSAGE)

    def reply() -> None:
        *_, results = messages.dequeue()
        graph_ops.answer(results, ["", np.int64(1), np.array([7], np.uint8), np.empty(0, np.uint8)])

    threading.Thread(target=reply, daemon=True).start()

    @tf.function(autograph=False)
    def step(value: Value) -> Value:
        return graph_ops.pull(messages.queue_ref, 3, graph_ops.to_bytes(value), tf.constant([], tf.uint8))[0]

    with pytest.raises((tf.errors.InvalidArgumentError, tfps.TfpsError), match="reply to another step"):
        step(tf.constant([5], tf.uint8))


def test_a_pull_keeps_its_queue_from_run_to_run_and_each_pull_has_its_own() -> None:
    """So the reply that a stopped run has left behind is found, and never another pull's."""
    messages = tf.queue.FIFOQueue(10, graph_ops.MESSAGE)
    answered: dict[int, list[Value]] = {}

    def replies() -> None:
        for _ in range(4):
            transfer, graph_run, data, indices, _, results = messages.dequeue()
            answered.setdefault(int(transfer), []).append(results)
            graph_ops.answer(results, ["", graph_run, data, indices])

    thread = threading.Thread(target=replies, daemon=True)
    thread.start()

    @tf.function(autograph=False)
    def step(value: Value) -> Value:
        data, empty = graph_ops.to_bytes(value), tf.constant([], tf.uint8)
        return [graph_ops.pull(messages.queue_ref, transfer, data, empty)[0] for transfer in (3, 4)]

    for number in (5, 6):
        np.testing.assert_array_equal(step(tf.constant([number], tf.uint8)), [[number], [number]])
    thread.join(60)
    (first, again), (other, _) = answered[3], answered[4]
    assert not any(int(tf.raw_ops.QueueSizeV2(handle=queue)) for queue in (first, again, other))
    graph_ops.answer(first, ["", np.int64(1), np.array([7], np.uint8), np.empty(0, np.uint8)])
    assert [int(tf.raw_ops.QueueSizeV2(handle=queue)) for queue in (first, again, other)] == [1, 1, 0]


def test_the_reply_to_a_function_that_is_gone_is_dropped() -> None:
    messages = tf.queue.FIFOQueue(10, graph_ops.MESSAGE)
    came: list[Value] = []

    def reply() -> None:
        _, graph_run, data, indices, _, results = messages.dequeue()
        graph_ops.answer(results, ["", graph_run, data, indices])
        came.append(results)

    thread = threading.Thread(target=reply, daemon=True)
    thread.start()

    def run() -> None:
        @tf.function(autograph=False)
        def step(value: Value) -> Value:
            return graph_ops.pull(messages.queue_ref, 3, graph_ops.to_bytes(value), tf.constant([], tf.uint8))[0]

        step(tf.constant([5], tf.uint8))

    run()
    thread.join(60)

    def gone() -> bool:
        gc.collect()
        try:
            return int(tf.raw_ops.QueueSizeV2(handle=came[0])) < 0
        except tf.errors.NotFoundError:
            return True

    jobs.poll(gone)
    graph_ops.answer(came[0], ["", np.int64(1), np.array([7], np.uint8), np.empty(0, np.uint8)])


def test_what_a_run_needs_is_what_its_outputs_and_stateful_ops_need() -> None:
    counter = tf.Variable(0.0)

    @tf.function(autograph=False)
    def step(value: Value) -> Value:
        returned, added = tf.multiply(value, 2.0, name="returned"), tf.multiply(value, 3.0, name="added")
        tf.multiply(value, 4.0, name="unused")
        counter.assign_add(added)
        return returned

    found = graph_ops.needed(step.get_concrete_function(tf.constant(1.0)).graph)
    assert {"returned", "added"} <= found
    assert "unused" not in found
