"""What overlaps if XLA compiles a step in parts. Asserted on order and on the graph, not on clocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import jobs
import keras
import numpy as np
import pytest
import tensorflow as tf
from recorded import sends, spans

import tfps
from tfps.graph.ops import PASS, SEND, before, called, needed, outside
from tfps.graph.parts import Part
from tfps.trace.capture import Span
from tfps.trace.recorder import Recorder
from tfps.types import Array, Structure, Value

BLOCKS, UNITS = 4, 32
BLOCK_BYTES = 4 * UNITS * UNITS


class Block(keras.layers.Layer):
    """Enough ops for a part. Tells `on_forward` when it has been computed; backward passes through `on_backward`."""

    def __init__(self, number: int, on_forward: Callable[[int], object], on_backward: Callable[[], object]) -> None:
        super().__init__(name=f"block{number}")
        self.dense = keras.layers.Dense(UNITS, use_bias=False)
        self.number, self.on_forward, self.on_backward = number, on_forward, on_backward

    def build(self, shape: object) -> None:
        self.dense.build(shape)

    def call(self, inputs: Structure) -> Value:
        x = self.dense(inputs)
        for _ in range(3):
            x = keras.ops.sigmoid(x) * x + keras.ops.tanh(x)

        def noted(_: Array) -> Value:
            self.on_forward(self.number)
            return np.float32(0)

        def held(value: Array) -> Array:
            self.on_backward()
            return value

        @tf.custom_gradient
        def watched(value: Value) -> Value:
            # Beside the path: it must not divide a part.
            tf.numpy_function(noted, [value[:1, :1]], tf.float32)

            def gradient(upstream: Value) -> Value:
                if self.number != 0:
                    return upstream
                result = tf.numpy_function(held, [upstream], upstream.dtype)
                result.set_shape(upstream.shape)
                return result

            return tf.identity(value), gradient

        return watched(x)


def build(strategy: tfps.Strategy, passes: list[int], on_backward: Callable[[], object] = lambda: None) -> keras.Model:
    add = passes.append  # Keras would copy a list
    with strategy.scope():
        blocks = [Block(number, add, on_backward) for number in range(BLOCKS)]
        model = keras.Sequential([keras.layers.Input((UNITS,)), *blocks])
        model.compile("sgd", "mse", jit_compile=True)
    return model


def fit(model: keras.Model, steps: int) -> None:
    data = np.random.default_rng(0).random((8 * steps, UNITS), np.float32)
    model.fit(data, data, batch_size=8, verbose=0, shuffle=False)


def started(part_bytes: int) -> tfps.Config:
    return tfps.Config(
        slice_bytes=BLOCK_BYTES, window_bytes=4 * BLOCK_BYTES, step_timeout_s=60, xla_part_bytes=part_bytes
    )


def test_the_next_forward_pass_runs_up_to_the_part_that_waits_for_the_last_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with companion.strategy_with_companion(monkeypatch, started(BLOCK_BYTES)) as (strategy, other):
        passes: list[int] = []
        model = build(strategy, passes)
        fit(model, 1)
        model.get_weights()
        recorder = strategy._runtime.recorder
        recorder.start()
        ahead, behind, released, ended = companion.passes_while_held(other, lambda: fit(model, 2), passes, BLOCKS - 1)
        assert ahead
        assert (behind, released) == (1, 1), "the last block must wait for its own reply"
        assert ended
        check_recorded(strategy.extended.compiled.made[-1].parts, recorder)


def check_recorded(parts: Sequence[Part], recorder: Recorder) -> None:
    """A trace shows that in the second step the part of the last block alone waited for the reply that was held."""
    ran: dict[int, list[Span]] = {}

    def all_recorded() -> bool:
        ran.clear()
        for span in spans(recorder):
            if span.kind == "part":
                ran.setdefault(span.slice, []).append(span)
        return len(ran) == len(parts) and all(len(each) == 2 for each in ran.values())

    assert companion.wait_until(all_recorded)
    held = min(span.begin_ns for span in spans(recorder) if span.kind == "update" and span.priority == BLOCKS - 1)
    forward = {each.waits: ran[number][1] for number, each in enumerate(parts) if each.sends == BLOCKS - 1}
    assert sorted(forward) == list(range(BLOCKS))
    for waits, span in forward.items():
        assert span.begin_ns > held if waits == BLOCKS - 1 else span.end_ns < held


def test_one_part_would_make_the_whole_forward_pass_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, started(BLOCKS * BLOCK_BYTES)) as (strategy, other):
        passes: list[int] = []
        model = build(strategy, passes)
        fit(model, 1)
        model.get_weights()
        last = max(other.specs, key=lambda spec: spec.priority)
        other.holds = lambda spec: spec is last
        passes.clear()
        trainer = threading.Thread(target=fit, args=(model, 2))
        trainer.start()
        assert other.wait_held()
        assert companion.wait_until(lambda: passes.count(0) == 1)
        assert not companion.wait_until(lambda: passes.count(0) == 2, 0.5), "this test would not tell parts from none"
        other.release()
        trainer.join(jobs.DEADLINE_S)
        assert not trainer.is_alive()


def test_the_first_send_is_seen_before_the_last_gradient_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    with companion.strategy_with_companion(monkeypatch, started(BLOCK_BYTES)) as (strategy, _):
        recorder, sent_before = strategy._runtime.recorder, list[bool]()

        def on_backward() -> None:  # of block 0, the last that backward reaches
            if recorder.enabled:
                sent_before.append(companion.wait_until(lambda: sends(recorder)))

        model = build(strategy, [], on_backward)
        fit(model, 1)
        recorder.start()
        fit(model, 1)
        assert sent_before == [True]


def everything_before(op: tf.Operation) -> Iterator[tf.Operation]:
    seen, waiting = set[str](), [op]
    while waiting:
        if (each := waiting.pop()).name not in seen:
            seen.add(each.name)
            yield each
            waiting += before(each)


def check_notes(graph: tf.Graph, parts: Sequence[Part]) -> None:
    """A variable is wanted when the parts before the one that reads it have ended, no earlier and no later."""
    forward = {each.waits: each.call for each in parts if each.sends == BLOCKS - 1}
    calls = {each.call for each in parts}
    notes = [op for op in graph.get_operations() if called(op) == "tfps_now"]
    found = [calls.intersection(note.control_inputs) for note in notes]
    for number in range(BLOCKS - 1):
        assert {forward[number]} in found, "of the next block"
    assert {forward[BLOCKS - 1]} in found, "of the forward pass"
    assert not {op.type for note in notes for op in note.control_inputs} & {"StridedSlice"}


@pytest.mark.parametrize("accumulation", [None, 2], ids=("each step", "accumulation"))
def test_no_send_waits_for_a_part_of_earlier_layers_nor_a_part_at_gates_of_later_ones(
    monkeypatch: pytest.MonkeyPatch, accumulation: int | None
) -> None:
    with companion.strategy_with_companion(monkeypatch, started(BLOCK_BYTES)) as (strategy, _):
        model = build(strategy, [])
        model.compile(keras.optimizers.SGD(gradient_accumulation_steps=accumulation), "mse", jit_compile=True)
        fit(model, accumulation or 1)
        (made,) = strategy.extended.compiled.made
        parts = {each.call.name: each for each in made.parts}
        assert made.groups == BLOCKS
        assert {(each.waits, each.sends) for each in made.parts} >= {(0, 3), (1, 3), (2, 3), (3, 3), (3, 2), (3, 1)}
        graph = made.parts[0].call.graph
        twice = {op.type for op in graph.get_operations() if op.name in needed(graph)} & {"Sigmoid", "Tanh", "TanhGrad"}
        assert not twice, "parts compute these, and TensorFlow once more"
        gates = {id(gate.handle): gate for gate in strategy._runtime.gate_watch.gates()}
        position = {variable.path: number for number, variable in enumerate(model.trainable_variables)}
        for part in made.parts:
            passed = [gates[id(outside(op.inputs[0]))] for op in everything_before(part.call) if called(op) == PASS]
            names = {name.removesuffix(":0") for gate in passed for name in gate.names}
            assert max((position[name] for name in names), default=-1) <= part.waits
        if accumulation is None:
            check_notes(graph, made.parts)
            found = [op for op in graph.get_operations() if called(op) == SEND]
            assert len(found) == BLOCKS
            for op in found:
                transfer = strategy._runtime.transfer(int(tf.get_static_value(op.inputs[1])))
                data = next(each for each in op.inputs if each.dtype == tf.uint8)
                waits_for = [parts[each.name] for each in everything_before(data.op) if each.name in parts]
                assert waits_for
                assert transfer is not None
                assert min(each.sends for each in waits_for) == transfer.spec.priority
